// Loads of K and V in their stored dtype, as float32.  All conversions are exact.
//
// A tile holds TILE tokens of one KV head; a leaf is one tile of 64, or several smaller ones where pages are small.
// K: (head_dim / 8, TILE, 8), so that neighbouring lanes (keys) read neighbouring pieces of 16 bytes.
// V: (TILE, head_dim), so that neighbouring lanes (dimension slices) do.
// q8_0: int8 in these shapes, then the float16 scales of 32-dimension blocks, two a word: K (SCALES, TILE) words,
// V (TILE, SCALES) words.  A buffer is bound under one name per load width; the width follows from SLICE, a constant.
//
// FRESH builds read the newest tokens from the rows the host just uploaded: a row is, per KV head,
// K values, V values, K scales, V scales.  (Kompute orders nothing between an append and an attend.)

#if defined(KV_F32)
const uint ROW_VALUES = HEAD_DIM;  // words of one token's K (or V) of one KV head
const uint SCALES = 0u;            // words of its scales
#elif defined(KV_Q8_0)
const uint ROW_VALUES = HEAD_DIM / 4u;
const uint SCALES = (HEAD_DIM + 63u) / 64u;
#else
const uint ROW_VALUES = HEAD_DIM / 2u;
const uint SCALES = 0u;
#endif
const uint TILE_WORDS = TILE * (ROW_VALUES + SCALES);
const uint IN_ROWS = 0xFFFFFFFFu;  // in place of a tile: the token is in the uploaded rows

layout(set = 0, binding = ATTEND_BIND_K, std430) readonly buffer K1 { uint k_words1[]; };
layout(set = 0, binding = ATTEND_BIND_K, std430) readonly buffer K2 { uvec2 k_words2[]; };
layout(set = 0, binding = ATTEND_BIND_K, std430) readonly buffer K4 { uvec4 k_words4[]; };
layout(set = 0, binding = ATTEND_BIND_V, std430) readonly buffer V1 { uint v_words1[]; };
layout(set = 0, binding = ATTEND_BIND_V, std430) readonly buffer V2 { uvec2 v_words2[]; };
layout(set = 0, binding = ATTEND_BIND_V, std430) readonly buffer V4 { uvec4 v_words4[]; };
#if FRESH
layout(set = 0, binding = ATTEND_BIND_ROWS, std430) restrict readonly buffer Rows { uint fresh_words[]; };
#endif

// Where a key of this workgroup's KV head lies: (tile, position in it), or (IN_ROWS, row).
uvec2 locate(Leaf leaf, uint key) {
    uint token = leaf.index * LEAF + key;
#if FRESH
    if (token >= leaf.fresh_begin) {
        return uvec2(IN_ROWS, leaf.fresh_row + token - leaf.fresh_begin);
    }
#endif
    uint tile = TILE == LEAF ? leaf.index : token / TILE;
    uint shift = work[HEADER_PAGE_SHIFT];
    uint page = work[leaf.page_table + (tile >> shift)];
    uint first = (page * work[HEADER_KV_HEADS] + gl_WorkGroupID.y) * work[HEADER_PAGE_TILES];
    return uvec2(first + (tile & ((1u << shift) - 1u)), TILE == LEAF ? key : token % TILE);
}

#if FRESH
// Word `at` of an uploaded row.
uint fresh_word(uint row, uint at) {
    return fresh_words[(row * work[HEADER_ROW_KV_HEADS] + work[HEADER_KV_FIRST] + gl_WorkGroupID.y) * 2u * (ROW_VALUES + SCALES) + at];
}
#endif

