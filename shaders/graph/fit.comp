// y = x in rows of another length: zeros where x has no element, +0 for magnitudes below `least`.
#version 450
#extension GL_GOOGLE_include_directive : require
#include "contract.glsl"

layout(local_size_x = 256) in;
layout(set = 0, binding = FIT_BIND_PARAMS, std430) restrict readonly buffer Params { FitParams p; };
layout(set = 0, binding = FIT_BIND_X, std430) restrict readonly buffer X { uint x[]; };
layout(set = 0, binding = FIT_BIND_Y, std430) restrict writeonly buffer Y { uint y[]; };
#include "tensor.glsl"

void main() {
    uint i = linear_id();
    if (i >= elements(p.y)) {
        return;
    }
    uvec4 index = indices(p.y, i);
    uint bits = index.x < p.x.n[0] ? x[place(p.x, index)] : 0u;
    y[place(p.y, index)] = (bits & 0x7FFFFFFFu) < floatBitsToUint(p.least) ? 0u : bits;
}
