// Loads of K and V in their storage type, as float32.  All conversions are exact, or, for q8_0, round once.
//
// A tile holds TILE tokens of one KV head; a leaf is one tile of 64, or several smaller ones where pages are small.
//   K: (K_DIM / 8, TILE, 8), so that neighboring lanes (keys) read neighboring pieces of 16 bytes.
//   V: (TILE, V_DIM), so that neighboring lanes (slices of dimensions) do.
//   q8_0: int8 in these shapes, then the float16 scales of blocks of 32 dimensions, two a word: K (K_SCALES, TILE)
//   words, V (TILE, V_SCALES) words.
//   With LATENT there is no V: a slice of a value row lies in the chunks of K, whose pieces of neighboring keys touch.
// A buffer has one name per load width.  Branches on STORAGE and FROM_UPLOAD are decided when the pipeline is made.
//
// FROM_UPLOAD: the newest tokens come from the rows that the host just uploaded, because Kompute orders nothing between
// an append and an attend.  A row is, per KV head, K values, V values, K scales, V scales, in words.

const uint K_TILE_WORDS = TILE * (K_VALUES + K_SCALES);
const uint V_TILE_WORDS = TILE * (V_VALUES + V_SCALES);
const uint UPLOAD_V = LATENT == 1u ? 0u : K_VALUES;  // where an uploaded row has its values, ...
const uint UPLOAD_K_SCALES = LATENT == 1u ? K_VALUES : K_VALUES + V_VALUES;
const uint UPLOAD_V_SCALES = LATENT == 1u ? UPLOAD_K_SCALES : UPLOAD_K_SCALES + K_SCALES;
const uint UPLOAD_WORDS = LATENT == 1u ? K_VALUES + K_SCALES : UPLOAD_V_SCALES + V_SCALES;  // ... and its words
const uint IN_ROWS = 0xFFFFFFFFu;  // in place of a tile: the token is in the uploaded rows

layout(set = 0, binding = ATTEND_BIND_K, std430) readonly buffer K1 { uint k_words1[]; };
layout(set = 0, binding = ATTEND_BIND_K, std430) readonly buffer K2 { uvec2 k_words2[]; };
layout(set = 0, binding = ATTEND_BIND_K, std430) readonly buffer K4 { uvec4 k_words4[]; };
layout(set = 0, binding = ATTEND_BIND_V, std430) readonly buffer V1 { uint v_words1[]; };
layout(set = 0, binding = ATTEND_BIND_V, std430) readonly buffer V2 { uvec2 v_words2[]; };
layout(set = 0, binding = ATTEND_BIND_V, std430) readonly buffer V4 { uvec4 v_words4[]; };
layout(set = 0, binding = ATTEND_BIND_ROWS, std430) restrict readonly buffer Rows { uint upload_words[]; };

// Where key `key` of a leaf lies, for the workgroup's KV head: (tile, position in it), or (IN_ROWS, uploaded row).
uvec2 locate(Item item, Leaf leaf, uint key) {
    uint token = leaf.index * KEYS_PER_LEAF + key;
    if (FROM_UPLOAD != 0u && token >= item.upload_begin) {
        return uvec2(IN_ROWS, item.upload_row + token - item.upload_begin);
    }
    uint tile = TILE == KEYS_PER_LEAF ? leaf.index : token / TILE;
    uint shift = work[HEADER_PAGE_SHIFT];
    uint page = work[HEADER_FIRST_PAGE] + work[item.page_table + (tile >> shift)];
    uint first = (page * work[HEADER_KV_HEADS] + gl_WorkGroupID.y) * work[HEADER_PAGE_TILES];
    return uvec2(first + (tile & ((1u << shift) - 1u)), TILE == KEYS_PER_LEAF ? key : token % TILE);
}

bool in_rows(uvec2 where) {
    return FROM_UPLOAD != 0u && where.x == IN_ROWS;
}

// Word `at` of an uploaded row.
uint upload_word(uint row, uint at) {
    uint row_head = row * work[HEADER_ROW_KV_HEADS] + work[HEADER_KV_FIRST] + gl_WorkGroupID.y;
    return upload_words[row_head * UPLOAD_WORDS + at];
}

