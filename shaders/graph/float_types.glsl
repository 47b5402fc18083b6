// Elements of types f32, f16 and bf16 in words. Conversions from them are exact, and conversions to them round to
// nearest, ties to even.

float widened(uint word, uint type, uint i) {
    if (type == FLOAT_TYPE_F32) {
        return uintBitsToFloat(word);
    }
    uint half_word = (word >> (16u * (i & 1u))) & 0xFFFFu;
    if (type == FLOAT_TYPE_BF16) {
        return uintBitsToFloat(half_word << 16);
    }
    uint size = half_word & 0x7FFFu, sign = (half_word & 0x8000u) << 16;
    uint moved = (size << 13) + (size < 0x7C00u ? 0x38000000u : 0x70000000u);
    precise float denormal = float(size) * 5.9604644775390625e-8;  // 2**-24
    return uintBitsToFloat(sign | (size < 0x400u ? floatBitsToUint(denormal) : moved));
}

// Element i of a buffer of words.
#define LOAD(words, type, i) widened(words[(type) == FLOAT_TYPE_F32 ? (i) : (i) >> 1], type, i)

// The bits of x in a type.
uint encoded(float x, uint type) {
    uint bits = floatBitsToUint(x), size = bits & MAGNITUDE;
    if (type == FLOAT_TYPE_F32) {
        return bits;
    }
    if (type == FLOAT_TYPE_BF16) {
        return size > INFINITE ? bits >> 16 | 64u : (bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16;
    }
    uint half_word = size > INFINITE ? 0x7E00u : size >= 0x477FF000u ? 0x7C00u : to_float16(size, 0);
    return bits >> 31 << 15 | half_word;
}
