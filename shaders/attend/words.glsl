// Loads of K and V as stored words, and loads of the numbers that a block of 32 dimensions shares.
//
// A tile holds TILE tokens of one KV head. A leaf is one tile of 64 tokens, or several smaller tiles where pages are
// small.
//   K: (K_DIM / 8, TILE, 8), so that neighboring lanes (keys) read neighboring pieces of 16 bytes.
//   V: (TILE, V_DIM), so that neighboring lanes (slices) read neighboring words.
//   Types with blocks: the words that blocks share follow the values, K (K_SCALES, TILE), V (TILE, V_SCALES): the
//   scales of all blocks, two a word, or scale and minimum in a word, and then the words of fifth bits.
//   With strides K and V lie as rows instead (NHD, host_rows.glsl), and `where` is a row.
//   With LATENT there is no V: a slice of a value row lies in the chunks of K, whose pieces of neighboring keys touch.
// A buffer has one name per load width. Branches on K_STORAGE and V_STORAGE are decided when the pipeline is made.

// Words of a tile, filled up to whole pieces of 16 bytes.
const uint K_TILE_WORDS = (TILE * (K_VALUES + K_SCALES) + 3u) / 4u * 4u;
const uint V_TILE_WORDS = (TILE * (V_VALUES + V_SCALES) + 3u) / 4u * 4u;

layout(set = 0, binding = ATTEND_BIND_K, std430) readonly buffer K1 { uint k_words1[]; };
layout(set = 0, binding = ATTEND_BIND_K, std430) readonly buffer K2 { uvec2 k_words2[]; };
layout(set = 0, binding = ATTEND_BIND_K, std430) readonly buffer K4 { uvec4 k_words4[]; };
layout(set = 0, binding = ATTEND_BIND_V, std430) readonly buffer V1 { uint v_words1[]; };
layout(set = 0, binding = ATTEND_BIND_V, std430) readonly buffer V2 { uvec2 v_words2[]; };
layout(set = 0, binding = ATTEND_BIND_V, std430) readonly buffer V4 { uvec4 v_words4[]; };
#include "host_rows.glsl"

// Where key `key` of a leaf lies, for the workgroup's KV head: (tile, position in it), or, with NHD, (row, 0).
uvec2 locate(Item item, Leaf leaf, uint key) {
    uint token = leaf.index * KEYS_PER_LEAF + key;
    uint tile = TILE == KEYS_PER_LEAF ? leaf.index : token / TILE;
    uint shift = work[HEADER_PAGE_SHIFT];
    uint page = work[HEADER_FIRST_PAGE] + work[item.page_table + (tile >> shift)];
    if (NHD) {
        uint slot = (page * work[HEADER_PAGE_TILES] + (tile & ((1u << shift) - 1u))) * TILE + token % TILE;
        return uvec2(slot * work[HEADER_TOKEN_ROWS] + gl_WorkGroupID.z * work[HEADER_HEAD_ROWS], 0u);
    }
    uint first = (page * work[HEADER_KV_HEADS] + gl_WorkGroupID.z) * work[HEADER_PAGE_TILES];
    return uvec2(first + (tile & ((1u << shift) - 1u)), TILE == KEYS_PER_LEAF ? key : token % TILE);
}

// The words of K's chunk number `chunk` + `ahead`, at most four; float32 has a second part. The index begins with the
// terms that the chunks in flight share, so that the compiler puts the other terms into the load's immediate offset.
uvec4 k_chunk(uvec2 where, uint chunk, uint ahead, uint part) {
    if (NHD) {
        return k_row_chunk(where.x, chunk + ahead, part);
    }
    const uint WORDS = CHUNK_WORDS > 4u ? 4u : CHUNK_WORDS, LOADS = CHUNK_WORDS / WORDS;
    uint first = where.x * (K_TILE_WORDS / WORDS) + LOADS * (chunk * TILE + where.y);
    uint index = first + (LOADS * TILE * ahead + part);
    if (WORDS == 1u) {
        return uvec4(k_words1[index], 0u, 0u, 0u);
    }
    if (WORDS == 2u) {
        return uvec4(k_words2[index], 0u, 0u);
    }
    return k_words4[index];
}

// `words` (1, 2 or 4) words of a value row from word `word` on, in one load. The last sum adds the term that all lanes
// share. The mask changes no number, but it keeps AMD's compiler from making a sum of three, so that the sum and the
// index's shift are one instruction.
uvec4 v_words(uvec2 where, uint word, uint words) {
    if (NHD) {
        return v_row_words(where.x, word, words);
    }
    const uint VALUE_WORDS = LATENT == 1u ? CHUNK_WORDS : V_VALUES;
    uint tile = LATENT == 1u ? K_TILE_WORDS / words : V_TILE_WORDS / words;
    uint row = where.x * tile + where.y * (VALUE_WORDS / words) & 0x3FFFFFFFu;
    uint place = LATENT == 1u ? word / CHUNK_WORDS * (TILE * CHUNK_WORDS) + word % CHUNK_WORDS : word;
    uint first = row + place / words;
    if (words == 1u) {
        return uvec4(v_words1[first], 0u, 0u, 0u);
    }
    if (words == 2u) {
        return uvec4(v_words2[first], 0u, 0u);
    }
    return v_words4[first];
}

// Word `i` of the numbers that the blocks of a K row share, and below of a V row.
uint k_shared_word(uvec2 where, uint i) {
    return k_words1[where.x * K_TILE_WORDS + TILE * K_VALUES + i * TILE + where.y];
}

uint v_shared_word(uvec2 where, uint i) {
    if (LATENT == 1u) {
        return k_shared_word(where, i);
    }
    return v_words1[where.x * V_TILE_WORDS + TILE * V_VALUES + where.y * V_SCALES + i];
}
