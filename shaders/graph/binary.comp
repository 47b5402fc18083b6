// y = a op b, element by element; b repeats where it is smaller than a.
//
// Grid: x = elements of y in pieces of 256.  An invocation has an element.
#version 450
#extension GL_GOOGLE_include_directive : require
#include "contract.glsl"

layout(local_size_x = 256) in;
layout(constant_id = BINARY_SPEC_OP) const uint OP = BINARY_OP_ADD;
layout(set = 0, binding = BINARY_BIND_PARAMS, std430) restrict readonly buffer Params { BinaryParams p; };
layout(set = 0, binding = BINARY_BIND_A, std430) readonly buffer A { float a[]; };
layout(set = 0, binding = BINARY_BIND_B, std430) readonly buffer B { float b[]; };
layout(set = 0, binding = BINARY_BIND_Y, std430) writeonly buffer Y { float y[]; };
#include "tensor.glsl"
#include "numbers.glsl"

float operation(float x, float z) {
    precise float sum = x + z, difference = x - z, product = x * z;
    return OP == BINARY_OP_ADD ? sum : OP == BINARY_OP_SUB ? difference : product;
}

void main() {
    uint i = linear_id();
    if (i >= elements(p.y)) {
        return;
    }
    uvec4 at = indices(p.y, i);
    uvec4 of_b = at % uvec4(p.b.n[0], p.b.n[1], p.b.n[2], p.b.n[3]);
    y[place(p.y, at)] = flush(operation(flush(a[place(p.a, at)]), flush(b[place(p.b, of_b)])));
}
