// y = w x for few rows of x: a lane owns a row of w.  S256 of zinc_attn/graph/products.py.
//
// Grid: x = groups of 32 rows of w, y = rows of x in pieces of COLUMNS, z = planes of y.  The waves of a workgroup share
// the superblocks of a group; a wave alone adds them as it makes them, several leave them in shared memory, a round at a
// time, where they are added in ascending order.  A wave loads all pieces of a superblock before it uses the first.
layout(local_size_x_id = MUL_MAT_VEC_SPEC_WORKGROUP_SIZE, local_size_x = 32) in;
layout(constant_id = MUL_MAT_VEC_SPEC_TYPE) const uint TYPE = 0u;
layout(constant_id = MUL_MAT_VEC_SPEC_COLUMNS) const uint COLUMNS = 1u;
layout(constant_id = MUL_MAT_VEC_SPEC_SUBGROUPS) const uint SUBGROUPS = 0u;
layout(constant_id = MUL_MAT_VEC_SPEC_SUPERBLOCKS) const uint ROUND = 1u;
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

const uint WAVES = gl_WorkGroupSize.x / 32u;
const uint WAVE_COLUMNS = (COLUMNS + WAVES - 1u) / WAVES;  // whose superblocks a wave adds
uvec4 pieces_16[8 * 2];
uint pieces_4[8 * 2], small_pieces[8];
shared float sums[WAVES > 1u ? ROUND * COLUMNS * 32u : 1u];

uvec4 piece16(uint i) {
    return pieces_16[i];
}

uint piece4(uint i) {
    return pieces_4[i];
}

uint half_piece(uint j) {
    return small_pieces[j];
}
#include "q_blocks.glsl"

// All pieces of superblock s; of a block that the row does not have, those of its last.
void load_superblock(Row row, uint s) {
    uint smaller = begin_4(row);
    [[unroll]] for (uint j = 0u; j < BLOCKS; ++j) {
        uint b = min(s * BLOCKS + j, row.blocks - 1u);
        [[unroll]] for (uint i = 0u; i < PIECES_16; ++i) {
            pieces_16[j * PIECES_16 + i] = w16[piece_place(row, row.begin, i, b)];
        }
        [[unroll]] for (uint i = 0u; i < PIECES_4; ++i) {
            pieces_4[j * PIECES_4 + i] = w4[piece_place(row, smaller, i, b)];
        }
        if (HAS_SMALL) {
            small_pieces[j] = small_piece(row, b);
        }
    }
}

// Sums of a superblock for each column: of weights, and of minima.
void add_blocks(uint s, uint first, out float sum[COLUMNS], out float low[COLUMNS]) {
    [[unroll]] for (uint n = 0u; n < COLUMNS; ++n) {
        sum[n] = low[n] = 0.0;
    }
    uint stride = (p.blocks + 7u) / 8u * 8u;
    [[unroll]] for (uint j = 0u; j < 8u; ++j) {
        uvec4 w_low, w_high;
        decode(j, w_low, w_high);
        vec2 scale = IS_256 ? vec2(0.0) : block_scale(j);
        vec4 of_halves = IS_256 ? block_scales(j) : vec4(0.0);
        if (!IS_256 && s * 8u + j >= p.blocks) {
            scale = vec2(0.0);
        }
        [[unroll]] for (uint n = 0u; n < COLUMNS; ++n) {
            uint at = (gl_WorkGroupID.z * p.y.n[1] + min(first + n, p.y.n[1] - 1u)) * stride + s * 8u + j;
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

void store(uint row, uint n, float sum) {
    uvec4 at = uvec4(row, n, gl_WorkGroupID.z % p.y.n[2], gl_WorkGroupID.z / p.y.n[2]);
    if (row < p.y.n[0] && n < p.y.n[1]) {
        float result = flush(sum);
        y[place(p.y, at)] = ADD == 0u ? result : flush(add(result, flush(added[place(p.added, at)])));
    }
}

void main() {
    bool whole = SUBGROUPS != 0u && gl_SubgroupSize == 32u;
    uint wave = (whole ? gl_SubgroupID : gl_LocalInvocationID.x / 32u) % WAVES;
    uint lane = (whole ? gl_SubgroupInvocationID : gl_LocalInvocationID.x) % 32u;
    uint plane = gl_WorkGroupID.z % p.y.n[2] / p.repeats[0], block = gl_WorkGroupID.z / p.y.n[2] / p.repeats[1];
    uint own_row = gl_WorkGroupID.x * 32u + lane, column = gl_WorkGroupID.y * COLUMNS;
    Row row = find_row(p.w_begin + plane * p.w_steps[0] + block * p.w_steps[1], p.y.n[0], own_row, p.blocks);
    fill_table();

    float total[COLUMNS], sum[COLUMNS], low[COLUMNS];
    [[unroll]] for (uint n = 0u; n < COLUMNS; ++n) {
        total[n] = 0.0;
    }
    uint superblocks = (p.blocks + 7u) / 8u;
    for (uint round = 0u; round < superblocks; round += ROUND) {
        uint end = min(round + ROUND, superblocks);
        for (uint s = round + wave; s < end; s += WAVES) {
            load_superblock(row, s);
            add_blocks(s, column, sum, low);
            [[unroll]] for (uint n = 0u; n < COLUMNS; ++n) {
                if (WAVES == 1u) {
                    total[n] = add(total[n], sum[n]);
                } else {
                    sums[((s - round) * COLUMNS + n) * 32u + lane] = sum[n];
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
            store(own_row, column + n, total[i]);
        }
    }
}
