// y = w x for many rows of x, in tiles.  S256 of zinc_attn/graph/products.py.
//
// Grid: x = rows of w in pieces of TILE_ROWS, y = rows of x in pieces of TILE_COLUMNS, z = planes of y.  A workgroup walks
// along a row block by block, ascending: it decodes a block of its rows of w and x to shared memory, then an invocation
// adds that block to its OWN_ROWS * OWN_COLUMNS outputs.
layout(local_size_x_id = MUL_MAT_SPEC_WORKGROUP_SIZE, local_size_x = 64) in;
layout(constant_id = MUL_MAT_SPEC_TYPE) const uint TYPE = 0u;
layout(constant_id = MUL_MAT_SPEC_TILE_ROWS) const uint TILE_ROWS = 32u;
layout(constant_id = MUL_MAT_SPEC_TILE_COLUMNS) const uint TILE_COLUMNS = 32u;
layout(constant_id = MUL_MAT_SPEC_OWN_ROWS) const uint OWN_ROWS = 4u;  // a multiple of 4
layout(constant_id = MUL_MAT_SPEC_OWN_COLUMNS) const uint OWN_COLUMNS = 4u;
layout(constant_id = MUL_MAT_SPEC_ADD) const uint ADD = 0u;
layout(set = 0, binding = MUL_MAT_BIND_PARAMS, std430) restrict readonly buffer Params { MulMatParams p; };
layout(set = 0, binding = MUL_MAT_BIND_W, std430) readonly buffer W16 { uvec4 w16[]; };
layout(set = 0, binding = MUL_MAT_BIND_W, std430) readonly buffer W4 { uint w4[]; };
layout(set = 0, binding = MUL_MAT_BIND_Q, std430) readonly buffer Q { uvec4 q[]; };
layout(set = 0, binding = MUL_MAT_BIND_SCALES, std430) readonly buffer Scales { uvec2 scales[]; };
layout(set = 0, binding = MUL_MAT_BIND_ADDED, std430) readonly buffer Added { float added[]; };
layout(set = 0, binding = MUL_MAT_BIND_Y, std430) writeonly buffer Y { float y[]; };
#include "tensor.glsl"
#include "numbers.glsl"
#include "sums.glsl"
#include "dot.glsl"
#include "q_blocks.glsl"

uvec4 piece16(uint i) {
    return load_16(i);
}

uint piece4(uint i) {
    return load_4(i);
}

uint small_piece(uint j) {
    return load_small(j);
}

// Shared memory holds a block as words of four int8, or, without the integer dot product, as float32: their products and
// sums are exact, too, being below 2**24.
#ifdef DOT_PRODUCT
#define VALUE uint
#define SUM int
const uint STEPS = 8u;
#else
#define VALUE float
#define SUM float
const uint STEPS = 32u;
#endif
const uint LANES_ROWS = TILE_ROWS / OWN_ROWS, OWN = OWN_ROWS * OWN_COLUMNS;
shared VALUE tile_w[STEPS * TILE_ROWS], tile_x[STEPS * TILE_COLUMNS];  // (step, row)
shared vec4 of_w[TILE_ROWS];        // block_scales
shared vec2 of_superblock[TILE_ROWS];  // superblock_scale
shared vec3 of_x[TILE_COLUMNS];     // a scale, and the sums of both halves

float total[OWN], inner[OWN], lower[OWN];

// Rows of w that an invocation has, by its number among those of a column: four side by side, then the next four.
uint tile_row(uint own, uint i) {
    return (i / 4u * LANES_ROWS + own) * 4u + i % 4u;
}

void put_w(uint step, uint at, uint w) {
#ifdef DOT_PRODUCT
    tile_w[step * TILE_ROWS + at] = ((w | 0x80808080u) - uint(OFFSET) * 0x01010101u) ^ 0x80808080u;
#else
    [[unroll]] for (uint i = 0u; i < 4u; ++i) {
        tile_w[(4u * step + i) * TILE_ROWS + at] = float(bitfieldExtract(int(w), int(8u * i), 8) - OFFSET);
    }
#endif
}

void put_x(uint step, uint at, uint w) {
#ifdef DOT_PRODUCT
    tile_x[step * TILE_COLUMNS + at] = w;
#else
    [[unroll]] for (uint i = 0u; i < 4u; ++i) {
        tile_x[(4u * step + i) * TILE_COLUMNS + at] = signed_byte(w, i);
    }
#endif
}

