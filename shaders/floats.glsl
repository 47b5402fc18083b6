// Float functions with the same bits on every driver; canonical/state.py has them in NumPy.
//
// Every float operation is `precise` (NoContraction): no fused multiply-add, no reassociation.

// 2**d for an integer d <= 0, and 0 below the cut-off.
float pow2(float d) {
    return d < CUTOFF ? 0.0 : uintBitsToFloat(uint(int(max(d, CUTOFF)) + 127) << 23);
}

// Magnitudes below 2**-100 become +0, so that neither a driver's denormals nor the sign of zero can show.
float flush(float x) {
    return abs(x) < FLUSH ? 0.0 : x;
}

vec2 flush(vec2 x) {
    return mix(x, vec2(0.0), lessThan(abs(x), vec2(FLUSH)));
}

// The power of two that turns numbers of at most `top` into integers of at most 2**(INTEGER_BITS + 1). A top of 0
// counts as 2**-107.
float integer_power(float top) {
    uint exponent = max(floatBitsToUint(top) & 0x7F800000u, 20u << 23);
    return uintBitsToFloat((254u + INTEGER_BITS << 23) - exponent);
}

float inverse_power(float power) {
    return uintBitsToFloat((254u << 23) - floatBitsToUint(power));
}

// A step of a polynomial y of x by Horner's rule.
#define HORNER(x, c) y = y * x; y = y + c;

// 2**(s - m) for a score s <= m + 1/2: an exact power of two times a polynomial on [-1/2, 1/2].
float weight(float s, float m) {
    float whole = roundEven(s);
    precise float x = s - whole;
    precise float y = EXP2_C6;
    HORNER(x, EXP2_C5) HORNER(x, EXP2_C4) HORNER(x, EXP2_C3) HORNER(x, EXP2_C2) HORNER(x, EXP2_C1)
    HORNER(x, EXP2_C0)
    precise float d = whole - m;
    precise float p = y * pow2(d);
    return p;
}

// 1 / x for x >= 1/4: three Newton steps from an integer seed; rcp(1) = 1.
float reciprocal(float x) {
    precise float y = uintBitsToFloat(RCP_SEED - floatBitsToUint(x));
    for (int i = 0; i < 3; ++i) {
        precise float xy = x * y;
        precise float error = 1.0 - xy;
        precise float step = y * error;
        y = y + step;
    }
    return y;
}

// ln(number * 2**power) for a normal number > 0.
float ln(float number, float power) {
    uint bits = floatBitsToUint(number);
    int exponent = int(bits >> 23) - 127;
    float mantissa = uintBitsToFloat((bits & 0x7FFFFFu) | 0x3F800000u);
    bool upper = mantissa > SQRT2;
    precise float halved = mantissa * 0.5;
    precise float x = (upper ? halved : mantissa) - 1.0;
    precise float e = power + float(upper ? exponent + 1 : exponent);
    precise float z = x * x;
    precise float y = LN_D7;
    HORNER(x, LN_D6) HORNER(x, LN_D5) HORNER(x, LN_D4) HORNER(x, LN_D3) HORNER(x, LN_D2)
    HORNER(x, LN_D1) HORNER(x, LN_D0)
    y = y * x;
    y = y * z;
    precise float low = e * LN2_LO;
    y = y + low;
    precise float half_z = 0.5 * z;
    y = y - half_z;
    precise float high = e * LN2_HI;
    precise float sum = x + y;
    sum = sum + high;
    return sum;
}

// tanh x: its odd polynomial where 1 - 2**(-2 |x| log2 e) would cancel, else that difference. min() keeps an infinite x
// away from the polynomial of weight().
float hyperbolic_tangent(float x) {
    float size = min(abs(x), TANH_MAX);
    precise float exponent = size * (-2.0 * LOG2E);
    precise float e = weight(exponent, 0.0);
    precise float above = 1.0 - e;
    precise float below = 1.0 + e;
    precise float large = above * reciprocal(below);

    precise float z = size * size;
    precise float y = TANH_E4;
    HORNER(z, TANH_E3) HORNER(z, TANH_E2) HORNER(z, TANH_E1) HORNER(z, TANH_E0)
    y = y * z;
    y = y * size;
    precise float small = size + y;

    float tanh_size = size < TANH_SMALL ? small : large;
    precise float result = x < 0.0 ? -tanh_size : tanh_size;
    return result;
}
