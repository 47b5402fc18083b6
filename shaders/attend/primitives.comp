// The float functions of every kernel, on numbers whose results the host knows. A driver that computes a result
// otherwise is refused before it computes anything else.
//
// Grid: x = 32 rows of numbers, a lane each. The numbers come from a buffer, so that no compiler knows a result.
#version 450
#extension GL_GOOGLE_include_directive : require
#include "../contract.glsl"

layout(local_size_x = 32) in;

layout(set = 0, binding = PRIMITIVES_BIND_NUMBERS, std430) restrict readonly buffer Numbers { uint numbers[]; };
layout(set = 0, binding = PRIMITIVES_BIND_RESULTS, std430) restrict writeonly buffer Results { uint results[]; };
#include "../floats.glsl"
#include "state.glsl"

float number(uint which) {
    return uintBitsToFloat(numbers[gl_GlobalInvocationID.x * NUMBER_WORDS + which]);
}

void give(uint which, float x) {
    results[gl_GlobalInvocationID.x * RESULT_WORDS + which] = floatBitsToUint(x);
}

void main() {
    float m = number(NUMBER_M), l = number(NUMBER_L), scale = number(NUMBER_SCALE);
    float score = number(NUMBER_SCORE);
    precise float power = roundEven(score) - m;
    vec2 powers = merge_powers(m, number(NUMBER_OTHER_M));
    give(RESULT_WEIGHT, weight(score, m));
    give(RESULT_POWER, pow2(power));
    precise float small = score * 0.03125;
    give(RESULT_TANH, hyperbolic_tangent(small));
    give(RESULT_MERGED, merge(number(NUMBER_A), powers.x, number(NUMBER_B), powers.y));
    give(RESULT_RECIPROCAL, reciprocal(l));
    give(RESULT_LSE, natural_lse(m, l));

    // Values from the words of a cache: float16, many of them denormal, and an int8, in both forms of storage.glsl.
    uint word = floatBitsToUint(number(NUMBER_WORD));
    vec2 halves = unpackHalf2x16(word);
    precise float doubled = halves.x * 2.0;
    precise float low = doubled * 0.5;
    give(RESULT_LOW, low);
    give(RESULT_HIGH, max(halves.y, EMPTY_M));
    precise float product = float(bitfieldExtract(int(word), 0, 8)) * scale;
    give(RESULT_PRODUCT, product);
    precise float fused = fma(unpackHalf2x16((word ^ 0x80u) & 0xFFu).x, scale * 16777216.0, scale * -128.0);
    give(RESULT_FUSED, fused);
}
