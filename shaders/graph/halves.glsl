// 16-bit floats to and from the bits of float32, by integers: denormal numbers and the signs of zeros stay, and NaN is
// a NaN.  Needs ../narrow.glsl.

uint from_f16(uint h) {
    uint sign = h >> 15u << 31u, exponent = h >> 10u & 31u, mantissa = h & 0x3FFu;
    uint small = mantissa == 0u ? 0u : floatBitsToUint(float(mantissa)) - (24u << 23u);  // mantissa * 2**-24
    uint large = (exponent == 31u ? 0x7F800000u : (exponent + 112u) << 23u) | mantissa << 13u;
    return sign | (exponent == 0u ? small : large);
}

// Rounds to nearest, ties to even, beyond the largest number to infinity.
uint to_f16(uint x) {
    uint magnitude = x & 0x7FFFFFFFu, sign = x >> 31u << 15u;
    return magnitude > 0x7F800000u ? sign | 0x7E00u : magnitude >= 0x47800000u ? sign | 0x7C00u : to_float16(x, 0);
}

uint to_bf16(uint x) {
    return (x & 0x7FFFFFFFu) > 0x7F800000u ? x >> 16u | 0x40u : (x + 0x7FFFu + (x >> 16u & 1u)) >> 16u;
}

uint bits_of(uint type) {
    return type == MOVE_TYPE_I8 ? 8u : type == MOVE_TYPE_F32 || type == MOVE_TYPE_I32 ? 32u : 16u;
}

// The bits of an element of f32, f16, bf16 or i32 as those of a float32.
uint float_of(uint type, uint bits) {
    return type == MOVE_TYPE_F16    ? from_f16(bits)
           : type == MOVE_TYPE_BF16 ? bits << 16u
           : type == MOVE_TYPE_I32  ? floatBitsToUint(float(int(bits)))
                                    : bits;
}
