// y[c, t, s] = the sum over taps i of x[t + i, c, s] * w[i, c], ascending; then [+ bias], then [silu].
//
// Grid: x (and y) = channels * runs of tokens * sequences in pieces of 256.  An invocation has a channel's run.
#version 450
#extension GL_GOOGLE_include_directive : require
#include "contract.glsl"

layout(local_size_x = 256) in;
layout(constant_id = SSM_CONV_SPEC_BIASED) const uint BIASED = 0u;
layout(constant_id = SSM_CONV_SPEC_SILU) const uint SILU = 0u;
layout(set = 0, binding = SSM_CONV_BIND_PARAMS, std430) restrict readonly buffer Params { SsmConvParams p; };
layout(set = 0, binding = SSM_CONV_BIND_X, std430) readonly buffer X { float x[]; };
layout(set = 0, binding = SSM_CONV_BIND_W, std430) readonly buffer W { float w[]; };
layout(set = 0, binding = SSM_CONV_BIND_BIAS, std430) readonly buffer Bias { float bias[]; };
layout(set = 0, binding = SSM_CONV_BIND_Y, std430) writeonly buffer Y { float y[]; };
#include "tensor.glsl"
#include "numbers.glsl"
#include "activations.glsl"

float factor(float v) {
    return abs(v) < PRODUCT_MIN ? 0.0 : v;
}

float result(uint of_x, uint of_w, uint channel) {
    precise float sum = 0.0;
    for (uint i = 0u; i < p.w.n[0]; ++i) {
        precise float product = factor(x[of_x + i * p.x.s[0]]) * factor(w[of_w + i * p.w.s[0]]);
        sum = sum + product;
    }
    float v = flush(sum);
    if (BIASED != 0u) {
        precise float with_bias = v + flush(bias[p.bias.offset + channel * p.bias.s[0]]);
        v = flush(with_bias);
    }
    return SILU != 0u ? flush(silu(v, 1.0)) : v;
}

void main() {
    uint channels = p.y.n[0], tokens = p.y.n[1], runs = (tokens + p.run - 1u) / p.run, id = linear_id();
    uint channel = id % channels, first = id / channels % runs * p.run, sequence = id / channels / runs;
    if (sequence >= p.y.n[2]) {
        return;
    }
    uint of_w = p.w.offset + channel * p.w.s[1];
    for (uint t = first; t < min(first + p.run, tokens); ++t) {
        uint of_x = place(p.x, uvec4(t, channel, sequence, 0u));
        y[place(p.y, uvec4(channel, t, sequence, 0u))] = result(of_x, of_w, channel);
    }
}
