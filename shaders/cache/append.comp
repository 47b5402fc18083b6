// Rows move between a row tensor and the paged cache: GATHER 0 appends new tokens, GATHER 1 reads tokens back.
//
// Grid: x = row, y = KV head. A row has, for each KV head, K values, V values, K scales, V scales, in words. Record x
// of the work buffer has the row's position in its sequence and the sequence's page table.
#version 450
#extension GL_GOOGLE_include_directive : require
#include "../contract.glsl"

layout(local_size_x = 32) in;
layout(constant_id = APPEND_SPEC_K_VALUES) const uint K_VALUES = 64u;       // words of K per token and KV head
layout(constant_id = APPEND_SPEC_V_VALUES) const uint V_VALUES = 64u;       // of V
layout(constant_id = APPEND_SPEC_K_SCALES) const uint K_SCALES = 0u;        // of the scales of K
layout(constant_id = APPEND_SPEC_V_SCALES) const uint V_SCALES = 0u;        // of V
layout(constant_id = APPEND_SPEC_CHUNK_WORDS) const uint CHUNK_WORDS = 4u;  // words of 8 dimensions
layout(constant_id = APPEND_SPEC_TILE) const uint TILE = 64u;
layout(constant_id = APPEND_SPEC_K_STRIDE) const uint K_STRIDE = 0u;  // bytes from a row of K to the next; 0: tiles
layout(constant_id = APPEND_SPEC_V_STRIDE) const uint V_STRIDE = 0u;
layout(constant_id = APPEND_SPEC_GATHER) const uint GATHER = 0u;            // 1: from the cache to the rows

// Words of a tile, filled up to whole pieces of 16 bytes.
const uint K_TILE_WORDS = (TILE * (K_VALUES + K_SCALES) + 3u) / 4u * 4u;
const uint V_TILE_WORDS = (TILE * (V_VALUES + V_SCALES) + 3u) / 4u * 4u;

layout(set = 0, binding = APPEND_BIND_WORK, std430) restrict readonly buffer Work { uint work[]; };
layout(set = 0, binding = APPEND_BIND_ROWS, std430) restrict buffer Rows { uint rows[]; };
layout(set = 0, binding = APPEND_BIND_K, std430) restrict buffer K { uint k_words[]; };
layout(set = 0, binding = APPEND_BIND_V, std430) restrict buffer V { uint v_words[]; };

// A word of the cache's K, or of its V.
uint cached(bool v, uint word) {
    if (v) {
        return v_words[word];
    }
    return k_words[word];
}

// Move one word between the cache's K (or V) and the row tensor.
void move_word(bool v, uint in_cache, uint in_row) {
    if (GATHER != 0u) {
        rows[in_row] = cached(v, in_cache);
    } else if (v) {
        v_words[in_cache] = rows[in_row];
    } else {
        k_words[in_cache] = rows[in_row];
    }
}

// Move one word of a row that begins at halfword `begin` of the cache. Where a row is no whole number of words, two
// rows may share a word, and each sets its own half.
void move_part(bool v, uint begin, uint bytes, uint i, uint in_row) {
    if (bytes % 4u == 0u) {
        move_word(v, begin / 2u + i, in_row);
        return;
    }
    uint gathered = 0u;
    for (uint half_word = 0u; half_word < min(bytes / 2u - 2u * i, 2u); ++half_word) {
        uint halfword = begin + 2u * i + half_word, shift = 16u * (halfword & 1u);
        if (GATHER != 0u) {
            gathered |= (cached(v, halfword >> 1u) >> shift & 0xFFFFu) << (16u * half_word);
            continue;
        }
        uint keep = 0xFFFF0000u >> shift, bits = bitfieldExtract(rows[in_row], int(16u * half_word), 16) << shift;
        if (v) {
            atomicAnd(v_words[halfword >> 1u], keep);
            atomicOr(v_words[halfword >> 1u], bits);
        } else {
            atomicAnd(k_words[halfword >> 1u], keep);
            atomicOr(k_words[halfword >> 1u], bits);
        }
    }
    if (GATHER != 0u) {
        rows[in_row] = gathered;
    }
}

void main() {
    uint record = work[HEADER_APPEND_TABLE] + gl_WorkGroupID.x * APPEND_WORDS;
    uint token = work[record + APPEND_POSITION];
    if (token == NO_TOKEN) {
        return;
    }
    uint kv_heads = work[HEADER_KV_HEADS], shift = work[HEADER_PAGE_SHIFT];
    uint tile = token / TILE, position = token % TILE;
    uint page = work[HEADER_FIRST_PAGE] + work[work[record + APPEND_PAGE_TABLE] + (tile >> shift)];
    uint in_page = tile & ((1u << shift) - 1u);
    uint number = (page * kv_heads + gl_WorkGroupID.y) * work[HEADER_PAGE_TILES] + in_page;
    uint k_tile = number * K_TILE_WORDS, v_tile = number * V_TILE_WORDS;
    uint row_head = gl_WorkGroupID.x * work[HEADER_ROW_KV_HEADS] + work[HEADER_KV_FIRST] + gl_WorkGroupID.y;
    uint row = row_head * (K_VALUES + V_VALUES + K_SCALES + V_SCALES);
    if (K_STRIDE != 0u) {
        uint slot = (page * work[HEADER_PAGE_TILES] + in_page) * TILE + position;
        uint cache_row = slot * work[HEADER_TOKEN_ROWS] + gl_WorkGroupID.y * work[HEADER_HEAD_ROWS];
        for (uint i = gl_LocalInvocationID.x; i < K_VALUES; i += WAVE) {
            move_part(false, cache_row * (K_STRIDE / 2u), K_STRIDE, i, row + i);
        }
        for (uint i = gl_LocalInvocationID.x; i < V_VALUES; i += WAVE) {
            move_part(true, cache_row * (V_STRIDE / 2u), V_STRIDE, i, row + K_VALUES + i);
        }
        return;
    }
    for (uint i = gl_LocalInvocationID.x; i < K_VALUES; i += WAVE) {
        uint chunk = i / CHUNK_WORDS;
        move_word(false, k_tile + (chunk * TILE + position) * CHUNK_WORDS + i % CHUNK_WORDS, row + i);
    }
    row += K_VALUES;
    for (uint i = gl_LocalInvocationID.x; i < V_VALUES; i += WAVE) {
        move_word(true, v_tile + position * V_VALUES + i, row + i);
    }
    row += V_VALUES;
    for (uint i = gl_LocalInvocationID.x; i < K_SCALES; i += WAVE) {
        move_word(false, k_tile + TILE * K_VALUES + i * TILE + position, row + i);
    }
    row += K_SCALES;
    for (uint i = gl_LocalInvocationID.x; i < V_SCALES; i += WAVE) {
        move_word(true, v_tile + TILE * V_VALUES + position * V_SCALES + i, row + i);
    }
}
