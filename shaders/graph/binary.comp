// y = a op b, element by element; b repeats where it is smaller than a.
#version 450
#extension GL_GOOGLE_include_directive : require
#include "contract.glsl"

layout(local_size_x = 256) in;
BINARY_CONSTANTS
layout(set = 0, binding = BINARY_BIND_PARAMS, std430) restrict readonly buffer Params { BinaryParams p; };
layout(set = 0, binding = BINARY_BIND_A, std430) readonly buffer A { uint a[]; };
layout(set = 0, binding = BINARY_BIND_B, std430) readonly buffer B { uint b[]; };
layout(set = 0, binding = BINARY_BIND_Y, std430) buffer Y { uint y[]; };
#include "elementwise.glsl"

float value(uvec4 index) {
    float x = flush(LOAD(a, A_TYPE, place(p.a, index)));
    float z = flush(LOAD(b, B_TYPE, place(p.b, repeated(p.b, index))));
    precise float sum = x + z, difference = x - z, product = x * z;
    float result = OP == BINARY_OP_ADD ? sum : OP == BINARY_OP_SUB ? difference : product;
    return flush(OP == BINARY_OP_DIV ? quotient(x, z) : result);
}

void main() {
    write_elements();
}
