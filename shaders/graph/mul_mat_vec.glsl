// y = w x for few rows of x: a lane owns a row of w.  S256 of zinc_attn/graph/products.py.
//
// Grid: x = groups of 32 rows of w, y = rows of x in pieces of COLUMNS, z = planes of y.  The waves of a workgroup share
// the superblocks of a group; a wave alone adds them as it makes them, several leave them in shared memory, a round at a
// time, where they are added in ascending order.
layout(local_size_x_id = MUL_MAT_VEC_SPEC_WORKGROUP_SIZE, local_size_x = 32) in;
layout(constant_id = MUL_MAT_VEC_SPEC_TYPE) const uint TYPE = 0u;
layout(constant_id = MUL_MAT_VEC_SPEC_COLUMNS) const uint COLUMNS = 1u;
layout(constant_id = MUL_MAT_VEC_SPEC_SUBGROUPS) const uint SUBGROUPS = 0u;
layout(constant_id = MUL_MAT_VEC_SPEC_SUPERBLOCKS) const uint ROUND = 1u;
layout(constant_id = MUL_MAT_VEC_SPEC_AHEAD) const uint AHEAD = 0u;
layout(constant_id = MUL_MAT_VEC_SPEC_ADD) const uint ADD = 0u;
layout(set = 0, binding = MUL_MAT_VEC_BIND_PARAMS, std430) restrict readonly buffer Params { MulMatVecParams p; };
layout(set = 0, binding = MUL_MAT_VEC_BIND_W, std430) readonly buffer W16 { uvec4 w16[]; };
layout(set = 0, binding = MUL_MAT_VEC_BIND_W, std430) readonly buffer W4 { uint w4[]; };
layout(set = 0, binding = MUL_MAT_VEC_BIND_Q, std430) readonly buffer Q { uvec4 q[]; };
layout(set = 0, binding = MUL_MAT_VEC_BIND_SCALES, std430) readonly buffer Scales { uvec2 scales[]; };
layout(set = 0, binding = MUL_MAT_VEC_BIND_ADDED, std430) readonly buffer Added { float added[]; };
layout(set = 0, binding = MUL_MAT_VEC_BIND_Y, std430) writeonly buffer Y { float y[]; };
#include "tensor.glsl"
#include "numbers.glsl"
#include "dot.glsl"
#include "q_blocks.glsl"

const uint WAVES = gl_WorkGroupSize.x / 32u;
const uint WAVE_COLUMNS = (COLUMNS + WAVES - 1u) / WAVES;  // whose superblocks a wave adds
Row row;                                                   // the lane's
uint superblock;                                           // the wave's
uvec4 pieces_16[1u + AHEAD * 15u];
uint pieces_4[1u + AHEAD * 15u], small_pieces[1u + AHEAD * 7u];
shared float sums[WAVES > 1u ? ROUND * COLUMNS * 32u : 1u];

uvec4 load_16(uint i) {
    return w16[piece_place(row, row.begin, PIECES_16, superblock, i)];
}

uint load_4(uint i) {
    return w4[piece_place(row, begin_4(row), PIECES_4, superblock, i)];
}

uint load_small(uint j) {
    return small_piece(row, min(superblock * BLOCKS + j, row.blocks - 1u));
}

uvec4 piece16(uint i) {
    return AHEAD == 1u ? pieces_16[i] : load_16(i);
}

uint piece4(uint i) {
    return AHEAD == 1u ? pieces_4[i] : load_4(i);
}

uint half_piece(uint j) {
    return AHEAD == 1u ? small_pieces[j] : load_small(j);
}

void load_superblock() {
    [[unroll]] for (uint i = 0u; i < PIECES_16 * BLOCKS; ++i) {
        pieces_16[i] = load_16(i);
    }
    [[unroll]] for (uint i = 0u; i < PIECES_4 * BLOCKS; ++i) {
        pieces_4[i] = load_4(i);
    }
    [[unroll]] for (uint j = 0u; HAS_SMALL && j < BLOCKS; ++j) {
        small_pieces[j] = load_small(j);
    }
}

