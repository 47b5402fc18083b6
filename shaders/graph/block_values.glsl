// Values of ggml's blocks of 32 of weight type TYPE: (d * scale) * q - minimum, with each operation rounded.
//
// The including shader has byte_at(i), the bytes of the block's pieces of 16 bytes; small_half(i), the half words of
// its pieces of 4 bytes; and last_piece(), the smaller piece, as zinc_attn/graph/pieces.py lists them.

float half_float(uint bits) {
    return widened(bits, FLOAT_TYPE_F16, 0u);
}

float value_of(float d, uint scale, int q, float m, uint minimum) {
    precise float step = d * float(int(scale)), least = m * float(minimum);
    precise float scaled = step * float(q);
    precise float value = scaled - least;
    return flush(value);
}

uint nibble(uint i, uint high) {
    return byte_at(i) >> (4u * high) & 15u;
}

int iq4(uint q) {
    return bitfieldExtract(int(IQ4_NL[q >> 2]), int(8u * (q & 3u)), 8);
}

// Value i of a block of 32.
float value_of_32(uint i) {
    if (TYPE == WEIGHT_TYPE_Q8_0) {
        return value_of(half_float(last_piece()), 1u, bitfieldExtract(int(byte_at(i)), 0, 8), 0.0, 0u);
    }
    int q = int(nibble(i % 16u, i / 16u));
    if (TYPE == WEIGHT_TYPE_MXFP4) {  // twice e2m1, times 2**(e - 128)
        uint e = last_piece();
        int magnitude = (q & 7) < 2 ? q & 7 : (2 | q & 1) << ((q >> 1 & 3) - 1);
        return value_of(uintBitsToFloat(e < 2u ? 0u : (e - 1u) << 23u), 1u, q < 8 ? magnitude : -magnitude, 0.0, 0u);
    }
    if (TYPE == WEIGHT_TYPE_Q5_0 || TYPE == WEIGHT_TYPE_Q5_1) {
        q |= int(small_half(i / 16u) >> (i % 16u) & 1u) << 4;
    }
    if (TYPE == WEIGHT_TYPE_Q4_1 || TYPE == WEIGHT_TYPE_Q5_1) {
        const uint AT = TYPE == WEIGHT_TYPE_Q5_1 ? 2u : 0u;
        return value_of(half_float(small_half(AT)), 1u, q, -half_float(small_half(AT + 1u)), 1u);
    }
    q = TYPE == WEIGHT_TYPE_IQ4_NL ? iq4(uint(q)) : q - (TYPE == WEIGHT_TYPE_Q5_0 ? 16 : 8);
    return value_of(half_float(last_piece()), 1u, q, 0.0, 0u);
}