// The words of a chunk of K, at most four of them; float32 has a second part.
uvec4 k_chunk(uvec2 where, uint chunk, uint part) {
    if (in_rows(where)) {
        uint at = chunk * CHUNK_WORDS + 4u * part;
        uvec4 w = uvec4(upload_word(where.y, at), upload_word(where.y, at + 1u), 0u, 0u);
        return CHUNK_WORDS < 4u ? w : uvec4(w.xy, upload_word(where.y, at + 2u), upload_word(where.y, at + 3u));
    }
    uint at = chunk * TILE + where.y;
    if (STORAGE == STORAGE_Q8_0) {
        return uvec4(k_words2[where.x * (K_TILE_WORDS / 2u) + at], 0u, 0u);
    }
    if (STORAGE == STORAGE_F32) {
        return k_words4[where.x * (K_TILE_WORDS / 4u) + 2u * at + part];
    }
    return k_words4[where.x * (K_TILE_WORDS / 4u) + at];
}

// `words` (1, 2 or 4) words of a value row from word `at`, in one load.
uvec4 v_words(uvec2 where, uint at, uint words) {
    if (in_rows(where)) {
        uvec4 w = uvec4(0u);
        for (uint i = 0u; i < words; ++i) {
            w[i] = upload_word(where.y, UPLOAD_V + at + i);
        }
        return w;
    }
    uint first = where.x * V_TILE_WORDS + where.y * V_VALUES + at;
    if (LATENT == 1u) {
        first = where.x * K_TILE_WORDS + (at / CHUNK_WORDS * TILE + where.y) * CHUNK_WORDS + at % CHUNK_WORDS;
    }
    if (words == 1u) {
        return uvec4(v_words1[first], 0u, 0u, 0u);
    }
    if (words == 2u) {
        return uvec4(v_words2[first / 2u], 0u, 0u);
    }
    return v_words4[first / 4u];
}

// The scale of q8_0 block `block` of a K row, and of a V row.
float k_scale(uvec2 where, uint block) {
    if (in_rows(where)) {
        return unpackHalf2x16(upload_word(where.y, UPLOAD_K_SCALES + block / 2u))[block & 1u];
    }
    uint word = where.x * K_TILE_WORDS + TILE * K_VALUES + (block / 2u) * TILE + where.y;
    return unpackHalf2x16(k_words1[word])[block & 1u];
}

float v_scale(uvec2 where, uint block) {
    if (LATENT == 1u) {
        return k_scale(where, block);
    }
    if (in_rows(where)) {
        return unpackHalf2x16(upload_word(where.y, UPLOAD_V_SCALES + block / 2u))[block & 1u];
    }
    uint word = where.x * V_TILE_WORDS + TILE * V_VALUES + where.y * V_SCALES + block / 2u;
    return unpackHalf2x16(v_words1[word])[block & 1u];
}

vec4 from_int8(uint w, float scale) {
    precise vec4 x = vec4(bitfieldExtract(int(w), 0, 8), bitfieldExtract(int(w), 8, 8), bitfieldExtract(int(w), 16, 8),
                          int(w) >> 24) * scale;
    return x;
}

// The two float16 or bfloat16 values of a word.
//
// On a GPU a float16 is the larger of itself and a number below all of float16's: AMD's compiler would fold a bare
// conversion into each product with it (v_fma_mix_f32), and those do not dual-issue.
vec2 from_half_words(uint w) {
    if (STORAGE == STORAGE_BF16) {
        return vec2(uintBitsToFloat(w << 16), uintBitsToFloat(w & 0xFFFF0000u));
    }
    vec2 x = unpackHalf2x16(w);
    return CHUNKS_AHEAD > 1u ? max(x, vec2(EMPTY_M)) : x;
}

// Dimensions 8 chunk ... 8 chunk + 7 of one key.
void load_k(uvec2 where, uint chunk, out vec4 low, out vec4 high) {
    uvec4 w = k_chunk(where, chunk, 0u);
    if (STORAGE == STORAGE_F32) {
        low = uintBitsToFloat(w);
        high = uintBitsToFloat(k_chunk(where, chunk, 1u));
    } else if (STORAGE == STORAGE_Q8_0) {
        float scale = k_scale(where, chunk / 4u);
        low = from_int8(w.x, scale);
        high = from_int8(w.y, scale);
    } else {
        low = vec4(from_half_words(w.x), from_half_words(w.y));
        high = vec4(from_half_words(w.z), from_half_words(w.w));
    }
}
