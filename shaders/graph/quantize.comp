// Rows of float32 values as int8; see quantizing.glsl.
#version 450
#extension GL_GOOGLE_include_directive : require
#include "contract.glsl"

layout(local_size_x = 256) in;
layout(set = 0, binding = QUANTIZE_BIND_PARAMS, std430) restrict readonly buffer Params { QuantizeParams p; };
layout(set = 0, binding = QUANTIZE_BIND_X, std430) readonly buffer X { float x[]; };
layout(set = 0, binding = QUANTIZE_BIND_Q, std430) writeonly buffer Packed { uint packed[]; };
layout(set = 0, binding = QUANTIZE_BIND_SCALES, std430) writeonly buffer PackedScales { uvec2 packed_scales[]; };
#include "tensor.glsl"
#include "numbers.glsl"
#include "quantizing.glsl"

void main() {
    uvec4 index;
    uint i = linear_id() / BLOCK_LANES, s = p.x.s[0];
    bool exists = block_at(p.x, i, index);
    uint x_begin = place(p.x, index);
    vec4 v = index.x < p.x.n[0] ? vec4(x[x_begin], x[x_begin + s], x[x_begin + 2u * s], x[x_begin + 3u * s])
                                : vec4(0.0);
    quantize(v, i, exists);
}
