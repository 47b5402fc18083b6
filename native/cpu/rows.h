// Rows of K and V where they lie, in tiles or as rows of an engine (shaders/attend/words.glsl and host_rows.glsl), and
// their values, eight dimensions (a chunk) at a time.
#pragma once
#include "contract.h"

namespace zinc {
// The numbers that a block's dimensions share: a value is scale * q, or scale * q + minimum. fifth: fifth bits of q.
struct Block {
    float scale, minimum;
    uint fifth;
};

// Where a key's values begin, and where the numbers that its blocks share begin.
struct Row {
    const uint8_t *values, *shared;
};

// Rows of K or of V. Steps are bytes: from a chunk of a row to the next, from a word that blocks share to the next.
struct Rows {
    const uint8_t *bytes;
    uint storage, dims, size;  // size: dimensions of an engine's rows
    uint bits, halves, fifth, paired;
    size_t tile_bytes, shared_at, key_step, shared_key_step, chunk_step, shared_step;  // of tiles
    size_t stride, block_bytes;  // of an engine's rows, from a row to the next; 0 for tiles
    float head_scale;

    Rows(const void *bytes, uint storage, uint dims, uint size, uint tile, uint stride, bool keys, float scale)
        : bytes((const uint8_t *)bytes), storage(storage), dims(dims), size(stride ? size : dims), stride(stride),
          head_scale(storage == STORAGE_FP8_E4M3 ? scale : 1.0f) {
        const bool block = storage == STORAGE_Q8_0 || storage >= STORAGE_Q5_1;
        bits = storage == STORAGE_F32 ? 32 : storage <= STORAGE_BF16 ? 16 : storage <= STORAGE_FP8_E4M3 ? 8 : 4;
        halves = !block ? 0 : storage == STORAGE_Q5_1 || storage == STORAGE_Q4_1 ? 2 : 1;
        fifth = storage == STORAGE_Q5_1 || storage == STORAGE_Q5_0;
        const size_t blocks = (dims + BLOCK - 1) / BLOCK, words = size_t(dims) * bits / 32;
        paired = uint(blocks * halves + 1) / 2;
        const size_t shared = paired + blocks * fifth;
        block_bytes = 2 * halves + 4 * fifth + 4 * bits;
        tile_bytes = (tile * (words + shared) + 3) / 4 * 16;
        shared_at = 4 * tile * words;
        chunk_step = keys ? tile * bits : bits;
        key_step = keys ? bits : 4 * words;
        shared_step = keys ? 4 * tile : 4;
        shared_key_step = keys ? 4 : 4 * shared;
    }
    // Row number `row` of an engine's rows, or the row at a place of a tile.
    Row row(size_t row, size_t tile, size_t place) const {
        const uint8_t *first = bytes + (stride ? row * stride : tile * tile_bytes + place * key_step);
        return {first, bytes + tile * tile_bytes + shared_at + place * shared_key_step};
    }
};

// Eight bytes as numbers.
template <typename B> static ZINC_INLINE I8 bytes_at(const void *from) {
#if defined(__AVX2__)
    const __m128i bytes = _mm_loadl_epi64(static_cast<const __m128i *>(from));
    return (I8)(std::is_signed_v<B> ? _mm256_cvtepi8_epi32(bytes) : _mm256_cvtepu8_epi32(bytes));
#else
    return __builtin_convertvector((load<Vector<B, 8>>(from)), I8);
#endif
}
static ZINC_INLINE float half_at(const void *from) { return halves_to_floats<float>(uint(load<uint16_t>(from))); }

static ZINC_INLINE Block block_of(const Rows &rows, Row row, uint block) {
    if (rows.halves == 0)
        return {rows.head_scale, 0.0f, 0};
    if (rows.stride) {
        const uint8_t *from = row.values + block * rows.block_bytes;
        const uint fifth = rows.fifth ? load<uint>(from + 2 * rows.halves) : 0;
        return {half_at(from), rows.halves == 2 ? half_at(from + 2) : 0.0f, fifth};
    }
    const uint fifth = rows.fifth ? load<uint>(row.shared + (rows.paired + block) * rows.shared_step) : 0;
    if (rows.halves == 2) {
        const uint8_t *from = row.shared + block * rows.shared_step;
        return {half_at(from), half_at(from + 2), fifth};
    }
    return {half_at(row.shared + block / 2 * rows.shared_step + 2 * (block & 1)), 0.0f, fifth};
}

// Eight numbers of 4 bits.
static ZINC_INLINE U8 nibbles_of(const Rows &rows, Row row, uint chunk) {
    if (rows.stride) {
        const uint8_t *values = row.values + (chunk / 4 + 1) * rows.block_bytes - BLOCK / 2 + 8 * (chunk & 1);
        return (U8)bytes_at<uint8_t>(values) >> (4 * (chunk >> 1 & 1)) & 15u;
    }
    return (load<uint>(row.values + chunk * rows.chunk_step) - (U8){}) >> (U8){0, 4, 8, 12, 16, 20, 24, 28} & 15u;
}

// Eight values of a row of type S.
template <uint S> static ZINC_INLINE F8 values_of(const Rows &rows, Row row, uint chunk, const Block &block) {
    const float scale = block.scale;
    const uint8_t *from = row.values + (rows.stride ? chunk * rows.bits : chunk * rows.chunk_step);
    uint8_t padded[32] = {};
    if (rows.halves == 0 && rows.size < 8 * chunk + 8) {  // an engine's row ends within the chunk
        if (rows.size > 8 * chunk)
            std::memcpy(padded, from, (rows.size - 8 * chunk) * rows.bits / 8);
        from = padded;
    }
    if constexpr (S == STORAGE_F32)
        return load<F8>(from);
    if constexpr (S == STORAGE_F16)
        return from_halves(from);
    if constexpr (S == STORAGE_BF16)
        return (F8)(__builtin_convertvector((load<Vector<uint16_t, 8>>(from)), U8) << 16);
    if constexpr (S == STORAGE_FP8_E4M3) {
        const Halves w = __builtin_convertvector((U8)bytes_at<uint8_t>(from), Halves);
        const Halves halves = (w & 0x7F) << 7 | (w & 0x80) << 8;
        return from_halves(&halves) * scale;
    }
    if constexpr (S == STORAGE_Q8_0) {
        if (rows.stride)
            from = row.values + chunk / 4 * rows.block_bytes + 2 + chunk % 4 * 8;
        return __builtin_convertvector(bytes_at<int8_t>(from), F8) * scale;
    }
    U8 q = nibbles_of(rows, row, chunk);
    if constexpr (S == STORAGE_IQ4_NL) {
        const F8 low = {-127, -104, -83, -65, -49, -35, -22, -10}, high = {1, 13, 25, 38, 53, 69, 89, 113};
        return __builtin_shuffle(low, high, q) * scale;
    }
    if constexpr (S == STORAGE_Q5_0 || S == STORAGE_Q5_1)
        q |= ((block.fifth >> 8 * (chunk & 3)) - (U8){}) >> (U8){0, 1, 2, 3, 4, 5, 6, 7} << 4 & 16u;
    const F8 numbers = __builtin_convertvector((I8)q, F8);
    if constexpr (S == STORAGE_Q4_0)
        return (numbers - 8.0f) * scale;
    if constexpr (S == STORAGE_Q5_0)
        return (numbers - 16.0f) * scale;
    return numbers * scale + block.minimum;
}
}  // namespace zinc
