// Operands of products of floats.

// Element `at` of a type, whose word is w[at] or w[at / 2].
float element(uint type, uint word, uint at) {
    uint bits = bitfieldExtract(word, int(16u * (at % 2u)), 16);
    float value = uintBitsToFloat(type == FLOAT_TYPE_F32 ? word : bits << 16);
    value = type == FLOAT_TYPE_F16 ? unpackHalf2x16(bits).x : value;
    return abs(value) < PRODUCT_MIN ? 0.0 : value;
}
