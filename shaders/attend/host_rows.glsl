// Loads of K and V that lie as rows, as most engines keep them: (token, KV head, values), or KV heads first. Rows are
// K_STRIDE and V_STRIDE bytes apart, multiples of 2. A row of a block type is ggml's blocks one after another: scale,
// minimum, 32 fifth bits, then the values. Types of 4 bits have value i in the low half of byte i, and value i + 16 in
// the high half.
//
// Words of values are as in tiles, except for types of 4 bits: in a word of 8 dimensions the low half of byte i is
// dimension i, and the high half is dimension i + 4. A word without a byte of a row's values is never read. v: the
// buffer is V's, not K's; the compiler knows it.

const bool NHD = K_STRIDE != 0u;
// A halfword is 16 bits. Addresses in this file count halfwords, except those named `word`.
const uint K_BLOCK_HALFWORDS = K_HALVES + 2u * K_FIFTH + 2u * K_BITS;
const uint V_BLOCK_HALFWORDS = V_HALVES + 2u * V_FIFTH + 2u * V_BITS;
// 0 where all words lie at multiples of 4 bytes.
const uint K_ODD = K_STRIDE % 4u + K_HALVES * (K_BLOCK_HALFWORDS % 2u);
const uint V_ODD = V_STRIDE % 4u + V_HALVES * (V_BLOCK_HALFWORDS % 2u);
// 0 where values without blocks lie in whole pieces of 16 bytes, or, for K of 8 bits, of 8 bytes.
const uint K_PIECE = K_BITS == 8u ? 8u : 16u;
const uint K_APART = K_STRIDE % K_PIECE + K_SIZE * K_BITS % (8u * K_PIECE) + K_HALVES;
const uint V_APART = V_STRIDE % 16u + V_SIZE * V_BITS % 128u + V_HALVES;

uint stored_word(bool v, uint word) {
    if (v) {
        return v_words1[word];
    }
    return k_words1[word];
}

uint halfword_at(bool v, uint halfword) {
    return bitfieldExtract(stored_word(v, halfword >> 1u), int((halfword & 1u) << 4u), 16);
}

// The word at halfword `halfword`, and the next word.
uvec2 words_at(bool v, uint halfword) {
    uint i = halfword >> 1u;
    uvec2 w = uvec2(stored_word(v, i), stored_word(v, i + 1u));
    if ((v ? V_ODD : K_ODD) == 0u) {
        return w;
    }
    uint next = stored_word(v, i + 1u + (halfword & 1u));
    return (halfword & 1u) == 0u ? w : uvec2(bitfieldInsert(w.x >> 16u, w.y, 16, 16),
                                             bitfieldInsert(w.y >> 16u, next, 16, 16));
}

// The word at halfword `halfword`.
uint word_at(bool v, uint halfword) {
    uint w = stored_word(v, halfword >> 1u);
    if ((v ? V_ODD : K_ODD) == 0u) {
        return w;
    }
    uint next = stored_word(v, (halfword + 1u) >> 1u);
    return (halfword & 1u) == 0u ? w : bitfieldInsert(w >> 16u, next, 16, 16);
}

// The word at halfword `halfword` of a row that ends `bits` bits after it, with 0 from the row's end on.
uint last_word_at(bool v, uint halfword, uint bits) {
    if (bits >= 32u) {
        return word_at(v, halfword);
    }
    return bits == 0u ? 0u
                      : bitfieldExtract(bits <= 16u ? halfword_at(v, halfword) : word_at(v, halfword), 0, int(bits));
}

// Where the values of a block begin, counted from the row's begin.
uint values_at(bool v, uint block) {
    return v ? block * V_BLOCK_HALFWORDS + V_HALVES + 2u * V_FIFTH
             : block * K_BLOCK_HALFWORDS + K_HALVES + 2u * K_FIFTH;
}

// Part `part` of the four parts of a block of 4 bits: 8 dimensions, as one word.
uint halved_word_at(bool v, uint row, uint block, uint part) {
    uvec2 bytes = words_at(v, row + values_at(v, block) + 4u * (part & 1u));
    uvec2 w = bytes >> (4u * (part >> 1u)) & 0x0F0F0F0Fu;
    return w.x | w.y << 4u;
}

