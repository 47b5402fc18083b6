// Quantized weights: a decoder for each type, for products of few rows and of many.

// --- values ----------------------------------------------------------------------------------------------------------

// The bits from bit `from` on move to bit `to`, in every byte, and `mask` selects them.
uvec4 bits(uvec4 w, uint from, uint to, uint mask) {
    return (from >= to ? w >> (from - to) : w << (to - from)) & mask;
}

// Bits 0 ... 3 become bit 4 of four bytes.
uint spread(uint bits) {
    return ((bits & 15u) * 0x00204081u & 0x01010101u) << 4;
}

uvec4 spread_16(uint bits) {
    return uvec4(spread(bits), spread(bits >> 4), spread(bits >> 8), spread(bits >> 12));
}

const uint NIBBLES = 0x0F0F0F0Fu;
const uvec4 TABLE = TYPE == WEIGHT_TYPE_MXFP4 ? MXFP4 : IQ4_NL;

shared uint table[512];  // for a byte: the table's entries of its low half and its high half, in bytes 0 and 2

uint table_entry(uint q) {
    return bitfieldExtract(TABLE[q >> 2], int(8u * (q & 3u)), 8);
}

void fill_table() {
    const uint SIZE = gl_WorkGroupSize.x, TIMES = (256u + SIZE - 1u) / SIZE;
    if (HAS_TABLE) {
        [[unroll]] for (uint n = 0u; n < TIMES; ++n) {
            uint i = n * SIZE + gl_LocalInvocationIndex;
            table[i] = table_entry(i & 15u) | table_entry(i >> 4 & 15u) << 16;
        }
        barrier();
    }
}

// Values of the low halves of two bytes, then of their high halves.
uint pair(uint first, uint second) {
    return table[first] | table[second] << 8;
}

// Halves of words change places: the values 0 ... 15 and 16 ... 31 of a block become the values of pairs, and back.
void exchange(inout uvec4 a, inout uvec4 b) {
    uvec4 low = (a & 0xFFFFu) | b << 16;
    b = a >> 16 | (b & 0xFFFF0000u);
    a = low;
}

// The values of block j of 32 of a superblock, as bytes: the first 16, and the others. Types with a table give the
// values of pairs instead; see exchange.
void decode_pairs(uint j, out uvec4 low, out uvec4 high) {
    if (TYPE == WEIGHT_TYPE_Q8_0) {
        low = piece16(2u * j);
        high = piece16(2u * j + 1u);
    } else if (TYPE == WEIGHT_TYPE_Q2_K || TYPE == WEIGHT_TYPE_Q3_K) {
        uint first = TYPE == WEIGHT_TYPE_Q2_K ? 1u : 2u, piece = first + 2u * (j / 4u), shift = 2u * (j % 4u);
        low = bits(piece16(piece), shift, 0u, 0x03030303u);
        high = bits(piece16(piece + 1u), shift, 0u, 0x03030303u);
        if (TYPE == WEIGHT_TYPE_Q3_K) {
            low |= bits(piece16(0u), j, 2u, 0x04040404u);
            high |= bits(piece16(1u), j, 2u, 0x04040404u);
        }
    } else if (TYPE == WEIGHT_TYPE_Q4_K || TYPE == WEIGHT_TYPE_Q5_K) {
        uint piece = (TYPE == WEIGHT_TYPE_Q4_K ? 1u : 3u) + 2u * (j / 2u), shift = 4u * (j % 2u);
        low = bits(piece16(piece), shift, 0u, NIBBLES);
        high = bits(piece16(piece + 1u), shift, 0u, NIBBLES);
        if (TYPE == WEIGHT_TYPE_Q5_K) {
            low |= bits(piece16(1u), j, 4u, 0x10101010u);
            high |= bits(piece16(2u), j, 4u, 0x10101010u);
        }
    } else if (TYPE == WEIGHT_TYPE_Q6_K) {
        uint piece = 4u * (j / 4u) + 2u * (j % 2u), more = 8u + 2u * (j / 4u), shift = 4u * (j % 4u / 2u);
        low = bits(piece16(piece), shift, 0u, NIBBLES) | bits(piece16(more), 2u * (j % 4u), 4u, 0x30303030u);
        high = bits(piece16(piece + 1u), shift, 0u, NIBBLES) | bits(piece16(more + 1u), 2u * (j % 4u), 4u, 0x30303030u);
    } else {
        uvec4 w = piece16(j);
        if (HAS_TABLE) {
            [[unroll]] for (uint k = 0u; k < 4u; ++k) {
                low[k] = pair(w[k] & 255u, bitfieldExtract(w[k], 8, 8));
                high[k] = pair(bitfieldExtract(w[k], 16, 8), w[k] >> 24);
            }
            return;
        }
        low = w & NIBBLES;
        high = w >> 4 & NIBBLES;
        if (PIECES_4 > 0u && TYPE != WEIGHT_TYPE_Q4_1) {
            uint fifth = piece4(TYPE == WEIGHT_TYPE_Q5_1 ? 2u * j : j);
            low |= spread_16(fifth);
            high |= spread_16(fifth >> 16);
        }
    }
}

