// y = w x for many rows of x, in tiles.  S256 of zinc_attn/graph/products.py.
//
// Grid: x = rows of w in pieces of TILE_ROWS, y = rows of x in pieces of TILE_COLUMNS, z = planes of y.  A workgroup
// walks along a row block by block, ascending: it decodes a block of its rows of w and x to shared memory, then an
// invocation adds that block to its OWN_ROWS * OWN_COLUMNS outputs.
#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require
#extension GL_EXT_spirv_intrinsics : require
#include "contract.glsl"

layout(local_size_x_id = MUL_MAT_SPEC_WORKGROUP_SIZE, local_size_x = 64) in;
layout(constant_id = MUL_MAT_SPEC_TYPE) const uint TYPE = 0u;
layout(constant_id = MUL_MAT_SPEC_TILE_ROWS) const uint TILE_ROWS = 32u;
layout(constant_id = MUL_MAT_SPEC_TILE_COLUMNS) const uint TILE_COLUMNS = 32u;
layout(constant_id = MUL_MAT_SPEC_OWN_ROWS) const uint OWN_ROWS = 4u;  // a multiple of 4
layout(constant_id = MUL_MAT_SPEC_OWN_COLUMNS) const uint OWN_COLUMNS = 4u;
layout(constant_id = MUL_MAT_SPEC_ADD) const uint ADD = 0u;
layout(constant_id = MUL_MAT_SPEC_EXPERTS) const uint EXPERTS = 0u;
layout(set = 0, binding = MUL_MAT_BIND_PARAMS, std430) restrict readonly buffer Params { MulMatParams p; };
layout(set = 0, binding = MUL_MAT_BIND_W, std430) readonly buffer W16 { uvec4 w16[]; };
layout(set = 0, binding = MUL_MAT_BIND_W, std430) readonly buffer W4 { uint w4[]; };
layout(set = 0, binding = MUL_MAT_BIND_Q, std430) readonly buffer Q { uvec4 q[]; };
layout(set = 0, binding = MUL_MAT_BIND_SCALES, std430) readonly buffer Scales { uvec2 scales[]; };
layout(set = 0, binding = MUL_MAT_BIND_ADDED, std430) readonly buffer Added { float added[]; };
layout(set = 0, binding = MUL_MAT_BIND_IDS, std430) readonly buffer Ids { uint ids[]; };
layout(set = 0, binding = MUL_MAT_BIND_Y, std430) writeonly buffer Y { float y[]; };
#include "tensor.glsl"
#include "numbers.glsl"
const bool TILED = true;
#include "columns.glsl"
#include "sums.glsl"

uint superblock;
#include "q_blocks.glsl"
#include "q_sums.glsl"

uvec4 piece16(uint i) {
    return load_16(i);
}

uint piece4(uint i) {
    return load_4(i);
}

uint small_piece(uint j) {
    return load_small(j);
}

const uint STEPS = X_BLOCK / 4u;  // words of a block
const uint LANES_ROWS = TILE_ROWS / OWN_ROWS, OWN = OWN_ROWS * OWN_COLUMNS;
shared uint tile_w[STEPS * TILE_ROWS], tile_x[STEPS * TILE_COLUMNS];  // (step, row)
shared vec4 of_w[TILE_ROWS];        // block_scales
shared vec2 of_superblock[TILE_ROWS];  // superblock_scale
shared vec3 of_x[TILE_COLUMNS];     // a scale, and the sums of both halves
shared uint numbers[TILE_COLUMNS];  // of columns in x

float total[OWN], inner[OWN], lower[OWN];

// Rows of w that an invocation has, by its number among those of a column: four side by side, then the next four.
uint tile_row(uint own, uint i) {
    return (i / 4u * LANES_ROWS + own) * 4u + i % 4u;
}

// A word of decoded values as the weights' integers. No byte borrows from its neighbor.
uint as_signed(uint w) {
    return OFFSET == 0 ? w : ((w | 0x80808080u) - uint(OFFSET) * 0x01010101u) ^ 0x80808080u;
}

void load_tiles(uint j) {
    for (uint i = gl_LocalInvocationIndex; i < TILE_ROWS; i += gl_WorkGroupSize.x) {
        uint m = min(gl_WorkGroupID.x * TILE_ROWS + i, p.y.n[0] - 1u);
        row = find_row(m / WEIGHT_GROUP, m % WEIGHT_GROUP);
        uvec4 low, high;
        decode(j, low, high);
        [[unroll]] for (uint k = 0u; k < 4u; ++k) {
            tile_w[k * TILE_ROWS + i] = as_signed(low[k]);
            tile_w[(k + 4u) * TILE_ROWS + i] = as_signed(high[k]);
        }
        of_w[i] = block_scales(j);
        if (IS_256 && j == 0u) {
            of_superblock[i] = superblock_scale();
        }
    }
    uint other = (gl_LocalInvocationIndex + gl_WorkGroupSize.x - TILE_ROWS % gl_WorkGroupSize.x) % gl_WorkGroupSize.x;
    for (uint i = other; i < TILE_COLUMNS; i += gl_WorkGroupSize.x) {  // begun by those who have no row of w, or fewer
        uint at = (superblock * 8u + j) * rows_of_x() + numbers[i];
        [[unroll]] for (uint k = 0u; k < 4u; ++k) {
            tile_x[k * TILE_COLUMNS + i] = q[2u * at][k];
            tile_x[(k + 4u) * TILE_COLUMNS + i] = q[2u * at + 1u][k];
        }
        of_x[i] = scales_of_x(scales[at]);
    }
}

// Dot products of some steps for each output of an invocation.
void dots(uvec2 own, uint begin, uint end, out int sum[OWN]) {
    [[unroll]] for (uint o = 0u; o < OWN; ++o) {
        sum[o] = 0;
    }
    for (uint step = begin; step < end; ++step) {
        uint x[OWN_COLUMNS];
        [[unroll]] for (uint n = 0u; n < OWN_COLUMNS; ++n) {
            x[n] = tile_x[step * TILE_COLUMNS + own.y * OWN_COLUMNS + n];
        }
        [[unroll]] for (uint m = 0u; m < OWN_ROWS; ++m) {
            uint w = tile_w[step * TILE_ROWS + tile_row(own.x, m)];
            [[unroll]] for (uint n = 0u; n < OWN_COLUMNS; ++n) {
                sum[m * OWN_COLUMNS + n] = dot4(w, x[n], sum[m * OWN_COLUMNS + n]);
            }
        }
    }
}

void add_block(uvec2 own) {
    int first[OWN], second[OWN];
    dots(own, 0u, HAS_HALVES ? STEPS / 2u : STEPS, first);
    if (HAS_HALVES) {
        dots(own, STEPS / 2u, STEPS, second);
    }
    [[unroll]] for (uint o = 0u; o < OWN; ++o) {
        vec4 w = of_w[tile_row(own.x, o / OWN_COLUMNS)];
        vec3 x = of_x[own.y * OWN_COLUMNS + o % OWN_COLUMNS];
        join(w, x, vec2(first[o], second[o]), inner[o], lower[o]);
    }
}

void main() {
    uvec2 own = uvec2(gl_LocalInvocationIndex % LANES_ROWS, gl_LocalInvocationIndex / LANES_ROWS);
    if (!find_matrix()) {
        return;
    }
    for (uint i = gl_LocalInvocationIndex; i < TILE_COLUMNS; i += gl_WorkGroupSize.x) {
        numbers[i] = number_in_x(gl_WorkGroupID.y * TILE_COLUMNS + i);
    }
    barrier();
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
