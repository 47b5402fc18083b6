// y = the sum of a row's experts in order, each times its weight, and of what is added then; every product and every sum
// is flushed, as MUL and ADD leave them.
//
// Grid: x (and y) = elements of y / 256.
#version 450
#extension GL_GOOGLE_include_directive : require
#include "contract.glsl"

layout(local_size_x = 256) in;
layout(constant_id = SUM_EXPERTS_SPEC_ADDED) const uint ADDED = 0u;
layout(set = 0, binding = SUM_EXPERTS_BIND_PARAMS, std430) restrict readonly buffer Params { SumExpertsParams p; };
layout(set = 0, binding = SUM_EXPERTS_BIND_X, std430) readonly buffer X { float x[]; };
layout(set = 0, binding = SUM_EXPERTS_BIND_WEIGHTS, std430) readonly buffer Weights { float weights[]; };
layout(set = 0, binding = SUM_EXPERTS_BIND_A, std430) readonly buffer A { float a[]; };
layout(set = 0, binding = SUM_EXPERTS_BIND_B, std430) readonly buffer B { float b[]; };
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
    if (ADDED > 0u) {
        sum = flush(sum + flush(a[place(p.a, at)]));
    }
    if (ADDED > 1u) {
        sum = flush(sum + flush(b[place(p.b, at)]));
    }
    y[place(p.y, at)] = sum;
}
