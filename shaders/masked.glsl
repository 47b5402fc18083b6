// Values of 8 and 4 bits on a GPU, two of them per mask: the same numbers as `quantized` has, in fewer instructions.
//
// Two values are masked at a time into the mantissas of two float16 below 2**-14: q * 2**-24, or q * 2**-20.  AMD's
// compiler makes scale * q + addend of such a half in one instruction (v_fma_mix_f32).  scale * q and
// scale * (q + 128) have at most 19 digits, so the one rounding is that of adding a minimum, the canonical one, or, of
// fp8_e4m3, that of its product with the head's scale.

// Whether K's values are made so, and V's.  With more than 8 query vectors, whose addresses are in the scalar
// registers, V's masks do not fit beside them.
const bool K_MASKED = CHUNKS_AHEAD > 1u && K_BITS <= 8u;
const bool V_MASKED = CHUNKS_AHEAD > 1u && VECTORS <= 8u && V_BITS <= 8u;

// Value i of a word; i is known to the compiler.  fifth: the fifth bits of the word's values, from bit 0 on.
float masked(uint storage, uint w, uint i, uint fifth, Block block) {
    precise float x;
    bool odd = (i & 1u) != 0u;
    uint byte = i >> 1u;  // of 4 bits
    if (storage == STORAGE_FP8_E4M3) {  // sign to bit 15, exponent and mantissa to bits 13 ... 7, as in from_fp8
        uint bytes = (odd ? w >> 8 : w) & 0x00FF00FFu;
        x = unpackHalf2x16((bytes + (bytes & 0x00800080u)) << 7)[i >> 1] * block.scale;
        return x;
    }
    if (storage == STORAGE_Q8_0) {
        w ^= 0x80808080u;  // q + 128
        uint bytes = (odd ? w >> 8 : w) & 0x00FF00FFu;
        x = fma(unpackHalf2x16(bytes)[i >> 1], block.scale * 16777216.0, block.scale * -128.0);
        return x;
    }
    if (NHD) {
        odd = i > 3u;
        byte = i & 3u;
    }
    // Values of bytes `byte` and `byte` + 2, or - 2, the low halves of both or the high ones.
    uint nibbles = ((byte & 1u) == 0u ? w : w >> 8) & (odd ? 0x00F000F0u : 0x000F000Fu);
    float unit = odd ? 1048576.0 : 16777216.0;
    if (storage == STORAGE_IQ4_NL) {
        // A polynomial of q that is within 0.45 of its entry in the table, plus 1.5 * 2**23, to which no number but a
        // whole one can be added: the last sum rounds to the entry.  Fused or not, the other roundings are below 1e-4.
        precise float q = unpackHalf2x16(nibbles)[byte >> 1] * unit;
        precise float entry = fma(fma(fma(fma(q, 0.001448, 0.036273), q, -1.4386), q, 24.501), q, 12582912.0 - 127.0);
        x = (entry - 12582912.0) * block.scale;
        return x;
    }
    if (storage == STORAGE_Q5_0 || storage == STORAGE_Q5_1) {
        // bits i and i + 4 to i and i + 16, for i below 4; with NHD bits i and i + 2 to i and i + 16
        uint spread = (fifth & 0xFFu) | fifth << (NHD ? 14u : 12u);
        uint left = i % 4u == 0u ? 4u : (i % 4u == 1u ? 7u : (i % 4u == 2u ? 2u : 5u));
        if (NHD) {
            left = 4u - (i & 1u);
        }
        nibbles |= spread << left & (odd ? 0x01000100u : 0x00100010u);
    }
    float addend = storage == STORAGE_Q4_0   ? block.scale * -8.0
                   : storage == STORAGE_Q5_0 ? block.scale * -16.0
                                             : block.minimum;
    x = fma(unpackHalf2x16(nibbles)[byte >> 1], block.scale * unit, addend);
    return x;
}

// As load_k, where K_MASKED, from the words of the chunk.
void masked_k(uvec4 w, uint chunk, Block block, out vec4 low, out vec4 high) {
    uint fifth = block.fifth >> (8u * (chunk % 4u)), last = K_BITS == 8u ? w.y : w.x, from = K_BITS == 8u ? 0u : 4u;
    low = vec4(masked(K_STORAGE, w.x, 0u, fifth, block), masked(K_STORAGE, w.x, 1u, fifth, block),
               masked(K_STORAGE, w.x, 2u, fifth, block), masked(K_STORAGE, w.x, 3u, fifth, block));
    high = vec4(masked(K_STORAGE, last, from, fifth, block), masked(K_STORAGE, last, from + 1u, fifth, block),
                masked(K_STORAGE, last, from + 2u, fifth, block), masked(K_STORAGE, last, from + 3u, fifth, block));
}
