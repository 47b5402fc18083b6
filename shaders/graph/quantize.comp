// Rows of float32 values as int8, a scale for each 32: d = the largest magnitude / 127, q = round(x / d).
//
// Grid: x (and y) = blocks of 32 of all rows in pieces of 32.  Eight invocations have a block, each a word of q.
// Magnitudes below 2**-60 are a block of zeros; one with an infinity or a NaN has d = NaN and q = 0.
#version 450
#extension GL_GOOGLE_include_directive : require
#include "contract.glsl"

const uint LANES = 8u;  // of a block
layout(local_size_x = 256) in;
layout(set = 0, binding = QUANTIZE_BIND_PARAMS, std430) restrict readonly buffer Params { QuantizeParams p; };
layout(set = 0, binding = QUANTIZE_BIND_X, std430) readonly buffer X { float x[]; };
layout(set = 0, binding = QUANTIZE_BIND_Q, std430) writeonly buffer Q { uint q[]; };
layout(set = 0, binding = QUANTIZE_BIND_SCALES, std430) writeonly buffer Scales { uvec2 scales[]; };
#include "tensor.glsl"
#include "numbers.glsl"

shared uint most[gl_WorkGroupSize.x];  // magnitude of an invocation's values
shared int sums[gl_WorkGroupSize.x];   // of its numbers

// Four numbers of a block whose largest magnitude is `top`.
ivec4 numbers(vec4 v, float top) {
    float unit = top >= QUANTIZED_LARGE ? 1.0 / QUANTIZED_LARGE : 1.0;  // keeps the reciprocal's steps normal
    precise float d = top * (1.0 / 127.0);
    precise float near = d * unit;
    precise vec4 scaled = v * unit;
    scaled = scaled * reciprocal(near);
    return clamp(ivec4(roundEven(scaled)), ivec4(-127), ivec4(127));
}

void main() {
    uint own = gl_LocalInvocationID.x, lane = own % LANES, first = own - lane;
    uint i = linear_id() / LANES, rows = p.x.n[1] * p.x.n[2] * p.x.n[3];
    uint row = i % rows, block = i / rows, column = block * X_BLOCK + 4u * lane;
    vec4 v = vec4(0.0);
    if (column < p.x.n[0]) {
        uint at = place(p.x, uvec4(column, row % p.x.n[1], row / p.x.n[1] % p.x.n[2], row / p.x.n[1] / p.x.n[2]));
        v = vec4(x[at], x[at + p.x.s[0]], x[at + 2u * p.x.s[0]], x[at + 3u * p.x.s[0]]);
    }
    uvec4 sizes = floatBitsToUint(v) & 0x7FFFFFFFu;
    most[own] = max(max(sizes.x, sizes.y), max(sizes.z, sizes.w));
    barrier();
    uint top = 0u;
    for (uint k = 0u; k < LANES; ++k) {
        top = max(top, most[first + k]);
    }
    bool zero = top < floatBitsToUint(QUANTIZED_MIN), usual = !zero && top < 0x7F800000u;
    ivec4 n = usual ? numbers(v, uintBitsToFloat(top)) : ivec4(0);
    sums[own] = n.x + n.y + n.z + n.w;
    barrier();
    if (block >= (p.x.n[0] + SUPERBLOCK - 1u) / SUPERBLOCK * (SUPERBLOCK / X_BLOCK)) {
        return;
    }
    q[i * LANES + lane] = uint(n.x & 255) | uint(n.y & 255) << 8 | uint(n.z & 255) << 16 | uint(n.w) << 24;
    if (lane == 0u) {
        precise float d = uintBitsToFloat(top) * (1.0 / 127.0);
        int low = sums[own] + sums[own + 1u] + sums[own + 2u] + sums[own + 3u];
        int high = sums[own + 4u] + sums[own + 5u] + sums[own + 6u] + sums[own + 7u];
        uint bits = usual ? floatBitsToUint(d) : zero ? 0u : 0x7FC00000u;
        scales[i] = uvec2(bits, uint(low & 0xFFFF) | uint(high) << 16);
    }
}
