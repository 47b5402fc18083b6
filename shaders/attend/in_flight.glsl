// The words and floats that a lane has in flight: chunks (eight dimensions) of its keys' K, and slices of value rows.
//
// A lane's keys go in pairs (key0, key1), and a chunk has four dimensions a and then four dimensions b. attend.comp
// says why these arrays are global.

// Chunks that are in use as floats at a time. Where stored words take few registers, fewer floats leave the compiler
// more registers for the sums, and the compiler pairs more of the sums.
const uint TOGETHER = K_BITS <= 8u && VECTORS <= 8u && CHUNKS_AHEAD > 2u ? 2u : CHUNKS_AHEAD;
// Query vectors whose dot products are made side by side, since each sum waits for the sum before it. Rows of at most 8
// bits, and more than eight vectors, leave scalar registers for two vectors.
const uint FEW = CPU && !FUSED ? 1u : 2u - VECTORS % 2u;
const uint MANY = VECTORS % 4u == 0u ? 4u : (VECTORS % 3u == 0u ? 3u : 2u - VECTORS % 2u);
const uint IN_TILES = CPU || VECTORS > 8u ? FEW : MANY;
const uint SIDE_BY_SIDE = NHD && K_BITS <= 8u ? FEW : IN_TILES;

const uint FLOATS = TOGETHER * KEY_PAIRS;
uvec2 key0[KEY_PAIRS], key1[KEY_PAIRS];  // [pair]: where the keys lie
Block block0[KEY_PAIRS], block1[KEY_PAIRS];  // [pair]: the block that has all chunks in flight
uvec4 words0[CHUNKS_AHEAD * KEY_PAIRS], words1[CHUNKS_AHEAD * KEY_PAIRS];  // [chunk][pair]: of at most 8 bits
vec4 k0a[FLOATS], k0b[FLOATS], k1a[FLOATS], k1b[FLOATS];  // [chunk][pair]: the chunks in use, as floats

// To block0 ... words1: chunks c ... c + CHUNKS_AHEAD - 1 of types of at most 8 bits. Chunks of other types are loaded
// when they are unpacked.
void load_chunks(uint c) {
    for (uint i = 0u; K_BITS <= 8u && i < KEY_PAIRS; ++i) {
        block0[i] = k_block(key0[i], c / 4u);
        block1[i] = k_block(key1[i], c / 4u);
    }
    for (uint j = 0u; K_BITS <= 8u && j < CHUNKS_AHEAD; ++j) {
        for (uint i = 0u; i < KEY_PAIRS; ++i) {
            words0[j * KEY_PAIRS + i] = k_chunk(key0[i], c, j, 0u);
            words1[j * KEY_PAIRS + i] = k_chunk(key1[i], c, j, 0u);
        }
    }
}

// To k0a ... k1b: TOGETHER chunks of the chunks in flight, from number `ahead` on. The first chunk in flight is c.
void unpack_chunks(uint c, uint ahead) {
    for (uint j = 0u; j < TOGETHER; ++j) {
        for (uint i = 0u; i < KEY_PAIRS; ++i) {
            uint slot = j * KEY_PAIRS + i;
            if (K_BITS <= 8u) {
                unpack_k(words0[ahead * KEY_PAIRS + slot], c + ahead + j, block0[i], k0a[slot], k0b[slot]);
                unpack_k(words1[ahead * KEY_PAIRS + slot], c + ahead + j, block1[i], k1a[slot], k1b[slot]);
            } else {
                load_k(key0[i], c, ahead + j, block0[i], k0a[slot], k0b[slot]);
                load_k(key1[i], c, ahead + j, block1[i], k1a[slot], k1b[slot]);
            }
        }
    }
}

const uint WORD_VALUES = 2u * WORD_PAIRS;
const bool V_IN_PART = NHD && SLICE < WORD_VALUES;  // a slice is loaded without the rest of its word
vec2 v[LANE_PAIRS];  // the row in use
uvec4 v_raw[KEYS_AHEAD * LANE_SLICES * SLICE_LOADS];  // [row][slice][load]: the rows in flight
Block v_blocks[KEYS_AHEAD * LANE_SLICES];  // [row][slice], of types that have blocks

// To v_raw: slice `slice` of a value row, as slice `ahead` of the slices in flight.
void load_v(uvec2 where, uint slice, uint ahead) {
    if (V_BITS <= 8u) {
        v_blocks[ahead] = v_block(where, slice * SLICE / BLOCK);
    }
    for (uint i = 0u; i < SLICE_LOADS; ++i) {
        if (V_IN_PART) {
            v_raw[ahead * SLICE_LOADS] = uvec4(v_row_part(where.x, slice * SLICE), 0u, 0u, 0u);
            continue;
        }
        v_raw[ahead * SLICE_LOADS + i] = v_words(where, slice * SLICE * V_BITS / 32u + LOAD_WORDS * i, LOAD_WORDS);
    }
}

// To v, from pair `to` on: slice `ahead` of the slices in flight, as floats. It is slice `slice` of its row.
void unpack_v(uint slice, uint ahead, uint to) {
    for (uint i = 0u; i < PAIRS; ++i) {
        if (V_STORAGE == STORAGE_F32) {
            uvec4 w = v_raw[ahead * SLICE_LOADS + 2u * i / LOAD_WORDS];
            v[to + i] = uintBitsToFloat(2u * i % LOAD_WORDS == 0u ? w.xy : w.zw);
            continue;
        }
        uint index = i / WORD_PAIRS, word = v_raw[ahead * SLICE_LOADS + index / LOAD_WORDS][index % LOAD_WORDS];
        if (V_BITS == 16u) {
            v[to + i] = from_half_words(V_STORAGE, word);
        } else {
            Block block = v_blocks[ahead];
            uint fifth = block.fifth >> ((slice * SLICE + index * WORD_VALUES) % BLOCK), j = 2u * i % WORD_VALUES;
            if (SLICE < WORD_VALUES && !V_IN_PART) {  // several lanes share the word
                word >>= slice * SLICE % WORD_VALUES * V_BITS;
            }
            v[to + i] = vec2(narrow_value(V_STORAGE, word, j, fifth, block),
                             narrow_value(V_STORAGE, word, j + 1u, fifth, block));
        }
    }
}

// The power of two by which weights are multiplied before they meet values, and its reciprocal. 1/2 undoes the doubling
// of values, and FUSED_SCALE avoids denormals.
float weight_scale() {
    return doubled(V_STORAGE) ? (!FUSED ? 0.5 : 0.5 * FUSED_SCALE) : (!FUSED ? 1.0 : FUSED_SCALE);
}

float weight_unscale() {
    return doubled(V_STORAGE) ? (!FUSED ? 2.0 : 2.0 / FUSED_SCALE) : (!FUSED ? 1.0 : 1.0 / FUSED_SCALE);
}