void load_tiles(uint j) {
    for (uint i = gl_LocalInvocationIndex; i < TILE_ROWS; i += gl_WorkGroupSize.x) {
        uint m = min(gl_WorkGroupID.x * TILE_ROWS + i, p.y.n[0] - 1u);
        row = find_row(m / WEIGHT_GROUP, m % WEIGHT_GROUP);
        uvec4 low, high;
        decode(j, low, high);
        [[unroll]] for (uint k = 0u; k < 4u; ++k) {
            put_w(k, i, low[k]);
            put_w(k + 4u, i, high[k]);
        }
        of_w[i] = block_scales(j);
        if (IS_256 && j == 0u) {
            of_superblock[i] = superblock_scale();
        }
    }
    for (uint i = gl_LocalInvocationIndex; i < TILE_COLUMNS; i += gl_WorkGroupSize.x) {
        uint n = min(gl_WorkGroupID.y * TILE_COLUMNS + i, p.y.n[1] - 1u);
        uint at = (superblock * 8u + j) * p.y.n[1] * p.y.n[2] * p.y.n[3] + gl_WorkGroupID.z * p.y.n[1] + n;
        [[unroll]] for (uint k = 0u; k < 4u; ++k) {
            put_x(k, i, q[2u * at][k]);
            put_x(k + 4u, i, q[2u * at + 1u][k]);
        }
        of_x[i] = scales_of_x(scales[at]);
    }
}

// Dot products of some steps for each output of an invocation.
void dots(uvec2 own, uint begin, uint end, out SUM sum[OWN]) {
    [[unroll]] for (uint o = 0u; o < OWN; ++o) {
        sum[o] = SUM(0);
    }
    for (uint step = begin; step < end; ++step) {
        VALUE x[OWN_COLUMNS];
        [[unroll]] for (uint n = 0u; n < OWN_COLUMNS; ++n) {
            x[n] = tile_x[step * TILE_COLUMNS + own.y * OWN_COLUMNS + n];
        }
        [[unroll]] for (uint m = 0u; m < OWN_ROWS; ++m) {
            VALUE w = tile_w[step * TILE_ROWS + tile_row(own.x, m)];
            [[unroll]] for (uint n = 0u; n < OWN_COLUMNS; ++n) {
#ifdef DOT_PRODUCT
                sum[m * OWN_COLUMNS + n] = dot4(w, x[n], sum[m * OWN_COLUMNS + n]);
#else
                sum[m * OWN_COLUMNS + n] += w * x[n];
#endif
            }
        }
    }
}

void add_block(uvec2 own) {
    SUM first[OWN], second[OWN];
    dots(own, 0u, HAS_HALVES ? STEPS / 2u : STEPS, first);
    if (HAS_HALVES) {
        dots(own, STEPS / 2u, STEPS, second);
    }
    [[unroll]] for (uint o = 0u; o < OWN; ++o) {
        vec2 both = vec2(first[o], second[o]);
        join(of_w[tile_row(own.x, o / OWN_COLUMNS)], of_x[own.y * OWN_COLUMNS + o % OWN_COLUMNS], both, inner[o], lower[o]);
    }
}

void main() {
    uvec2 own = uvec2(gl_LocalInvocationIndex % LANES_ROWS, gl_LocalInvocationIndex / LANES_ROWS);
    fill_table();
    [[unroll]] for (uint o = 0u; o < OWN; ++o) {
        total[o] = inner[o] = lower[o] = 0.0;
    }
    for (uint b = 0u; b < p.blocks; ++b) {
        superblock = b / 8u;
        load_tiles(b % 8u);
        barrier();
        add_block(own);
        if (b % 8u == 7u || b + 1u == p.blocks) {
            [[unroll]] for (uint o = 0u; o < OWN; ++o) {
                vec2 scale = of_superblock[tile_row(own.x, o / OWN_COLUMNS)];
                total[o] = add(total[o], joined(scale, inner[o], lower[o]));
                inner[o] = lower[o] = 0.0;
            }
        }
        barrier();
    }
    [[unroll]] for (uint o = 0u; o < OWN; ++o) {
        uint m = gl_WorkGroupID.x * TILE_ROWS + tile_row(own.x, o / OWN_COLUMNS);
        store(m, gl_WorkGroupID.y * TILE_COLUMNS + own.y * OWN_COLUMNS + o % OWN_COLUMNS, total[o]);
    }
}
