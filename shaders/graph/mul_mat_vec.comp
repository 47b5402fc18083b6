// y = w x for few rows of x, of quantized weights.  S256 of zinc_attn/graph/products.py; see waves.glsl.
#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require
#extension GL_KHR_shader_subgroup_basic : require
#extension GL_EXT_spirv_intrinsics : require
#include "contract.glsl"

MUL_MAT_VEC_CONSTANTS
layout(set = 0, binding = MUL_MAT_VEC_BIND_PARAMS, std430) restrict readonly buffer Params { MulMatParams p; };
layout(set = 0, binding = MUL_MAT_VEC_BIND_W, std430) readonly buffer W16 { uvec4 w16[]; };
layout(set = 0, binding = MUL_MAT_VEC_BIND_W, std430) readonly buffer W4 { uint w4[]; };
layout(set = 0, binding = MUL_MAT_VEC_BIND_Q, std430) readonly buffer Q { uvec4 q[]; };
layout(set = 0, binding = MUL_MAT_VEC_BIND_SCALES, std430) readonly buffer Scales { uvec2 scales[]; };
layout(set = 0, binding = MUL_MAT_VEC_BIND_ADDED, std430) readonly buffer Added { float added[]; };
layout(set = 0, binding = MUL_MAT_VEC_BIND_IDS, std430) readonly buffer Ids { uint ids[]; };
layout(set = 0, binding = MUL_MAT_VEC_BIND_Y, std430) writeonly buffer Y { float y[]; };
#include "tensor.glsl"
#include "numbers.glsl"
const bool TILED = false;
#include "columns.glsl"
#include "sums.glsl"
#include "waves.glsl"
#include "q_blocks.glsl"
const bool SCALED = false, HALVES = HAS_HALVES;
#include "q_sums.glsl"

uint first;  // the number of the first column in x
// Pieces of AHEAD superblocks, and which of these is in use.
const uint EACH_16 = AHEAD == 0u ? 1u : PIECES_16 * BLOCKS, EACH_4 = AHEAD == 0u ? 1u : PIECES_4 * BLOCKS;
uvec4 pieces_16[TOGETHER * EACH_16];
uint pieces_4[TOGETHER * EACH_4 + 1u], small_pieces[TOGETHER * BLOCKS], in_use;

uvec4 piece16(uint i) {
    return AHEAD > 0u ? pieces_16[in_use * EACH_16 + i] : load_16(i);
}

uint piece4(uint i) {
    return AHEAD > 0u ? pieces_4[in_use * EACH_4 + i] : load_4(i);
}

uint small_piece(uint j) {
    return AHEAD > 0u ? small_pieces[in_use * BLOCKS + j] : load_small(j);
}

void load_superblock(uint n) {
    [[unroll]] for (uint i = 0u; i < PIECES_16 * BLOCKS; ++i) {
        pieces_16[n * EACH_16 + i] = load_16(i);
    }
    [[unroll]] for (uint i = 0u; i < PIECES_4 * BLOCKS; ++i) {
        pieces_4[n * EACH_4 + i] = load_4(i);
    }
    [[unroll]] for (uint j = 0u; HAS_SMALL && j < BLOCKS; ++j) {
        small_pieces[n * BLOCKS + j] = load_small(j);
    }
}

// Block j of the superblock joins the sums of each column: of weights, and of minima.
void add_block(uint j, inout float sum[COLUMNS], inout float low[COLUMNS]) {
    uvec4 w_low, w_high;
    decode_pairs(j, w_low, w_high);
    uint number = superblock * 8u + j, x_block = number * rows_of_x() + first;
    // Blocks behind the row are zeros in x, and their scales those of the last one, which may be infinite but for mxfp4.
    vec4 of_w = IS_256 || IS_MXFP4 || number < p.blocks ? block_scales(j) : vec4(0.0);
    [[unroll]] for (uint n = 0u; n < COLUMNS; ++n) {
        uvec4 x_low = q[2u * (x_block + n)], x_high = q[2u * (x_block + n) + 1u];
        if (HAS_TABLE) {
            exchange(x_low, x_high);
        }
        ivec2 x_sums = sums_of_x(scales[x_block + n]);
        int low_dot = dot16(w_low, x_low, -OFFSET * (HAS_HALVES ? x_sums.x : x_sums.x + x_sums.y));
        int high_dot = dot16(w_high, x_high, HAS_HALVES ? -OFFSET * x_sums.y : low_dot);
        vec2 dots = HAS_HALVES ? vec2(low_dot, high_dot) : vec2(high_dot, 0.0);
        join(of_w, scales_of_x(scales[x_block + n]), dots, IS_MXFP4, sum[n], low[n]);
    }
}

void add_superblock(uint n, out float sum[COLUMNS]) {
    float low[COLUMNS];
    in_use = n;
    [[unroll]] for (uint i = 0u; i < COLUMNS; ++i) {
        sum[i] = low[i] = 0.0;
    }
    if (AHEAD > 0u) {
        [[unroll]] for (uint j = 0u; j < 8u; ++j) {
            add_block(j, sum, low);
        }
    } else {
        [[dont_unroll]] for (uint j = 0u; j < min(8u, p.blocks - superblock * 8u); ++j) {
            add_block(j, sum, low);
        }
    }
    vec2 scale = IS_256 ? superblock_scale() : vec2(0.0);
    [[unroll]] for (uint i = 0u; i < COLUMNS; ++i) {
        sum[i] = joined(scale, sum[i], low[i]);
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
    add_superblocks((p.blocks + 7u) / 8u);
}
