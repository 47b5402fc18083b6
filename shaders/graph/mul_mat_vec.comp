// y = w x for few rows of x and quantized weights w, with the sums of zinc_attn/graph/products.py: a row's blocks of
// 32 join superblocks of 256, and superblocks join the result, in ascending order.
//
// Grid: x = group of 32 rows of w, y = COLUMNS rows of x (columns of the product), z = plane. A lane owns a row of w,
// and the waves of a workgroup share the superblocks of the row. A reader can follow the calls from main():
//
//     columns    find_matrix, number_in_x: the workgroup's matrix of w; where its columns lie in x
//     waves      find_wave: wave and lane; add_superblocks: the loop over superblocks, which calls
//         here       load_superblock: the pieces of a superblock of w, from memory to registers, AHEAD at a time
//         here       add_superblock: the sum of a superblock for each column, which calls, for each block of 32,
//             here       add_block, which calls
//     q_blocks           decode_pairs, block_scales: 32 integers of w as bytes in 8 words, and their scale and minimum
//     products           piece16, piece4, small_piece, for q_blocks: a piece of w, from registers or from memory
//     q_sums             dot16: exact sums of products of int8; add_products: times the scales, to the superblock's sum
//         sums       store: the flushed result, plus the added tensor
//     store_glu  of a GLU, whose gate and up are added one after the other: act(gate) * up as int8
//
// products.glsl includes the other files, except waves. x comes as int8 words q with a scale for each block
// (quantizing.glsl).
#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require
#extension GL_KHR_shader_subgroup_basic : require
#extension GL_EXT_spirv_intrinsics : require
#include "contract.glsl"

MUL_MAT_VEC_CONSTANTS
const bool TILED = false, SCALED = false, HALVES = WEIGHT_HALVES(TYPE) == 1u;
#include "products.glsl"
#include "waves.glsl"
layout(set = 0, binding = MUL_MAT_VEC_BIND_Y, std430) writeonly buffer Packed { uint packed[]; };
layout(set = 0, binding = MUL_MAT_VEC_BIND_Y, std430) writeonly buffer PackedScales { uvec2 packed_scales[]; };
#include "quantizing.glsl"
#include "activations.glsl"

uint first;  // number of the workgroup's first column among the rows of x

// To pieces_16, pieces_4 and small_pieces: the pieces of superblock `superblock`, as superblock n in registers.
void load_superblock(bool up, uint n) {
    [[unroll]] for (uint i = 0u; i < PIECES_16 * BLOCKS; ++i) {
        pieces_16[n * EACH_16 + i] = load_16(up, i);
    }
    [[unroll]] for (uint i = 0u; i < PIECES_4 * BLOCKS; ++i) {
        pieces_4[n * EACH_4 + i] = load_4(up, i);
    }
    [[unroll]] for (uint j = 0u; HAS_SMALL && j < BLOCKS; ++j) {
        small_pieces[n * BLOCKS + j] = load_small(up, j);
    }
}

void load_superblock(uint n) {
    if (is_up) {
        load_superblock(true, n);
    } else {
        load_superblock(false, n);
    }
}

// To sum and minima: each column gains block j of the superblock, the products of weights and of minima.
void add_block(uint j, inout float sum[COLUMNS], inout float minima[COLUMNS]) {
    uvec4 w_low, w_high;
    decode_pairs(j, w_low, w_high);
    uint number = superblock * 8u + j, x_block = number * rows_of_x() + first;
    // After the row's end x is 0 and w repeats its last block. The block's scale may be infinite, and 0 * infinity is
    // NaN, so the scale becomes 0. Of mxfp4 add_products does this.
    vec4 w_scales = IS_256 || IS_MXFP4 || number < p.blocks ? block_scales(j) : vec4(0.0);
    [[unroll]] for (uint n = 0u; n < COLUMNS; ++n) {
        uvec4 x_low = q[2u * (x_block + n)], x_high = q[2u * (x_block + n) + 1u];
        if (HAS_TABLE) {
            exchange(x_low, x_high);
        }
        ivec2 x_sums = sums_of_x(scales[x_block + n]);
        // Decoded bytes are OFFSET too large, so a dot product begins at -OFFSET times the sum of x. Without a scale
        // for each half the second half's dot product goes on from the first's.
        int low_dot = dot16(w_low, x_low, -OFFSET * (HAS_HALVES ? x_sums.x : x_sums.x + x_sums.y));
        int high_dot = dot16(w_high, x_high, HAS_HALVES ? -OFFSET * x_sums.y : low_dot);
        vec2 dots = HAS_HALVES ? vec2(low_dot, high_dot) : vec2(high_dot, 0.0);
        add_products(w_scales, scales_of_x(scales[x_block + n]), dots, IS_MXFP4, sum[n], minima[n]);
    }
}

