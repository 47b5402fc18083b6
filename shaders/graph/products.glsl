// The common part of products of quantized weights, for few rows of x and for many: buffers, columns, weights, sums.
//
// The including kernel has the constants TYPE, ADD and EXPERTS, and these:
//     GLU        whether w and `added` are two matrices, a GLU's gate and up
//     TILED      whether its workgroups have tiles of columns; see columns.glsl
//     AHEAD      superblocks whose pieces a lane holds in registers; 0: a piece is loaded where it is used
//     SCALED     whether the integers of w have been multiplied by the scales of their halves
//     HALVES     whether the dot products of both halves of a block stay apart
layout(set = 0, binding = MUL_MAT_BIND_PARAMS, std430) restrict readonly buffer Params { MulMatParams p; };
layout(set = 0, binding = MUL_MAT_BIND_W, std430) readonly buffer W16 { uvec4 w16[]; };
layout(set = 0, binding = MUL_MAT_BIND_W, std430) readonly buffer W4 { uint w4[]; };
layout(set = 0, binding = MUL_MAT_BIND_ADDED, std430) readonly buffer Up16 { uvec4 up16[]; };
layout(set = 0, binding = MUL_MAT_BIND_ADDED, std430) readonly buffer Up4 { uint up4[]; };
layout(set = 0, binding = MUL_MAT_BIND_Q, std430) readonly buffer Q { uvec4 q[]; };
layout(set = 0, binding = MUL_MAT_BIND_SCALES, std430) readonly buffer Scales { uvec2 scales[]; };
layout(set = 0, binding = MUL_MAT_BIND_ADDED, std430) readonly buffer Added { float added[]; };
layout(set = 0, binding = MUL_MAT_BIND_IDS, std430) readonly buffer Ids { uint ids[]; };
layout(set = 0, binding = MUL_MAT_BIND_Y, std430) writeonly buffer Y { float y[]; };
#include "tensor.glsl"
#include "numbers.glsl"
#include "columns.glsl"
#include "sums.glsl"

uint superblock;  // the superblock in use, a number along a row
bool is_up = false;  // whether the matrix in use is a GLU's up
#include "q_places.glsl"

const uint TOGETHER = AHEAD > 1u ? AHEAD : 1u;  // superblocks in registers
const uint EACH_16 = AHEAD == 0u ? 1u : PIECES_16 * BLOCKS, EACH_4 = AHEAD == 0u ? 1u : PIECES_4 * BLOCKS;
uvec4 pieces_16[TOGETHER * EACH_16];  // [superblock][piece]
uint pieces_4[TOGETHER * EACH_4 + 1u], small_pieces[TOGETHER * BLOCKS];
uint in_use;  // which of these superblocks `superblock` is

// Piece i of the superblock in use: from registers where superblocks are loaded ahead, else from memory.
uvec4 piece16(uint i) {
    return AHEAD > 0u ? pieces_16[in_use * EACH_16 + i] : load_16(is_up, i);
}

uint piece4(uint i) {
    return AHEAD > 0u ? pieces_4[in_use * EACH_4 + i] : load_4(is_up, i);
}

uint small_piece(uint j) {
    return AHEAD > 0u ? small_pieces[in_use * BLOCKS + j] : load_small(is_up, j);
}

#include "q_blocks.glsl"
#include "q_sums.glsl"