// `count` words of K from word `at` of the token's row: a chunk, in one load.
uvec4 k_chunk(uvec2 where, uint chunk, uint part) {
#if FRESH
    if (where.x == IN_ROWS) {
        uint at = chunk * (ROW_VALUES / (HEAD_DIM / CHUNK)) + 4u * part;
        uvec4 w = uvec4(fresh_word(where.y, at), fresh_word(where.y, at + 1u), 0u, 0u);
        return ROW_VALUES < HEAD_DIM / 2u ? w : uvec4(w.xy, fresh_word(where.y, at + 2u), fresh_word(where.y, at + 3u));
    }
#endif
    uint at = chunk * TILE + where.y;
#if defined(KV_Q8_0)
    return uvec4(k_words2[where.x * (TILE_WORDS / 2u) + at], 0u, 0u);
#elif defined(KV_F32)
    return k_words4[where.x * (TILE_WORDS / 4u) + 2u * at + part];
#else
    return k_words4[where.x * (TILE_WORDS / 4u) + at];
#endif
}

// `words` (1, 2 or 4) words of a value row from word `at`, in one load.
uvec4 v_words(uvec2 where, uint at, uint words) {
#if FRESH
    if (where.x == IN_ROWS) {
        uvec4 w = uvec4(0u);
        for (uint i = 0u; i < words; ++i) {
            w[i] = fresh_word(where.y, ROW_VALUES + at + i);
        }
        return w;
    }
#endif
    uint first = where.x * TILE_WORDS + where.y * ROW_VALUES + at;
    if (words == 1u) {
        return uvec4(v_words1[first], 0u, 0u, 0u);
    }
    if (words == 2u) {
        return uvec4(v_words2[first / 2u], 0u, 0u);
    }
    return v_words4[first / 4u];
}

#if defined(KV_Q8_0)
float k_scale(uvec2 where, uint block) {
#if FRESH
    if (where.x == IN_ROWS) {
        return unpackHalf2x16(fresh_word(where.y, 2u * ROW_VALUES + block / 2u))[block & 1u];
    }
#endif
    return unpackHalf2x16(k_words1[where.x * TILE_WORDS + TILE * ROW_VALUES + (block / 2u) * TILE + where.y])[block & 1u];
}

float v_scale(uvec2 where, uint block) {
#if FRESH
    if (where.x == IN_ROWS) {
        return unpackHalf2x16(fresh_word(where.y, 2u * ROW_VALUES + SCALES + block / 2u))[block & 1u];
    }
#endif
    return unpackHalf2x16(v_words1[where.x * TILE_WORDS + TILE * ROW_VALUES + where.y * SCALES + block / 2u])[block & 1u];
}

vec4 from_int8(uint w, float scale) {
    precise vec4 x = vec4(bitfieldExtract(int(w), 0, 8), bitfieldExtract(int(w), 8, 8), bitfieldExtract(int(w), 16, 8),
                          int(w) >> 24) * scale;
    return x;
}
#endif

#if defined(KV_BF16)
#define PAIR(w) vec2(uintBitsToFloat((w) << 16), uintBitsToFloat((w) & 0xFFFF0000u))
#else
// On a GPU the larger of the value and one below all of float16's: AMD's compiler would fold a bare conversion into each
// product with it (v_fma_mix_f32), and those do not dual-issue.
vec2 from_f16(uint w) {
    vec2 x = unpackHalf2x16(w);
    return CHUNKS_AHEAD > 1u ? max(x, vec2(EMPTY_M)) : x;
}
#define PAIR(w) from_f16(w)
#endif

// Dimensions 8 chunk ... 8 chunk + 7 of one key.
void load_k(uvec2 where, uint chunk, out vec4 low, out vec4 high) {
    uvec4 w = k_chunk(where, chunk, 0u);
#if defined(KV_F32)
    low = uintBitsToFloat(w);
    high = uintBitsToFloat(k_chunk(where, chunk, 1u));
#elif defined(KV_Q8_0)
    float scale = k_scale(where, chunk / 4u);
    low = from_int8(w.x, scale);
    high = from_int8(w.y, scale);
#else
    low = vec4(PAIR(w.x), PAIR(w.y));
    high = vec4(PAIR(w.z), PAIR(w.w));
#endif
}
