// y = op(x), element by element, then [* other] or [+ other]; the operations are ggml's.
#version 450
#extension GL_GOOGLE_include_directive : require
#include "contract.glsl"

layout(local_size_x = 256) in;
UNARY_CONSTANTS
layout(set = 0, binding = UNARY_BIND_PARAMS, std430) restrict readonly buffer Params { UnaryParams p; };
layout(set = 0, binding = UNARY_BIND_X, std430) readonly buffer X { uint x[]; };
layout(set = 0, binding = UNARY_BIND_OTHER, std430) readonly buffer Other { float other[]; };
layout(set = 0, binding = UNARY_BIND_Y, std430) buffer Y { uint y[]; };
#include "elementwise.glsl"
#include "turns.glsl"
#include "activations.glsl"
#include "follow.glsl"

float hardsigmoid(float v) {
    precise float shifted = v + 3.0;
    float sixth = quotient(shifted, 6.0);
    float above = sixth > 0.0 ? sixth : 0.0;  // of a NaN, too
    return above < 1.0 ? above : 1.0;
}

// To nearest, ties away from zero.
float rounded(float v) {
    float whole = trunc(v);
    precise float rest = v - whole;
    precise float away = whole + (v < 0.0 ? -1.0 : 1.0);
    return abs(rest) >= 0.5 ? away : whole;
}

float xielu(float v) {
    precise float linear = p.c * v, square = p.b * v;
    square = square * v;
    precise float above = square + linear;
    precise float below = exponential_minus_1(v < p.d ? v : p.d) - v;
    below = below * p.a;
    below = below + linear;
    return v > 0.0 ? above : below;
}

float operation(float v) {
    precise float square = v * v, scaled = v * p.a;
    precise float biased = scaled + p.b, product = v * hardsigmoid(v);
    switch (OP) {
    case UNARY_OP_ABS: return abs(v);
    case UNARY_OP_SGN: return v > 0.0 ? 1.0 : v < 0.0 ? -1.0 : 0.0;
    case UNARY_OP_NEG: return -v;
    case UNARY_OP_STEP: return v > 0.0 ? 1.0 : 0.0;
    case UNARY_OP_TANH: return tanh_of(v);
    case UNARY_OP_ELU: return v > 0.0 ? v : exponential_minus_1(v);
    case UNARY_OP_RELU: return v > 0.0 ? v : 0.0;
    case UNARY_OP_SIGMOID: return sigmoid(v);
    case UNARY_OP_GELU: return gelu(v);
    case UNARY_OP_GELU_QUICK: return gelu_quick(v);
    case UNARY_OP_SILU: return silu(v, 1.0);
    case UNARY_OP_HARDSWISH: return product;
    case UNARY_OP_HARDSIGMOID: return hardsigmoid(v);
    case UNARY_OP_EXP: return exponential(v);
    case UNARY_OP_EXPM1: return exponential_minus_1(v);
    case UNARY_OP_SOFTPLUS: return softplus(v);
    case UNARY_OP_GELU_ERF: return gelu_erf(v);
    case UNARY_OP_XIELU: return xielu(v);
    case UNARY_OP_FLOOR: return floor(v);
    case UNARY_OP_CEIL: return ceil(v);
    case UNARY_OP_ROUND: return rounded(v);
    case UNARY_OP_TRUNC: return trunc(v);
    case UNARY_OP_SCALE: return biased;
    case UNARY_OP_CLAMP: v = v < p.b ? v : p.b; return v > p.a ? v : p.a;
    case UNARY_OP_SQR: return square;
    case UNARY_OP_SQRT: return root(v);
    case UNARY_OP_LOG: return logarithm(v);
    case UNARY_OP_SIN: return cos_sin(v).y;
    case UNARY_OP_COS: return cos_sin(v).x;
    case UNARY_OP_LEAKY_RELU: return v > 0.0 ? v : v < 0.0 ? scaled : 0.0;
    default: return p.a;  // fill
    }
}

float value(uvec4 index) {
    float v = flush(operation(flush(LOAD(x, X_TYPE, place(p.x, index)))));
    return followed(THEN, v, reads(THEN) ? flush(other[place(p.other, repeated(p.other, index))]) : 0.0);
}

void main() {
    write_elements();
}
