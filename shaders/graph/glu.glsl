// y = act(a) * b, element by element. act(a) is flushed as an operation of its own. With QUANTIZED y is float32, and a
// second result has y as int8.
layout(local_size_x = 256) in;
GLU_CONSTANTS
layout(set = 0, binding = GLU_BIND_PARAMS, std430) restrict readonly buffer Params { GluParams p; };
layout(set = 0, binding = GLU_BIND_A, std430) readonly buffer A { uint a[]; };
layout(set = 0, binding = GLU_BIND_B, std430) readonly buffer B { uint b[]; };
layout(set = 0, binding = GLU_BIND_Y, std430) buffer Y { uint y[]; };
const uint Y_TYPE = TYPE;
#include "elementwise.glsl"
#ifdef QUANTIZED
layout(set = 0, binding = GLU_QUANTIZED_BIND_Q, std430) writeonly buffer Packed { uint packed[]; };
layout(set = 0, binding = GLU_QUANTIZED_BIND_SCALES, std430) writeonly buffer PackedScales { uvec2 packed_scales[]; };
#include "quantizing.glsl"
#endif
#include "activations.glsl"

float activation(float x) {
    switch (OP) {
    case GLU_OP_REGLU: return x > 0.0 ? x : 0.0;
    case GLU_OP_GEGLU: return gelu(x);
    case GLU_OP_GEGLU_ERF: return gelu_erf(x);
    case GLU_OP_GEGLU_QUICK: return gelu_quick(x);
    case GLU_OP_SWIGLU_OAI: return silu(x, p.alpha);
    case GLU_OP_MUL: return x;
    default: return silu(x, 1.0);
    }
}

float value(uvec4 index) {
    float x = flush(LOAD(a, TYPE, place(p.a, index))), gate = flush(LOAD(b, TYPE, place(p.b, index)));
    if (OP == GLU_OP_SWIGLU_OAI || OP == GLU_OP_SWIGLU_CLAMP) {
        x = p.limit < x ? p.limit : x;
        gate = gate < -p.limit ? -p.limit : p.limit < gate ? p.limit : gate;
    }
    precise float above = gate + 1.0;
    precise float product = flush(activation(x)) * (OP == GLU_OP_SWIGLU_OAI ? above : gate);
    return flush(OP == GLU_OP_REGLU && !(x > 0.0) ? 0.0 : product);
}

void main() {
#ifdef QUANTIZED
    uvec4 index;
    uint i = linear_id() / BLOCK_LANES;
    bool exists = block_at(p.y, i, index);
    vec4 v = vec4(0.0);
    for (uint k = 0u; k < 4u && index.x < p.y.n[0]; ++k, ++index.x) {
        v[k] = value(index);
        y[place(p.y, index)] = floatBitsToUint(v[k]);
    }
    quantize(v, i, exists);
#else
    write_elements();
#endif
}
