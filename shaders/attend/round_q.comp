// Query vectors for arithmetic "integer": integers of at most 2**(INTEGER_BITS + 1) times a power of two, which follows
// from the vector's largest magnitude, and 0 from HEAD_DIM on. canonical/integer.py has them as rounded_rows.
//
// Eight lanes have a vector, and neighboring lanes have neighboring numbers.
// Grid: x = four query heads, z = query row.
#version 450
#extension GL_GOOGLE_include_directive : require
#include "../contract.glsl"
#include "../floats.glsl"

layout(local_size_x = 32) in;
layout(constant_id = ROUND_Q_SPEC_Q_HEADS) const uint Q_HEADS = 1u;
layout(constant_id = ROUND_Q_SPEC_HEAD_DIM) const uint HEAD_DIM = 64u;  // numbers of a vector of q
layout(constant_id = ROUND_Q_SPEC_K_DIM) const uint K_DIM = 64u;        // numbers of a rounded vector
const uint LANES = 8u;  // of a vector

layout(set = 0, binding = ROUND_Q_BIND_Q, std430) restrict readonly buffer Q { float q[]; };
layout(set = 0, binding = ROUND_Q_BIND_ROUNDED, std430) restrict writeonly buffer Rounded { float rounded[]; };

shared float tops[WAVE];  // the largest magnitude that each lane has seen

// Magnitudes below MIN_INPUT count as 0, as in every arithmetic.
float number(uint index) {
    return abs(q[index]) < MIN_INPUT ? 0.0 : q[index];
}

void main() {
    uint lane = gl_LocalInvocationID.x % LANES, first = gl_LocalInvocationID.x - lane;
    uint head = gl_WorkGroupID.x * (WAVE / LANES) + first / LANES;
    uint vector = gl_WorkGroupID.z * Q_HEADS + min(head, Q_HEADS - 1u);
    float top = 0.0;
    for (uint d = lane; d < HEAD_DIM; d += LANES) {
        top = max(top, abs(number(vector * HEAD_DIM + d)));
    }
    tops[first + lane] = top;
    barrier();
    for (uint i = 0u; i < LANES; ++i) {
        top = max(top, tops[first + i]);
    }
    float power = integer_power(top), unit = inverse_power(power);
    for (uint d = lane; d < K_DIM && head < Q_HEADS; d += LANES) {
        precise float scaled = d < HEAD_DIM ? number(vector * HEAD_DIM + d) * power : 0.0;
        precise float x = roundEven(scaled) * unit;
        rounded[vector * K_DIM + d] = x;
    }
}
