// The benchmark's yardstick: every 16 bytes of a buffer read once, and nothing else done.
//
// Grid: x = piece.  A workgroup xors the words of its piece, LOADS rows of 32 neighboring uvec4, to one word, so
// that no load can be left out and the host can check them all.
#version 450
#extension GL_GOOGLE_include_directive : require
#include "contract.glsl"

layout(local_size_x = 32) in;
layout(constant_id = READ_SPEC_LOADS) const uint LOADS = 16u;  // per lane

layout(set = 0, binding = READ_BIND_DATA, std430) restrict readonly buffer Data { uvec4 data[]; };
layout(set = 0, binding = READ_BIND_OUT, std430) restrict writeonly buffer Out { uint result[]; };

shared uint lanes[WAVE];

void main() {
    uint lane = gl_LocalInvocationID.x;
    uint first = gl_WorkGroupID.x * LOADS * WAVE + lane;
    uvec4 x = uvec4(0u);
    for (uint i = 0u; i < LOADS; ++i) {
        x ^= data[first + i * WAVE];
    }
    lanes[lane] = x.x ^ x.y ^ x.z ^ x.w;
    barrier();
    if (lane == 0u) {
        uint all = 0u;
        for (uint i = 0u; i < WAVE; ++i) {
            all ^= lanes[i];
        }
        result[gl_WorkGroupID.x] = all;
    }
}
