// Float functions of the graph's operations: the same bits on every driver; zinc_attn/graph/floats.py has them in NumPy.
//
// Numbers enter flushed, infinite or NaN; results are not flushed yet.  No division, root or transcendental function of
// the driver's, no fused multiply-add (`precise` on every float operation); quotients and roots are rounded correctly,
// by integers.  Comparisons that a NaN must not enter are those of its bits.
#include "../contract.glsl"
#include "../floats.glsl"
#include "../narrow.glsl"

const uint MAGNITUDE = 0x7FFFFFFFu, INFINITE = 0x7F800000u;
#define INFINITY uintBitsToFloat(INFINITE)
#define NAN uintBitsToFloat(0x7FC00000u)

bool is_nan(float x) {
    return (floatBitsToUint(x) & MAGNITUDE) > INFINITE;
}

// A positive number: neither 0 nor infinite.
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

// The reciprocal root gives a root of 25 bits of the significand within some units of the last one; its remainder
// corrects it to within one, and the next remainder to the whole number below the root.  Its last bit says how to round:
// no root is in the middle of two floats, whose square would have 50 significant bits.
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
    int rest = int((a << 25) - r * r);
    r = rest < 0 ? r - 1u : rest > int(2u * r) ? r + 1u : r;
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

// (cos, sin) of z radians, at most an eighth of a turn, and so many quarters of a turn.
vec2 cos_sin_near(float z, uint quarter) {
    precise float square = z * z, y, sine, cosine;
    SIN_POLY(y, square)
    y = y * square;
    y = y * z;
    sine = z + y;
    COS_POLY(y, square)
    y = y * square;
    y = y * square;
    precise float half_square = 0.5 * square;
    cosine = 1.0 - half_square;
    cosine = cosine + y;
    vec2 one = (quarter & 1u) == 1u ? vec2(-sine, cosine) : vec2(cosine, sine);
    return (quarter & 2u) == 2u ? -one : one;
}

// A fraction of a turn is x + 2**32 y of 2**-64 turns.
uvec2 negated(uvec2 phase) {
    return uvec2(~phase.x + 1u, ~phase.y + uint(phase.x == 0u));
}

vec2 cos_sin_of_turns(uvec2 phase) {
    uint quarter = (phase.y + 0x20000000u) >> 30;
    uvec2 rest = uvec2(phase.x, phase.y - (quarter << 30));
    bool negative = int(rest.y) < 0;
    uvec2 size = negative ? negated(rest) : rest;
    uint zeros = size.y == 0u ? 32u : 0u;  // leading ones
    size = size.y == 0u ? uvec2(0u, size.x) : size;
    uint more = uint(31 - findMSB(size.y | 1u));
    uint top = (size.y << more) | ((size.x >> 1) >> (31u - more));
    precise float near = float(top >> 8) * 256.0 + float(top & 255u);
    precise float z = near * uintBitsToFloat((95u - zeros - more) << 23);
    z = z * TURN;
    return cos_sin_near(negative ? -z : z, quarter);
}

// (cos, sin) of x radians.
vec2 cos_sin(float x) {
    uint bits = floatBitsToUint(x);
    if ((bits & MAGNITUDE) >= INFINITE) {
        return vec2(NAN);
    }
    if (abs(x) < TURN_SMALL) {
        return cos_sin_near(x, 0u);
    }
    uint at = (bits >> 23 & 0xFFu) - 118u, shift = at & 31u;  // of INVERSE_TURN, the first bit that counts
    uvec4 table = uvec4(0u);
    for (uint i = 0u; i < 5u; ++i) {  // indices that compilers know: the table is no memory
        uvec4 words = uvec4(INVERSE_TURN[i], INVERSE_TURN[i + 1u], INVERSE_TURN[i + 2u], INVERSE_TURN[i + 3u]);
        table = i == at >> 5 ? words : table;
    }
    uvec3 window = (table.xyz << shift) | ((table.yzw >> 1) >> (31u - shift));
    uvec2 phase;
    uint high, carry, last, last_high;
    umulExtended(significand(bits), window[1], high, phase.x);
    umulExtended(significand(bits), window[2], last_high, last);
    phase.x = uaddCarry(phase.x, last_high, carry);
    phase.y = high + carry + significand(bits) * window[0];
    return cos_sin_of_turns(x < 0.0 ? negated(phase) : phase);
}