// The first 16 values of block j, and the others.
void decode(uint j, out uvec4 low, out uvec4 high) {
    decode_pairs(j, low, high);
    if (HAS_TABLE) {
        exchange(low, high);
    }
}

// --- scales ----------------------------------------------------------------------------------------------------------

// The scale of block j of a type of 32 values, and its minimum.
vec2 scale_32(uint j) {
    if (TYPE == WEIGHT_TYPE_Q4_1 || TYPE == WEIGHT_TYPE_Q5_1) {
        return unpackHalf2x16(piece4(TYPE == WEIGHT_TYPE_Q4_1 ? j : 2u * j + 1u));
    }
    if (TYPE == WEIGHT_TYPE_MXFP4) {
        return vec2(uintBitsToFloat((small_piece(j) - 1u) << 23), 0.0);  // 2**(exponent - 128), see least_scale
    }
    return vec2(unpackHalf2x16(small_piece(j)).x, 0.0);
}

// The scale d of a type of 256 values, and the factor of its minima.
vec2 superblock_scale() {
    if (TYPE == WEIGHT_TYPE_Q3_K || TYPE == WEIGHT_TYPE_Q6_K) {
        return vec2(unpackHalf2x16(small_piece(0u)).x, 0.0);
    }
    return unpackHalf2x16(TYPE == WEIGHT_TYPE_Q2_K || TYPE == WEIGHT_TYPE_IQ4_XS ? piece4(0u) : piece16(0u).x);
}

float byte_of(uint w, uint i) {
    return float(bitfieldExtract(w, int(8u * i), 8));
}

float signed_byte(uint w, uint i) {
    return float(bitfieldExtract(int(w), int(8u * i), 8));
}

// The scale and the minimum of block j; for a type of 256 values the scales of both halves, and then their minima.
vec4 block_scales(uint j) {
    if (!IS_256) {
        return vec4(scale_32(j), 0.0, 0.0);
    }
    if (TYPE == WEIGHT_TYPE_Q2_K) {
        uint both = piece16(0u)[j / 2u], scales = both & NIBBLES, minima = both >> 4 & NIBBLES, i = 2u * (j % 2u);
        return vec4(byte_of(scales, i), byte_of(scales, i + 1u), byte_of(minima, i), byte_of(minima, i + 1u));
    }
    if (TYPE == WEIGHT_TYPE_Q3_K) {  // 6 bits: the low bits in words 0 and 1, the others in word 2
        uint low = piece4(j / 2u % 2u) >> 4u * (j / 4u) & NIBBLES, high = piece4(2u) >> 2u * (j / 2u);
        uint four = low | (high & 0x03030303u) << 4, i = 2u * (j % 2u);
        return vec4(byte_of(four, i) - 32.0, byte_of(four, i + 1u) - 32.0, 0.0, 0.0);
    }
    if (TYPE == WEIGHT_TYPE_Q6_K) {
        uint four = piece16(12u)[j / 2u], i = 2u * (j % 2u);
        return vec4(signed_byte(four, i), signed_byte(four, i + 1u), 0.0, 0.0);
    }
    if (TYPE == WEIGHT_TYPE_IQ4_XS) {
        uint low = piece4(1u) >> 4u * (j % 2u) & NIBBLES;
        uint high = (piece4(0u) >> 16 & 0xFFu) | (piece4(0u) >> 8 & 0xFF0000u);
        high = (high | high << 4) >> 2u * (j % 2u) & 0x03030303u;  // bytes of blocks j % 2, j % 2 + 2, ...
        return vec4(byte_of(low | high << 4, j / 2u) - 32.0, 0.0, 0.0, 0.0);
    }
    uvec4 h = piece16(0u);  // q4_K and q5_K: 6 bits, the low 4 of the last four scales and minima in word w
    uint scales = j < 4u ? h.y & 0x3F3F3F3Fu : (h.w & NIBBLES) | (h.y >> 2 & 0x30303030u);
    uint minima = j < 4u ? h.z & 0x3F3F3F3Fu : (h.w >> 4 & NIBBLES) | (h.z >> 2 & 0x30303030u);
    return vec4(byte_of(scales, j % 4u), 0.0, byte_of(minima, j % 4u), 0.0);
}
