// The common part of the products of floats, for few rows of x and for many: buffers, columns, operands and sums. The
// including kernel has the constants ADD, EXPERTS and TILED, which says whether its workgroups have tiles of columns.
layout(set = 0, binding = MUL_MAT_FLOAT_BIND_PARAMS, std430) restrict readonly buffer Params { MulMatFloatParams p; };
layout(set = 0, binding = MUL_MAT_FLOAT_BIND_W, std430) readonly buffer W { uint w[]; };
layout(set = 0, binding = MUL_MAT_FLOAT_BIND_X, std430) readonly buffer X { uint x[]; };
layout(set = 0, binding = MUL_MAT_FLOAT_BIND_ADDED, std430) readonly buffer Added { float added[]; };
layout(set = 0, binding = MUL_MAT_FLOAT_BIND_IDS, std430) readonly buffer Ids { uint ids[]; };
layout(set = 0, binding = MUL_MAT_FLOAT_BIND_Y, std430) writeonly buffer Y { float y[]; };
#include "tensor.glsl"
#include "numbers.glsl"
#include "columns.glsl"
#include "sums.glsl"
#include "operands.glsl"
