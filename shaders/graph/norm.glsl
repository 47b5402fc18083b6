// y = norm(x) [* weight] [+ bias] along dimension 0: RMS_NORM, NORM or L2_NORM; of QUANTIZED y as int8, too.
//
// Grid: x (and y) = rows.  A workgroup has a row; an invocation has its elements j = r mod SUM_LANES in each sum:
//     norm alone: mean = sum of x * factor
//     squares = sum of (x - mean)**2, each flushed; rms and l2: mean = 0
//     scale = 1 / sqrt(squares * factor + eps), or 1 / max(sqrt(squares), eps) of l2
//     y = (x - mean) * scale, then the product and the sum as operations of their own; four neighbors at a time
layout(local_size_x = SUM_LANES) in;
layout(constant_id = NORM_SPEC_OP) const uint OP = NORM_OP_RMS;
layout(constant_id = NORM_SPEC_WEIGHTED) const uint WEIGHTED = 0u;
layout(constant_id = NORM_SPEC_BIASED) const uint BIASED = 0u;
layout(set = 0, binding = NORM_BIND_PARAMS, std430) restrict readonly buffer Params { NormParams p; };
layout(set = 0, binding = NORM_BIND_X, std430) readonly buffer X { float x[]; };
layout(set = 0, binding = NORM_BIND_WEIGHT, std430) readonly buffer Weight { float weights[]; };
layout(set = 0, binding = NORM_BIND_BIAS, std430) readonly buffer Bias { float biases[]; };
layout(set = 0, binding = NORM_BIND_Y, std430) writeonly buffer Y { float y[]; };
#include "tensor.glsl"
#include "numbers.glsl"
#include "row_sum.glsl"
#ifdef QUANTIZED
layout(set = 0, binding = NORM_QUANTIZED_BIND_Q, std430) writeonly buffer Q { uint q[]; };
layout(set = 0, binding = NORM_QUANTIZED_BIND_SCALES, std430) writeonly buffer Scales { uvec2 scales[]; };
#include "quantizing.glsl"
#endif

// (mean, scale) of a row of n elements.
vec2 measures(uint of_x, uint n) {
    uint r = gl_LocalInvocationID.x;
    float mean = 0.0;
    if (OP == NORM_OP_NORM) {
        precise float sum = 0.0;
        for (uint j = r; j < n; j += SUM_LANES) {
            sum = sum + flush(x[of_x + j * p.x.s[0]]);
        }
        precise float scaled = workgroup_sum(sum) * p.factor;
        mean = flush(scaled);
    }
    precise float squares = 0.0;
    for (uint j = r; j < n; j += SUM_LANES) {
        precise float v = flush(x[of_x + j * p.x.s[0]]) - mean;
        precise float square = v * v;
        squares = squares + flush(square);
    }
    float total = workgroup_sum(squares), size = root(total);
    precise float scaled = total * p.factor;
    precise float above = flush(scaled) + p.eps;
    float inverse_size = quotient(1.0, flush(size > p.eps ? size : p.eps));
    return vec2(mean, OP == NORM_OP_L2 ? flush(inverse_size) : inverse_root(flush(above)));
}

// Element j of y, from x's; weight, bias: where their rows begin.
float result(float of_x, uint j, vec2 measured, uint weight, uint bias) {
    precise float v = flush(of_x) - measured.x;
    v = v * measured.y;
    v = flush(v);
    if (WEIGHTED != 0u) {
        precise float product = v * flush(weights[weight + repeated(p.weight, uvec4(j, 0u, 0u, 0u)).x * p.weight.s[0]]);
        v = flush(product);
    }
    if (BIASED != 0u) {
        precise float sum = v + flush(biases[bias + repeated(p.bias, uvec4(j, 0u, 0u, 0u)).x * p.bias.s[0]]);
        v = flush(sum);
    }
    return v;
}

void main() {
    uint row = workgroup_row(), n = p.x.n[0], rows = p.x.n[1] * p.x.n[2] * p.x.n[3];
    if (row >= rows) {
        return;
    }
    uvec4 at = uvec4(0u, indices(p.x, row * n).yzw);
    uint of_x = place(p.x, at), of_y = place(p.y, at), first = 4u * gl_LocalInvocationID.x;
    uint weight = WEIGHTED == 0u ? 0u : place(p.weight, repeated(p.weight, at));
    uint bias = BIASED == 0u ? 0u : place(p.bias, repeated(p.bias, at));
    vec2 measured = measures(of_x, n);
#ifdef QUANTIZED
    uint end = blocks_of_row(n) * X_BLOCK;
#else
    uint end = n;
#endif
    for (uint begin = 0u; begin < end; begin += 4u * SUM_LANES) {
        vec4 v = vec4(0.0);
        for (uint k = 0u; k < 4u; ++k) {
            uint j = begin + first + k;
            if (j < n) {
                v[k] = result(x[of_x + j * p.x.s[0]], j, measured, weight, bias);
                y[of_y + j * p.y.s[0]] = v[k];
            }
        }
#ifdef QUANTIZED
        quantize(v, (begin + first) / X_BLOCK * rows + row, begin + first < end);
#endif
    }
}
