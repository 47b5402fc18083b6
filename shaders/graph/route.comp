// The experts that a row takes, and their weights: the operations of a router one after another in one dispatch, with
// each result flushed as its own dispatch leaves it.
//
// A workgroup has a row, and an invocation has the experts e = r mod SUM_LANES. An expert's place in the order is the
// number of experts before it, so the order needs no sorting network.
#version 450
#extension GL_GOOGLE_include_directive : require
#include "contract.glsl"

layout(local_size_x = SUM_LANES) in;
ROUTE_CONSTANTS
layout(set = 0, binding = ROUTE_BIND_PARAMS, std430) restrict readonly buffer Params { RouteParams p; };
layout(set = 0, binding = ROUTE_BIND_X, std430) readonly buffer X { float x[]; };
layout(set = 0, binding = ROUTE_BIND_BIAS, std430) readonly buffer Bias { float bias[]; };
layout(set = 0, binding = ROUTE_BIND_IDS, std430) writeonly buffer Ids { uint ids[]; };
layout(set = 0, binding = ROUTE_BIND_Y, std430) writeonly buffer Y { float y[]; };
#include "tensor.glsl"
#include "numbers.glsl"
#include "row_sum.glsl"
#include "soft_max.glsl"
#include "sort_key.glsl"
#include "activations.glsl"

shared uint keys[ROUTE_PIECE];
shared float values[ROUTE_PIECE];  // of the gate: x is read whole before a result is written over it
shared float chosen[CHOSEN_PIECE];

float logit(uint row, uint e) {
    return x[p.x.offset + e * p.x.s[0] + row * p.x.s[1]];
}

float in_log2(float value) {
    precise float s = flush(value) * LOG2E;
    return s;
}

// A value's part of a softmax whose weights are relative to m.
float part_of(float value, float m, float inverse_total) {
    precise float product = weight_of(in_log2(value), m) * inverse_total;
    return flush(product);
}

float gated(uint row, uint e, float m, float inverse_total) {
    float value = logit(row, e);
    return GATE == GATE_OP_NONE ? value : GATE == GATE_OP_SIGMOID ? flush(sigmoid(flush(value)))
                                                                  : part_of(value, m, inverse_total);
}

// m, which the gate's weights are relative to, and the reciprocal of the weights' sum.
void soft_max_of_row(uint row, out float m, out float inverse_total) {
    float most = LOWEST;
    precise float sum = 0.0;
    for (uint e = gl_LocalInvocationID.x; e < p.x.n[0]; e += SUM_LANES) {
        float s = in_log2(logit(row, e));
        most = s > most ? s : most;
    }
    m = rounded_most(workgroup_most(most));
    for (uint e = gl_LocalInvocationID.x; e < p.x.n[0]; e += SUM_LANES) {
        sum = sum + weight_of(in_log2(logit(row, e)), m);
    }
    inverse_total = quotient(1.0, workgroup_sum(sum));
}

// Element r of the chosen values, normed. All invocations call this function, after the last value with a 0.
float normed(float value, bool exists) {
    if (NORM == ROUTE_NORM_OP_SUM) {
        float sum = flush(workgroup_sum(exists ? flush(value) : 0.0));
        sum = sum < p.most ? sum : p.most;
        sum = flush(sum > p.least ? sum : p.least);
        return flush(quotient(flush(value), sum));
    }
    if (NORM == ROUTE_NORM_OP_SOFT_MAX) {
        float s = in_log2(value);
        float m = rounded_most(workgroup_most(exists && s > LOWEST ? s : LOWEST));
        float total = workgroup_sum(exists ? weight_of(s, m) : 0.0);
        return part_of(value, m, quotient(1.0, total));
    }
    return value;
}

void main() {
    uint row = workgroup_row(), r = gl_LocalInvocationID.x, n = p.x.n[0], count = p.ids.n[0];
    if (row >= p.x.n[1]) {
        return;
    }
    float m = 0.0, inverse_total = 0.0;
    if (GATE == GATE_OP_SOFT_MAX) {
        soft_max_of_row(row, m, inverse_total);
    }
    for (uint e = r; e < n; e += SUM_LANES) {
        float value = gated(row, e, m, inverse_total);
        values[e] = value;
        if (BIASED == 1u) {
            precise float sum = flush(value) + flush(bias[p.bias.offset + e * p.bias.s[0] + row * p.bias.s[1]]);
            value = flush(sum);
        }
        keys[e] = key_of(floatBitsToUint(value), true);
    }
    barrier();
    for (uint e = r; e < n; e += SUM_LANES) {
        uint key = keys[e], before = 0u;
        for (uint other = 0u; other < n; ++other) {
            before += uint(keys[other] < key || keys[other] == key && other < e);
        }
        if (before < count) {
            ids[p.ids.offset + before * p.ids.s[0] + row * p.ids.s[1]] = e;
            chosen[before] = values[e];
        }
    }
    barrier();
    float value = normed(r < count ? chosen[r] : 0.0, r < count);
    precise float scaled = flush(value) * p.factor;
    scaled = scaled + p.added;
    if (r < count) {
        y[p.y.offset + r * p.y.s[0] + row * p.y.s[1]] = SCALED == 1u ? flush(scaled) : value;
    }
}
