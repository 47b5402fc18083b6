// Quotients and narrow floats of float32 numbers, all given as bits: the same on every driver.
//
// Integer operations round to nearest, ties to even. Operands are 0 or normal numbers.

uint significand(uint x) {
    return (x & 0x7FFFFFu) | 0x800000u;
}

// x / y for a y that is not 0. A quotient below the normal numbers becomes a zero of its sign.
//
// The reciprocal gives the quotient of the significands, 25 bits, within 8 units of the last bit. The first remainder
// corrects the quotient to within one unit, and the second remainder corrects it to the whole number below the exact
// quotient. The last bit of that number says how to round, because no quotient lies in the middle of two floats: b
// would have 25 bits.
uint divide(uint x, uint y) {
    uint a = significand(x), b = significand(y), sign = (x ^ y) & 0x80000000u;
    bool less = a < b;
    float near = reciprocal(uintBitsToFloat((y & 0x7FFFFFu) | 0x3F800000u));  // 2**23 / b
    precise float guess = float(a) * near;
    guess = guess * (less ? 4.0 : 2.0);
    uint q = uint(guess);
    int rest = int((a << (less ? 25u : 24u)) - q * b);  // its upper bits cancel
    precise float missing = float(rest) * near;
    missing = missing * 1.1920928955078125e-7;  // 2**-23
    int more = int(floor(missing));
    rest -= more * int(b);
    q = uint(int(q) + more + (rest < 0 ? -1 : rest >= int(b) ? 1 : 0));
    int exponent = int(x >> 23 & 0xFFu) - int(y >> 23 & 0xFFu) + 127 - int(less);
    bool zero = (x & 0x7FFFFFFFu) == 0u || exponent < 1;
    return sign | (zero ? 0u : (uint(exponent - 1) << 23) + ((q + 1u) >> 1));
}

// 1 / x, and 0 for x = 0.
float inverse(uint x) {
    return (x & 0x7FFFFFFFu) == 0u ? 0.0 : uintBitsToFloat(divide(0x3F800000u, x));
}

// x * 2**power as a float of `mantissa` bits whose exponents are biased by `bias`. The product must not overflow.
uint narrowed(uint x, int power, uint mantissa, int bias) {
    int exponent = int(x >> 23 & 0xFFu) - 127 + power + bias;
    uint shift = min(23u - mantissa + uint(max(1 - exponent, 0)), 25u);  // denormal numbers have fewer bits
    uint m = significand(x), odd = (m >> shift) & 1u;
    uint rounded = (m + (1u << (shift - 1u)) - 1u + odd) >> shift;
    return (uint(max(exponent - 1, 0)) << mantissa) + rounded;
}

uint to_float16(uint x, int power) {
    return (x >> 31 << 15) | narrowed(x, power, 10u, 15);
}

uint to_e4m3(uint x, int power) {
    return (x >> 31 << 7) | narrowed(x, power, 3u, 7);
}
