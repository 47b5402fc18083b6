// y = factor * the sum of a row of `terms` elements of x, counted through its dimensions 0, 1, ...
#version 450
#extension GL_GOOGLE_include_directive : require
#include "contract.glsl"

layout(local_size_x = SUM_LANES) in;
layout(set = 0, binding = SUM_ROWS_BIND_PARAMS, std430) restrict readonly buffer Params { SumRowsParams p; };
layout(set = 0, binding = SUM_ROWS_BIND_X, std430) readonly buffer X { float x[]; };
layout(set = 0, binding = SUM_ROWS_BIND_Y, std430) writeonly buffer Y { float y[]; };
#include "tensor.glsl"
#include "numbers.glsl"
#include "row_sum.glsl"

void main() {
    uint row = workgroup_row(), r = gl_LocalInvocationID.x;
    if (row >= elements(p.y)) {
        return;
    }
    precise float sum = 0.0;
    for (uint j = r; j < p.terms; j += SUM_LANES) {
        sum = sum + flush(x[place(p.x, indices(p.x, row * p.terms + j))]);
    }
    precise float scaled = workgroup_sum(sum) * p.factor;
    if (r == 0u) {
        y[place(p.y, indices(p.y, row))] = flush(scaled);
    }
}
