// y = the sum of a row's experts in order, each times its weight, plus the added tensors. Every product and every sum
// is flushed, as MUL and ADD leave them.
#version 450
#extension GL_GOOGLE_include_directive : require
#include "contract.glsl"

layout(local_size_x = 256) in;
SUM_EXPERTS_CONSTANTS
layout(set = 0, binding = SUM_EXPERTS_BIND_PARAMS, std430) restrict readonly buffer Params { SumExpertsParams p; };
layout(set = 0, binding = SUM_EXPERTS_BIND_EXPERTS, std430) readonly buffer Experts { float experts[]; };
layout(set = 0, binding = SUM_EXPERTS_BIND_WEIGHTS, std430) readonly buffer Weights { float weights[]; };
layout(set = 0, binding = SUM_EXPERTS_BIND_PLUS, std430) readonly buffer Plus { float plus[]; };
layout(set = 0, binding = SUM_EXPERTS_BIND_MORE, std430) readonly buffer More { float more[]; };
layout(set = 0, binding = SUM_EXPERTS_BIND_Y, std430) writeonly buffer Y { float y[]; };
#include "tensor.glsl"
#include "numbers.glsl"
#include "expert_sums.glsl"

void main() {
    uint i = linear_id();
    if (i >= elements(p.y)) {
        return;
    }
    uvec4 index = indices(p.y, i);
    y[place(p.y, index)] = sum_at(index.x, index.y);
}
