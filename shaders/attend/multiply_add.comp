// multiply_add of numbers whose results the host knows, so that the host chooses FUSED_NATIVE or FUSED_EMULATED.
//
// Grid: x = 32 pairs of triples, a lane each. The numbers come from a buffer, so that no compiler knows a result.
#version 450
#extension GL_GOOGLE_include_directive : require
#include "../contract.glsl"

layout(local_size_x = 32) in;
layout(constant_id = MULTIPLY_ADD_SPEC_ARITHMETIC) const uint ARITHMETIC = FUSED_NATIVE;

layout(set = 0, binding = MULTIPLY_ADD_BIND_TRIPLES, std430) restrict readonly buffer Triples { vec2 triples[]; };
layout(set = 0, binding = MULTIPLY_ADD_BIND_SUMS, std430) restrict writeonly buffer Sums { vec2 sums[]; };
#include "multiply_add.glsl"

void main() {
    uint pair = gl_GlobalInvocationID.x;
    sums[pair] = multiply_add(triples[3u * pair], triples[3u * pair + 1u], triples[3u * pair + 2u]);
}
