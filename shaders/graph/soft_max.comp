// y = softmax(x * scale + slope * mask) along dimension 0.
//
// A workgroup has a row; an invocation has its elements j = r mod SUM_LANES in each step:
//     m = the largest score, in log2 units, rounded to an integer; a sink is a score, too
//     total = sum of 2**(score - m), the sink's last
//     y = 2**(score - m) * (1 / total)
// A NaN or an infinite m makes the whole row NaN.
#version 450
#extension GL_GOOGLE_include_directive : require
#include "contract.glsl"

layout(local_size_x = SUM_LANES) in;
SOFT_MAX_CONSTANTS
layout(set = 0, binding = SOFT_MAX_BIND_PARAMS, std430) restrict readonly buffer Params { SoftMaxParams p; };
layout(set = 0, binding = SOFT_MAX_BIND_X, std430) readonly buffer X { float x[]; };
layout(set = 0, binding = SOFT_MAX_BIND_MASK, std430) readonly buffer Mask { uint mask[]; };
layout(set = 0, binding = SOFT_MAX_BIND_SINKS, std430) readonly buffer Sinks { float sinks[]; };
layout(set = 0, binding = SOFT_MAX_BIND_Y, std430) writeonly buffer Y { float y[]; };
#include "tensor.glsl"
#include "numbers.glsl"
#include "float_types.glsl"
#include "row_sum.glsl"
#include "soft_max.glsl"

float slope_of(uint head) {
    bool first = head < p.heads;
    precise float exponent = (first ? p.step : p.half_step) * float(first ? head + 1u : 2u * (head - p.heads) + 1u);
    return weight(exponent, 0.0);
}

// The score of element j in log2 units.
float score(uint x_begin, uint mask_begin, float slope, uint j) {
    precise float t = flush(x[x_begin + j * p.x.s[0]]) * p.scale;
    if (MASK_TYPE != MASK_TYPE_NONE) {
        precise float added = slope * flush(LOAD(mask, MASK_TYPE == MASK_TYPE_F32 ? FLOAT_TYPE_F32 : FLOAT_TYPE_F16,
                                                 mask_begin + j * p.mask.s[0]));
        t = t + added;
    }
    precise float s = t * LOG2E;
    return s;
}

void main() {
    uint row = workgroup_row(), n = p.x.n[0], r = gl_LocalInvocationID.x;
    if (row >= p.x.n[1] * p.x.n[2] * p.x.n[3]) {
        return;
    }
    uvec4 index = uvec4(0u, indices(p.x, row * n).yzw);
    uint x_begin = place(p.x, index), y_begin = place(p.y, index);
    uint mask_begin = MASK_TYPE == MASK_TYPE_NONE ? 0u : place(p.mask, repeated(p.mask, index));
    float slope = p.step == 0.0 ? 1.0 : slope_of(index.z), most = LOWEST;
    for (uint j = r; j < n; j += SUM_LANES) {
        float s = score(x_begin, mask_begin, slope, j);
        most = s > most ? s : most;
    }
    precise float sink = HAS_SINKS != 0u ? flush(sinks[p.sinks + index.z]) * LOG2E : LOWEST;
    float m = rounded_most(max(workgroup_most(most), sink));
    precise float sum = 0.0;
    for (uint j = r; j < n; j += SUM_LANES) {
        sum = sum + weight_of(score(x_begin, mask_begin, slope, j), m);
    }
    precise float total = workgroup_sum(sum);
    if (HAS_SINKS != 0u) {
        total = total + weight_of(sink, m);
    }
    float inverse_total = quotient(1.0, total);
    for (uint j = r; j < n; j += SUM_LANES) {
        precise float product = weight_of(score(x_begin, mask_begin, slope, j), m) * inverse_total;
        y[y_begin + j * p.y.s[0]] = flush(product);
    }
}
