// The common part of the products of quantized weights, for few rows of x and for many: buffers, columns, weights,
// sums.
//
// The including kernel has the constants TYPE, ADD and EXPERTS, and these:
//     TILED      whether its workgroups have tiles of columns; see columns.glsl
//     AHEAD      superblocks whose pieces a lane holds in registers; 0: a piece is loaded where it is used
//     SCALED     whether the integers of w have been multiplied by the scales of their halves
//     HALVES     whether the dot products of both halves of a block stay apart
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
#include "columns.glsl"
#include "sums.glsl"

uint superblock;  // the superblock in use, a number along a row
#include "q_places.glsl"
#include "q_blocks.glsl"
#include "q_sums.glsl"
