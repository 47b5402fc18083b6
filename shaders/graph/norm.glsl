// y = norm(x) along dimension 0 (RMS_NORM, NORM or L2_NORM), and then the operations that follow. With QUANTIZED a
// second result has y as int8; with SUMMED the kernel first makes x, a sum of experts. With TURNED and the constant
// ROPE y is ROPE of the norm.
//
// A workgroup has a row; an invocation has its elements j = r mod SUM_LANES in each sum:
//     norm alone: mean = sum of x * factor
//     squares = sum of (x - mean)**2, each flushed; rms and l2: mean = 0
//     scale = 1 / sqrt(squares * factor + eps), or 1 / max(sqrt(squares), eps) of l2
//     y = (x - mean) * scale, then FIRST and SECOND as operations of their own; four neighbors at a time
layout(local_size_x = SUM_LANES) in;
#ifdef SUMMED
NORM_SUMMED_CONSTANTS
layout(set = 0, binding = NORM_BIND_PARAMS, std430) restrict readonly buffer Params { NormSummedParams p; };
layout(set = 0, binding = NORM_BIND_X, std430) coherent buffer X { float x[]; };
layout(set = 0, binding = NORM_SUMMED_BIND_EXPERTS, std430) readonly buffer Experts { float experts[]; };
layout(set = 0, binding = NORM_SUMMED_BIND_WEIGHTS, std430) readonly buffer Weights { float weights[]; };
layout(set = 0, binding = NORM_SUMMED_BIND_PLUS, std430) readonly buffer Plus { float plus[]; };
layout(set = 0, binding = NORM_SUMMED_BIND_MORE, std430) readonly buffer More { float more[]; };
#else
NORM_CONSTANTS
layout(set = 0, binding = NORM_BIND_PARAMS, std430) restrict readonly buffer Params { NormParams p; };
layout(set = 0, binding = NORM_BIND_X, std430) readonly buffer X { float x[]; };
#endif
layout(set = 0, binding = NORM_BIND_A, std430) readonly buffer A { float a[]; };
layout(set = 0, binding = NORM_BIND_B, std430) readonly buffer B { float b[]; };
layout(set = 0, binding = NORM_BIND_Y, std430) writeonly buffer Y { float y[]; };
#include "tensor.glsl"
#include "numbers.glsl"
#include "row_sum.glsl"
#include "norm_scale.glsl"
#include "follow.glsl"
#ifdef QUANTIZED
layout(set = 0, binding = NORM_QUANTIZED_BIND_Q, std430) writeonly buffer Packed { uint packed[]; };
layout(set = 0, binding = NORM_QUANTIZED_BIND_SCALES, std430) writeonly buffer PackedScales { uvec2 packed_scales[]; };
#include "quantizing.glsl"
#endif
#ifdef SUMMED
#include "expert_sums.glsl"
#endif
#ifdef TURNED
layout(set = 0, binding = NORM_BIND_POSITIONS, std430) readonly buffer Positions { uint positions[]; };
layout(set = 0, binding = NORM_BIND_TABLE, std430) readonly buffer Table { uint table[]; };
#include "rope.glsl"
#endif

// (mean, scale) of a row of n elements.
vec2 measures(uint x_begin, uint n) {
    uint r = gl_LocalInvocationID.x;
    float mean = 0.0;
    if (OP == NORM_OP_NORM) {
        precise float sum = 0.0;
        for (uint j = r; j < n; j += SUM_LANES) {
            sum = sum + flush(x[x_begin + j * p.x.s[0]]);
        }
        precise float scaled = workgroup_sum(sum) * p.factor;
        mean = flush(scaled);
    }
    precise float squares = 0.0;
    for (uint j = r; j < n; j += SUM_LANES) {
        precise float v = flush(x[x_begin + j * p.x.s[0]]) - mean;
        precise float square = v * v;
        squares = squares + flush(square);
    }
    return vec2(mean, norm_scale(OP, workgroup_sum(squares), p.factor, p.eps));
}

// Where the row of an operand that repeats begins.
uint row_of(Tensor t, uint op, uvec4 index) {
    return reads(op) ? place(t, repeated(t, index)) : 0u;
}

uint column_of(Tensor t, uint j) {
    return repeated(t, uvec4(j, 0u, 0u, 0u)).x * t.s[0];
}

// Element j of y, from element j of x. a_begin and b_begin: where the rows of a and b begin.
float result(float x_j, uint j, vec2 measured, uint a_begin, uint b_begin) {
    precise float v = flush(x_j) - measured.x;
    v = v * measured.y;
    v = followed(FIRST, flush(v), reads(FIRST) ? flush(a[a_begin + column_of(p.a, j)]) : p.scales[0]);
    return followed(SECOND, v, reads(SECOND) ? flush(b[b_begin + column_of(p.b, j)]) : p.scales[1]);
}

void main() {
    uint row = workgroup_row(), n = p.x.n[0], rows = p.x.n[1] * p.x.n[2] * p.x.n[3];
    if (row >= rows) {
        return;
    }
    uvec4 index = uvec4(0u, indices(p.x, row * n).yzw);
    uint x_begin = place(p.x, index), y_begin = place(p.y, index), first = 4u * gl_LocalInvocationID.x;
    uint a_begin = row_of(p.a, FIRST, index), b_begin = row_of(p.b, SECOND, index);
#ifdef SUMMED
    for (uint j = gl_LocalInvocationID.x; j < n; j += SUM_LANES) {
        x[x_begin + j] = sum_at(j, row);
    }
    memoryBarrierBuffer();
    barrier();
#endif
    vec2 measured = measures(x_begin, n);
#ifdef TURNED
    for (uint u = gl_LocalInvocationID.x; ROPE != 0u && u < n / 2u; u += SUM_LANES) {
        bool turns = u < p.pairs;
        uint copied = 2u * (u - p.pairs), apart = turns ? p.step : 1u;
        uint e = turns ? p.first + u * (p.step == 1u ? 2u : 1u) : copied + (copied < p.first ? 0u : 2u * p.pairs);
        vec2 pair = vec2(result(x[x_begin + e * p.x.s[0]], e, measured, a_begin, b_begin),
                         result(x[x_begin + (e + apart) * p.x.s[0]], e + apart, measured, a_begin, b_begin));
        pair = turns ? turned(pair, u, index.z) : pair;
        y[y_begin + e * p.y.s[0]] = uintBitsToFloat(settled(floatBitsToUint(pair.x)));
        y[y_begin + (e + apart) * p.y.s[0]] = uintBitsToFloat(settled(floatBitsToUint(pair.y)));
    }
    if (ROPE != 0u) {
        return;
    }
#endif
#ifdef QUANTIZED
    uint blocks = p.joined > 1u ? n / X_BLOCK : blocks_of_row(n), end = blocks * X_BLOCK;
    uint first_block = row % p.joined * blocks * (rows / p.joined) + row / p.joined;
#else
    uint end = n;
#endif
    for (uint begin = 0u; begin < end; begin += 4u * SUM_LANES) {
        vec4 v = vec4(0.0);
        for (uint k = 0u; k < 4u; ++k) {
            uint j = begin + first + k;
            if (j < n) {
                v[k] = result(x[x_begin + j * p.x.s[0]], j, measured, a_begin, b_begin);
                y[y_begin + j * p.y.s[0]] = v[k];
            }
        }
#ifdef QUANTIZED
        quantize(v, (begin + first) / X_BLOCK * (rows / p.joined) + first_block, begin + first < end);
#endif
    }
}