// k_chunk for rows of K.
uvec4 k_row_chunk(uint row, uint chunk, uint part) {
    uint begin = row * (K_STRIDE / 2u);
    if (K_BITS == 4u) {
        return uvec4(halved_word_at(false, begin, chunk / 4u, chunk % 4u), 0u, 0u, 0u);
    }
    if (K_HALVES > 0u) {
        return uvec4(words_at(false, begin + values_at(false, chunk / 4u) + 4u * (chunk % 4u)), 0u, 0u);
    }
    uint dim = CHUNK * chunk + 4u * part, values = 32u / K_BITS;  // of a word
    uvec4 w = uvec4(0u);
    if (K_APART == 0u && (K_SIZE == K_DIM || dim < K_SIZE)) {
        if (K_BITS == 8u) {
            return uvec4(k_words2[row * (K_STRIDE / 8u) + chunk], 0u, 0u);
        }
        return k_words4[row * (K_STRIDE / 16u) + chunk * (K_BITS / 16u) + part];
    }
    for (uint i = 0u; K_APART != 0u && i < min(CHUNK_WORDS, 4u); ++i) {
        uint first = dim + i * values;
        w[i] = last_word_at(false, begin + first * K_BITS / 16u, (K_SIZE - min(first, K_SIZE)) * K_BITS);
    }
    return w;
}

// v_words for rows of V. Dimensions after V_SIZE, which nobody reads, have any value.
uvec4 v_row_words(uint row, uint word, uint words) {
    uint begin = row * (V_STRIDE / 2u);
    uvec4 w = uvec4(0u);
    if (V_APART == 0u && words > 1u) {
        word = min(word, V_SIZE * V_BITS / 32u - words);
        return words == 2u ? uvec4(v_words2[row * (V_STRIDE / 8u) + word / 2u], 0u, 0u)
                           : v_words4[row * (V_STRIDE / 16u) + word / 4u];
    }
    for (uint i = 0u; i < words; ++i) {
        if (V_BITS == 4u) {
            w[i] = halved_word_at(true, begin, (word + i) / 4u, (word + i) % 4u);
        } else if (V_HALVES > 0u) {
            w[i] = word_at(true, begin + values_at(true, word / 8u) + 2u * (word % 8u + i));
        } else {
            uint first = min(word + i, (V_SIZE * V_BITS - 1u) / 32u);
            w[i] = last_word_at(true, begin + 2u * first, V_SIZE * V_BITS - 32u * first);
        }
    }
    return w;
}

// Dimensions dim ... dim + SLICE - 1 of a row of V, which take less than a word, as the first values of a word.
uint v_row_part(uint row, uint dim) {
    uint begin = row * (V_STRIDE / 2u), in_block = dim % BLOCK, last = (V_SIZE * V_BITS - 1u) / 16u;
    if (V_HALVES == 0u) {
        return halfword_at(true, begin + min(dim * V_BITS / 16u, last));
    }
    begin += values_at(true, dim / BLOCK);
    if (V_BITS == 8u) {
        return halfword_at(true, begin + in_block / 2u);
    }
    uint halfword = begin + in_block % 16u / 2u;
    return (SLICE == 2u ? halfword_at(true, halfword) : word_at(true, halfword)) >> (in_block / 16u * 4u) & 0x0F0F0F0Fu;
}

// The word of a block's float16 numbers, the first number in its low half, and the block's fifth bits.
uvec2 row_block_words(bool v, uint row, uint block) {
    uint halfword = row * ((v ? V_STRIDE : K_STRIDE) / 2u) + block * (v ? V_BLOCK_HALFWORDS : K_BLOCK_HALFWORDS);
    bool fifth = (v ? V_FIFTH : K_FIFTH) == 1u;
    if ((v ? V_HALVES : K_HALVES) == 2u) {
        return uvec2(word_at(v, halfword), fifth ? word_at(v, halfword + 2u) : 0u);
    }
    if (!fifth) {
        return uvec2(halfword_at(v, halfword), 0u);
    }
    uvec2 w = uvec2(stored_word(v, halfword >> 1u), stored_word(v, (halfword >> 1u) + 1u));
    return (halfword & 1u) == 0u ? uvec2(w.x, bitfieldInsert(w.x >> 16u, w.y, 16, 16)) : uvec2(w.x >> 16u, w.y);
}
