// y = the sum of a row's experts in order, each times its weight; every product and every sum is flushed, as MUL and
// ADD leave them.
//
// Grid: x (and y) = elements of y / 256.
#version 450
#extension GL_GOOGLE_include_directive : require
#include "contract.glsl"

layout(local_size_x = 256) in;
layout(set = 0, binding = SUM_EXPERTS_BIND_PARAMS, std430) restrict readonly buffer Params { SumExpertsParams p; };
layout(set = 0, binding = SUM_EXPERTS_BIND_X, std430) readonly buffer X { float x[]; };
layout(set = 0, binding = SUM_EXPERTS_BIND_WEIGHTS, std430) readonly buffer Weights { float weights[]; };
layout(set = 0, binding = SUM_EXPERTS_BIND_Y, std430) writeonly buffer Y { float y[]; };
#include "tensor.glsl"
#include "numbers.glsl"

void main() {
    uint i = linear_id();
    if (i >= elements(p.y)) {
        return;
    }
    uvec4 at = indices(p.y, i);
    precise float sum = 0.0;
    for (uint e = 0u; e < p.x.n[1]; ++e) {
        float value = flush(x[place(p.x, uvec4(at.x, e, at.y, 0u))]);
        precise float product = value * flush(weights[place(p.weights, uvec4(0u, e, at.y, 0u))]);
        sum = flush(sum + flush(product));
    }
    y[place(p.y, at)] = sum;
}
