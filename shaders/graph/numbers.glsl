// Float functions of the graph's operations, with the same bits on every driver and in zinc_attn/graph/floats.py.
//
// Numbers enter flushed, infinite or NaN, and results are not flushed yet. The functions use no division, root or
// transcendental function of the driver's, and no fused multiply-add (every float operation is `precise`). Integer
// operations round quotients and roots correctly. Comparisons that a NaN must not enter compare bits.
#include "../contract.glsl"
#include "../floats.glsl"
#include "../narrow.glsl"

const uint MAGNITUDE = 0x7FFFFFFFu, INFINITE = 0x7F800000u;
#define INFINITY uintBitsToFloat(INFINITE)
#define NAN uintBitsToFloat(0x7FC00000u)

bool is_nan(float x) {
    return (floatBitsToUint(x) & MAGNITUDE) > INFINITE;
}

// Whether x is a positive number, neither 0 nor infinite.
bool is_positive(float x) {
    return floatBitsToUint(x) - 1u < INFINITE - 1u;
}

float exponential(float x) {
    float near = is_nan(x) ? 0.0 : clamp(x, EXP_LEAST, EXP_MOST);
    precise float scaled = near * LOG2E;
    float whole = roundEven(scaled);
    precise float high = whole * LN2_HI, low = whole * LN2_LO;
    precise float rest = near - high;
    rest = rest - low;
    precise float z = rest * LOG2E;
    precise float y = EXP2_C6;
    HORNER(z, EXP2_C5) HORNER(z, EXP2_C4) HORNER(z, EXP2_C3) HORNER(z, EXP2_C2) HORNER(z, EXP2_C1) HORNER(z, EXP2_C0)
    uint power = floatBitsToUint(y) + (uint(int(whole)) << 23);
    return is_nan(x) ? x : x > EXP_MOST ? INFINITY : uintBitsToFloat(power);
}

// exp(x) - 1
float exponential_minus_1(float x) {
    bool is_small = abs(x) < EXPM1_SMALL;
    float near = is_small ? x : 0.0;
    precise float y, square = near * near;
    EXPM1_POLY(y, near)
    y = y * square;
    precise float small = near + y, large = exponential(x) - 1.0;
    return is_small ? small : large;
}

float logarithm(float x) {
    bool plain = is_positive(x);
    float y = ln(plain ? x : 1.0, 0.0);
    return plain ? y : x == 0.0 ? -INFINITY : floatBitsToUint(x) == INFINITE ? INFINITY : NAN;
}

float softplus(float x) {
    precise float sum = 1.0 + exponential(x);
    return x > SOFTPLUS_LINEAR ? x : logarithm(sum);
}

float quotient(float x, float y) {
    uint a = floatBitsToUint(x) & MAGNITUDE, b = floatBitsToUint(y) & MAGNITUDE;
    uint sign = (floatBitsToUint(x) ^ floatBitsToUint(y)) & ~MAGNITUDE;
    bool large = int(a >> 23) - int(b >> 23) - int(significand(a) < significand(b)) > 127;
    if (a > INFINITE || b > INFINITE || a == b && (a == 0u || a == INFINITE)) {
        return NAN;
    }
    bool infinite = a == INFINITE || b == 0u || large && b != INFINITE;
    return uintBitsToFloat(sign | (infinite ? INFINITE : b == INFINITE ? 0u : divide(a, b)));
}

float inverse_root(float x) {
    bool plain = is_positive(x);
    float near = plain ? x : 1.0;
    precise float y = uintBitsToFloat(INVERSE_ROOT_SEED - (floatBitsToUint(near) >> 1)), half_x = 0.5 * near;
    for (int i = 0; i < 3; ++i) {
        precise float half_xy = half_x * y;
        precise float half_xyy = half_xy * y;
        precise float error = 0.5 - half_xyy;
        precise float step = y * error;
        y = y + step;
    }
    return plain ? y : x == 0.0 ? INFINITY : floatBitsToUint(x) == INFINITE ? 0.0 : NAN;
}

// The reciprocal root gives a root of 25 bits of the significand within some units of the last bit. The remainder
// corrects it to the whole number below the exact root, or to the number before, as a trial of all significands shows.
// The last bit says how to round, because no root lies in the middle of two floats: its square would have 50
// significant bits.
float root(float x) {
    if (!is_positive(x)) {
        return x == 0.0 || floatBitsToUint(x) == INFINITE ? x : NAN;
    }
    int exponent = int(floatBitsToUint(x) >> 23) - 127;
    uint a = significand(floatBitsToUint(x)) << (exponent & 1);  // the root of a * 2**25 is wanted
    float near = inverse_root(float(a));
    precise float guess = float(a) * near;
    guess = guess * 5792.61865234375;  // 2**12.5
    uint r = uint(guess);
    precise float missing = float(int((a << 25) - r * r)) * near;  // its upper bits cancel
    missing = missing * 8.6316745750310983e-5;  // 2**-13.5
    r += uint(int(floor(missing)));
    r += uint(int((a << 25) - r * r) > int(2u * r));
    return uintBitsToFloat((uint((exponent >> 1) + 126) << 23) + ((r + 1u) >> 1));
}

float tanh_of(float x) {
    return is_nan(x) ? x : hyperbolic_tangent(is_nan(x) ? 0.0 : x);
}

float error_function(float x) {
    float size = is_nan(x) ? 0.0 : min(abs(x), ERF_MOST);
    precise float y, exponent, square = size * size;
    ERF_POLY(y, square)
    y = y * size;
    ERFC_POLY(exponent, size)
    precise float small = size + y, large = 1.0 - weight(exponent, 0.0);
    float result = size < ERF_SMALL ? small : large;
    return is_nan(x) ? x : x < 0.0 ? -result : result;
}
