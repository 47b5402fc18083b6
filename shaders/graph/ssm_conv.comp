// y[c, t, s] = the sum over taps i of x[t + i, c, s] * w[i, c], ascending; then [+ bias], then [silu]; then, with
// NORMED, norms of neighboring channels.
#version 450
#extension GL_GOOGLE_include_directive : require
#include "contract.glsl"

layout(local_size_x = 256) in;
SSM_CONV_CONSTANTS
layout(set = 0, binding = SSM_CONV_BIND_PARAMS, std430) restrict readonly buffer Params { SsmConvParams p; };
layout(set = 0, binding = SSM_CONV_BIND_X, std430) readonly buffer X { float x[]; };
layout(set = 0, binding = SSM_CONV_BIND_LATE, std430) readonly buffer Late { float late[]; };
layout(set = 0, binding = SSM_CONV_BIND_W, std430) readonly buffer W { float w[]; };
layout(set = 0, binding = SSM_CONV_BIND_BIAS, std430) readonly buffer Bias { float bias[]; };
layout(set = 0, binding = SSM_CONV_BIND_Y, std430) writeonly buffer Y { float y[]; };
layout(set = 0, binding = SSM_CONV_BIND_FIRST, std430) writeonly buffer First { float first[]; };
layout(set = 0, binding = SSM_CONV_BIND_SECOND, std430) writeonly buffer Second { float second[]; };
#include "tensor.glsl"
#include "numbers.glsl"
#include "activations.glsl"
#include "row_sum.glsl"
#include "norm_scale.glsl"

float factor(float v) {
    return abs(v) < PRODUCT_MIN ? 0.0 : v;
}

// The result of token t: tap i reads number t + i of x, and then of late. x_begin, late_begin and w_begin: where the
// channel begins.
float result(uint t, uint x_begin, uint late_begin, uint w_begin, uint channel) {
    precise float sum = 0.0;
    for (uint i = 0u; i < p.w.n[0]; ++i) {
        uint n = p.x.n[0], token = t + i;
        float v = token < n ? x[x_begin + token * p.x.s[0]] : late[late_begin + (token - n) * p.late.s[0]];
        precise float product = factor(v) * factor(w[w_begin + i * p.w.s[0]]);
        sum = sum + product;
    }
    float v = flush(sum);
    if (BIASED != 0u) {
        precise float with_bias = v + flush(bias[p.bias.offset + channel * p.bias.s[0]]);
        v = flush(with_bias);
    }
    return SILU != 0u ? flush(silu(v, 1.0)) : v;
}

void normalize(float v, uint channel, uint sequence) {
    precise float square = v * v;
    float scale = norm_scale(OP, group_sum(flush(square), p.size), p.factor, p.eps);
    precise float normed = v * scale;
    for (uint i = 0u; i < 2u; ++i) {
        if (channel >= p.begins[i] && channel < p.ends[i]) {
            uint element = p.offsets[i] + (p.ends[i] - p.begins[i]) * sequence + channel - p.begins[i];
            precise float scaled = flush(normed) * p.scales[i];
            if (i == 0u) {
                first[element] = flush(scaled);
            } else {
                second[element] = flush(scaled);
            }
        }
    }
}

void main() {
    uint channels = p.y.n[0], tokens = p.y.n[1], runs = (tokens + p.run - 1u) / p.run, id = linear_id();
    uint channel = id % channels, begin = id / channels % runs * p.run, sequence = id / channels / runs;
    if (sequence >= p.y.n[2]) {
        return;
    }
    uvec4 row = uvec4(0u, channel, sequence, 0u);
    uint x_begin = place(p.x, row), late_begin = place(p.late, row), w_begin = p.w.offset + channel * p.w.s[1];
    float v = 0.0;
    for (uint t = begin; t < min(begin + p.run, tokens); ++t) {
        v = result(t, x_begin, late_begin, w_begin, channel);
        y[place(p.y, uvec4(channel, t, sequence, 0u))] = v;
    }
    if (NORMED != 0u) {
        normalize(v, channel, sequence);
    }
}