// Block j of the superblock joins the sums of each column: of weights, and of minima.
void add_block(uint j, uint first, inout float sum[COLUMNS], inout float low[COLUMNS]) {
    uvec4 w_low, w_high;
    decode(j, w_low, w_high);
    uint number = superblock * 8u + j, stride = (p.blocks + 7u) / 8u * 8u;
    vec2 scale = IS_256 || number >= p.blocks ? vec2(0.0) : block_scale(j);
    vec4 of_halves = IS_256 ? block_scales(j) : vec4(0.0);
    [[unroll]] for (uint n = 0u; n < COLUMNS; ++n) {
        uint at = (gl_WorkGroupID.z * p.y.n[1] + min(first + n, p.y.n[1] - 1u)) * stride + number;
        uvec4 x_low = q[2u * at], x_high = q[2u * at + 1u];
        float dx = uintBitsToFloat(scales[at].x);
        ivec2 x_sums = ivec2(bitfieldExtract(int(scales[at].y), 0, 16), int(scales[at].y) >> 16);
        if (HAS_HALVES) {
            float a = float(dot16(w_low, x_low, -OFFSET * x_sums.x));
            float b = float(dot16(w_high, x_high, -OFFSET * x_sums.y));
            sum[n] = add(sum[n], multiply(dx, of_halves.x * a + of_halves.y * b));
            if (HAS_MINIMUM) {
                low[n] = add(low[n], multiply(dx, of_halves.z * float(x_sums.x) + of_halves.w * float(x_sums.y)));
            }
            continue;
        }
        int x_sum = x_sums.x + x_sums.y;
        float whole = float(dot16(w_low, x_low, dot16(w_high, x_high, -OFFSET * x_sum)));
        if (IS_256) {
            sum[n] = add(sum[n], multiply(dx, of_halves.x * whole));
            if (HAS_MINIMUM) {
                low[n] = add(low[n], multiply(dx, of_halves.z * float(x_sum)));
            }
        } else {
            float both = multiply(scale.x, dx);
            sum[n] = add(sum[n], multiply(TYPE == WEIGHT_TYPE_MXFP4 ? flush(both) : both, whole));
            if (HAS_MINIMUM) {
                sum[n] = add(sum[n], multiply(multiply(scale.y, dx), float(x_sum)));
            }
        }
    }
}

void add_superblock(uint first, out float sum[COLUMNS]) {
    float low[COLUMNS];
    [[unroll]] for (uint n = 0u; n < COLUMNS; ++n) {
        sum[n] = low[n] = 0.0;
    }
    if (AHEAD == 1u) {
        load_superblock();
        [[unroll]] for (uint j = 0u; j < 8u; ++j) {
            if (COLUMNS == 1u || superblock * 8u + j < p.blocks) {  // x of several blocks and columns would not fit
                add_block(j, first, sum, low);
            }
        }
    } else {
        [[dont_unroll]] for (uint j = 0u; j < min(8u, p.blocks - superblock * 8u); ++j) {
            add_block(j, first, sum, low);
        }
    }
    if (IS_256) {
        vec2 scale = superblock_scale();
        [[unroll]] for (uint n = 0u; n < COLUMNS; ++n) {
            sum[n] = flush(multiply(scale.x, sum[n]));
            if (HAS_MINIMUM) {
                sum[n] = add(sum[n], -flush(multiply(scale.y, low[n])));
            }
        }
    }
}

void store(uint m, uint n, float sum) {
    uvec4 at = uvec4(m, n, gl_WorkGroupID.z % p.y.n[2], gl_WorkGroupID.z / p.y.n[2]);
    if (m < p.y.n[0] && n < p.y.n[1]) {
        float result = flush(sum);
        y[place(p.y, at)] = ADD == 0u ? result : flush(add(result, flush(added[place(p.added, at)])));
    }
}

void main() {
    bool whole = SUBGROUPS != 0u && gl_SubgroupSize == 32u;
    uint wave = (whole ? gl_SubgroupID : gl_LocalInvocationID.x / 32u) % WAVES;
    uint lane = (whole ? gl_SubgroupInvocationID : gl_LocalInvocationID.x) % 32u;
    uint own = gl_WorkGroupID.x * 32u + lane, column = gl_WorkGroupID.y * COLUMNS;
    row = find_row(gl_WorkGroupID.x, lane);
    fill_table();

    float total[COLUMNS], sum[COLUMNS];
    [[unroll]] for (uint n = 0u; n < COLUMNS; ++n) {
        total[n] = 0.0;
    }
    uint superblocks = (p.blocks + 7u) / 8u;
    for (uint round = 0u; round < superblocks; round += ROUND) {
        uint end = min(round + ROUND, superblocks);
        for (superblock = round + wave; superblock < end; superblock += WAVES) {
            add_superblock(column, sum);
            [[unroll]] for (uint n = 0u; n < COLUMNS; ++n) {
                if (WAVES == 1u) {
                    total[n] = add(total[n], sum[n]);
                } else {
                    sums[((superblock - round) * COLUMNS + n) * 32u + lane] = sum[n];
                }
            }
        }
        if (WAVES > 1u) {
            barrier();
            [[unroll]] for (uint i = 0u; i < WAVE_COLUMNS; ++i) {
                uint n = i * WAVES + wave;
                for (uint s = 0u; n < COLUMNS && s < end - round; ++s) {
                    total[i] = add(total[i], sums[(s * COLUMNS + n) * 32u + lane]);
                }
            }
            barrier();
        }
    }
    [[unroll]] for (uint i = 0u; i < (WAVES == 1u ? COLUMNS : WAVE_COLUMNS); ++i) {
        uint n = WAVES == 1u ? i : i * WAVES + wave;
        if (n < COLUMNS) {
            store(own, column + n, total[i]);
        }
    }
}
