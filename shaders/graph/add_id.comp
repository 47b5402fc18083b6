// y = a + row ids[i1, i2] of b.
#version 450
#extension GL_GOOGLE_include_directive : require
#include "contract.glsl"

layout(local_size_x = 256) in;
layout(set = 0, binding = ADD_ID_BIND_PARAMS, std430) restrict readonly buffer Params { AddIdParams p; };
layout(set = 0, binding = ADD_ID_BIND_A, std430) readonly buffer A { float a[]; };
layout(set = 0, binding = ADD_ID_BIND_B, std430) readonly buffer B { float b[]; };
layout(set = 0, binding = ADD_ID_BIND_IDS, std430) readonly buffer Ids { uint ids[]; };
layout(set = 0, binding = ADD_ID_BIND_Y, std430) buffer Y { uint y[]; };
const uint Y_TYPE = FLOAT_TYPE_F32;
#include "elementwise.glsl"

float value(uvec4 index) {
    uint row = ids[place(p.ids, uvec4(index.yz, 0u, 0u))];
    precise float sum = flush(a[place(p.a, index)]) + flush(b[place(p.b, uvec4(index.x, row, 0u, 0u))]);
    return flush(sum);
}

void main() {
    write_elements();
}