void add_superblock(uint n, out float sum[COLUMNS]) {
    float minima[COLUMNS];
    in_use = n;
    [[unroll]] for (uint i = 0u; i < COLUMNS; ++i) {
        sum[i] = minima[i] = 0.0;
    }
    if (AHEAD > 0u) {
        [[unroll]] for (uint j = 0u; j < 8u; ++j) {
            add_block(j, sum, minima);
        }
    } else {
        [[dont_unroll]] for (uint j = 0u; j < min(8u, p.blocks - superblock * 8u); ++j) {
            add_block(j, sum, minima);
        }
    }
    vec2 scale = IS_256 ? superblock_scale() : vec2(0.0);
    [[unroll]] for (uint i = 0u; i < COLUMNS; ++i) {
        sum[i] = superblock_sum(scale, sum[i], minima[i]);
    }
}

float flushed(float sum) {
    return EXPERTS != 0u && expert == p.experts[2] ? NAN : flush(sum);
}

// The workgroup's 32 rows of act(gate) * up, a block of each column, as QUANTIZE stores them: q, then the scales.
void store_glu(float gate[COLUMNS], float up[COLUMNS]) {
    [[unroll]] for (uint i = 0u; i < OWN_COLUMNS; ++i) {
        float x = flushed(gate[i]), act = GLU == GLU_OP_GEGLU + 1u ? gelu(x) : silu(x, 1.0);
        if (column_of_lane(i) < COLUMNS) {
            sums[column_of_lane(i) * 32u + lane] = flush(multiply(flush(act), flushed(up[i])));
        }
    }
    barrier();
    uint columns = p.y.n[1] * p.y.n[2] * p.y.n[3], invocation = gl_LocalInvocationID.x;
    first_scale = p.y.n[0] / X_BLOCK * columns * BLOCK_LANES / 2u;
    for (uint begin = 0u; begin < COLUMNS; begin += gl_WorkGroupSize.x / BLOCK_LANES) {
        uint n = begin + invocation / BLOCK_LANES, i = min(n, COLUMNS - 1u) * 32u + invocation % BLOCK_LANES * 4u;
        uint column = gl_WorkGroupID.z * p.y.n[1] + gl_WorkGroupID.y * COLUMNS + n;
        vec4 v = vec4(sums[i], sums[i + 1u], sums[i + 2u], sums[i + 3u]);
        quantize(v, gl_WorkGroupID.x * columns + column, n < COLUMNS);
    }
}

void main() {
    if (!find_matrix()) {
        return;
    }
    find_wave();
    first = number_in_x(gl_WorkGroupID.y * COLUMNS);
    row = find_row(gl_WorkGroupID.x, lane);
    fill_table();
    float gate[COLUMNS], total[COLUMNS];
    uint count = (p.blocks + 7u) / 8u;
    add_superblocks(count, total);
    if (GLU == 0u) {
        store_columns(total);
        return;
    }
    [[unroll]] for (uint i = 0u; i < COLUMNS; ++i) {
        gate[i] = total[i];
    }
    is_up = true;
    add_superblocks(count, total);
    store_glu(gate, total);
}
