// From stored words of K and V to float32. A value is exact, or it is the float32 product scale * q, rounded once, plus
// the minimum of a block, rounded once more.
//
// `storage` is a specialization constant everywhere, so the branches on it are decided when the pipeline is made.

// On a GPU (FOLDS) float16 values are doubled as they are converted. AMD's compiler folds a plain conversion into each
// product with it (v_fma_mix_f32), and such products do not dual-issue. A conversion that doubles is a single
// instruction, too, but is not folded. No rounding changes: scores are halved afterwards, and weights before they meet
// values.
bool doubled(uint storage) {
    return FOLDS && storage == STORAGE_F16;
}

// The two float16 or bfloat16 values of a word, `doubled` or not.
vec2 from_half_words(uint storage, uint w) {
    if (storage == STORAGE_BF16) {
        return vec2(uintBitsToFloat(w << 16), uintBitsToFloat(w & 0xFFFF0000u));
    }
    precise vec2 x = unpackHalf2x16(w);
    if (doubled(storage)) {
        x = x * 2.0;
    }
    return x;
}

// The numbers that a block's dimensions share: a value is scale * q, or scale * q + minimum. fifth: fifth bits of q.
struct Block {
    float scale;
    float minimum;
    uint fifth;
};

// The scale and the minimum in a word. On a GPU each is the larger of itself and a number below all float16, so that
// AMD's compiler does not fold the conversion into every product.
vec2 both_halves(uint w) {
    vec2 x = unpackHalf2x16(w);
    return FOLDS ? max(x, vec2(EMPTY_M)) : x;
}

vec2 head_scales = vec2(1.0);  // fp8_e4m3: the scales of K and V of the workgroup's KV head

// To head_scales, where a type has such scales.
void find_head_scales() {
    uint head = (work[HEADER_KV_FIRST] + gl_WorkGroupID.z) * work[HEADER_GROUP];
    if (K_STORAGE == STORAGE_FP8_E4M3) {
        head_scales.x = uintBitsToFloat(HEAD_WORD(head, HEAD_K_SCALE));
    }
    if (V_STORAGE == STORAGE_FP8_E4M3) {
        head_scales.y = uintBitsToFloat(HEAD_WORD(head, HEAD_V_SCALE));
    }
}

// A block from the word of its float16 numbers (number `block` mod 2, or both numbers) and its fifth bits. Types
// without blocks have the scale of the head, which is 1 except for fp8_e4m3.
Block block_of(uint halves, float head_scale, uint block, uint word, uint fifth) {
    if (halves == 0u) {
        return Block(head_scale, 0.0, fifth);
    }
    if (halves == 1u) {
        return Block(unpackHalf2x16(word)[block & 1u], 0.0, fifth);
    }
    vec2 both = both_halves(word);
    return Block(both.x, both.y, fifth);
}

// Block `block` of a K row, and below of a V row.
Block k_block(uvec2 where, uint block) {
    if (NHD && K_HALVES > 0u) {
        uvec2 w = row_block_words(false, where.x, block);
        return block_of(K_HALVES, head_scales.x, 0u, w.x, w.y);
    }
    uint word = K_HALVES == 0u ? 0u : k_shared_word(where, block * K_HALVES / 2u);
    uint fifth = K_FIFTH == 0u ? 0u : k_shared_word(where, K_PAIRED + block);
    return block_of(K_HALVES, head_scales.x, block, word, fifth);
}

Block v_block(uvec2 where, uint block) {
    if (NHD && V_HALVES > 0u) {
        uvec2 w = row_block_words(true, where.x, block);
        return block_of(V_HALVES, head_scales.y, 0u, w.x, w.y);
    }
    uint word = V_HALVES == 0u ? 0u : v_shared_word(where, block * V_HALVES / 2u);
    uint fifth = V_FIFTH == 0u ? 0u : v_shared_word(where, (LATENT == 1u ? K_PAIRED : V_PAIRED) + block);
    return block_of(V_HALVES, head_scales.y, block, word, fifth);
}

// Values of 8 and 4 bits.
//
// One mask leaves two values in the mantissas of two float16 below 2**-14: q * 2**-24, or q * 2**-20. AMD's compiler
// makes scale * q + addend of such a half in one instruction (v_fma_mix_f32). scale * q and scale * (q + 128) have at
// most 19 digits. So only the sum with a minimum rounds, as in the canonical reduction, or fp8_e4m3's product with the
// head's scale; and drivers that do not fuse give the same bits.

// Value i of a word; the compiler knows i. fifth: the fifth bits of the word's values, from bit 0 on.
float narrow_value(uint storage, uint w, uint i, uint fifth, Block block) {
    precise float x;
    if (INTEGER) {
        block.scale = 1.0;
    }
    bool odd = (i & 1u) != 0u;
    uint byte = i >> 1u;  // for types of 4 bits
    if (storage == STORAGE_FP8_E4M3) {  // sign to bit 15, exponent and mantissa to bits 13 ... 7
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
    // The values of bytes `byte` and `byte` + 2, or - 2: the low halves of both bytes, or the high halves.
    uint nibbles = ((byte & 1u) == 0u ? w : w >> 8) & (odd ? 0x00F000F0u : 0x000F000Fu);
    float unit = odd ? 1048576.0 : 16777216.0;
    if (storage == STORAGE_IQ4_NL) {
        // A polynomial, whose variable is q times the fourth root of q**4's factor, comes within 0.45 of the table's
        // entry. The last sum adds 1.5 * 2**23, beyond which floats are whole numbers, and so rounds to the entry. The
        // other roundings are below 1e-4, fused or not.
        precise float y = unpackHalf2x16(nibbles)[byte >> 1] * (unit * 0.19507074);
        precise float cubic = y + 4.8866;
        precise float entry = fma(fma(fma(cubic, y, -37.8056), y, 125.6006), y, 12582912.0 - 127.0);
        x = (entry - 12582912.0) * block.scale;
        return x;
    }
    if (storage == STORAGE_Q5_0 || storage == STORAGE_Q5_1) {
        // bits i and i + 4 move to i and i + 16, for i below 4; with NHD bits i and i + 2 move to i and i + 16
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

// Eight dimensions of a key, from the words of their chunk. A value has at most 8 bits.
void unpack_k(uvec4 w, uint chunk, Block block, out vec4 low, out vec4 high) {
    uint fifth = block.fifth >> (8u * (chunk % 4u)), last = K_BITS == 8u ? w.y : w.x, from = K_BITS == 8u ? 0u : 4u;
    for (uint i = 0u; i < 4u; ++i) {
        low[i] = narrow_value(K_STORAGE, w.x, i, fifth, block);
        high[i] = narrow_value(K_STORAGE, last, from + i, fifth, block);
    }
}

// Chunk number `chunk` + `ahead` of one key: eight dimensions, which lie in `block`.
void load_k(uvec2 where, uint chunk, uint ahead, Block block, out vec4 low, out vec4 high) {
    uvec4 w = k_chunk(where, chunk, ahead, 0u);
    if (K_STORAGE == STORAGE_F32) {
        low = uintBitsToFloat(w);
        high = uintBitsToFloat(k_chunk(where, chunk, ahead, 1u));
    } else if (K_BITS == 16u) {
        low = vec4(from_half_words(K_STORAGE, w.x), from_half_words(K_STORAGE, w.y));
        high = vec4(from_half_words(K_STORAGE, w.z), from_half_words(K_STORAGE, w.w));
    } else {
        unpack_k(w, chunk + ahead, block, low, high);
    }
}
