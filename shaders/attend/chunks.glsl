// What step 1 of a leaf multiplies: the lane's keys, and chunks (eight dimensions) of their K and of q.

// Chunks that are in use as floats at a time.  Where stored words are few registers, fewer floats leave the compiler
// more places for the sums, and it pairs more of them.
const uint TOGETHER = K_BITS <= 8u && VECTORS <= 8u && CHUNKS_AHEAD > 2u ? 2u : CHUNKS_AHEAD;

// Query vectors whose dots are made side by side: each sum waits for the one before it, and wants others between them.
// Rows of at most 8 bits, and more than eight vectors, leave scalar registers for two.
const uint FEW = CPU && !FUSED ? 1u : 2u - VECTORS % 2u;
const uint MANY = VECTORS % 4u == 0u ? 4u : (VECTORS % 3u == 0u ? 3u : 2u - VECTORS % 2u);
const uint IN_TILES = CPU || VECTORS > 8u ? FEW : MANY;
const uint SIDE_BY_SIDE = NHD && K_BITS <= 8u ? FEW : IN_TILES;

// A lane's keys go in pairs (key0, key1); a chunk has four dimensions a and then four dimensions b.  These arrays are
// global for the reason that attend.comp's are.
const uint FLOATS = TOGETHER * KEY_PAIRS;
uvec2 key0[KEY_PAIRS], key1[KEY_PAIRS];  // [pair]: where the keys lie
Block block0[KEY_PAIRS], block1[KEY_PAIRS];  // [pair]: the one block that all chunks in flight lie in
uvec4 words0[CHUNKS_AHEAD * KEY_PAIRS], words1[CHUNKS_AHEAD * KEY_PAIRS];  // [chunk][pair]: in flight, of at most 8 bits
vec4 k0a[FLOATS], k0b[FLOATS], k1a[FLOATS], k1b[FLOATS];  // [chunk][pair]: the chunks in use, as floats
vec4 qa[SIDE_BY_SIDE], qb[SIDE_BY_SIDE];  // a chunk of query vectors

// Key i of the lane.
uint key_of(uint i) {
    return lane + i * LANES;
}

// Which keys of the lane's pair g the row sees: its keys 2 g and 2 g + 1.
bvec2 present(Leaf leaf, uint g) {
    uint a = key_of(2u * g), b = key_of(2u * g + 1u);
    return bvec2(a >= leaf.begin && a < leaf.count, b >= leaf.begin && b < leaf.count);
}

// To key0 and key1.  Absent keys read a place that exists: their own slot of the tile, or, in small tiles and in
// rows, the last key's.
void find_keys(Item item, Leaf leaf) {
    uint last = TILE == KEYS_PER_LEAF && !NHD ? KEYS_PER_LEAF - 1u : leaf.count - 1u;
    for (uint i = 0u; i < KEY_PAIRS; ++i) {
        key0[i] = locate(item, leaf, min(key_of(2u * i), last));
        key1[i] = locate(item, leaf, min(key_of(2u * i + 1u), last));
    }
}

// What chunks c ... c + CHUNKS_AHEAD - 1 are made of: of at most 8 bits a value, their block and their words.
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

// To k0a ... k1b: TOGETHER chunks from number `ahead` of those in flight on, whose first is chunk c.
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

// To qa and qb: a chunk of vectors h ... h + SIDE_BY_SIDE - 1.  Types of at most 8 bits leave no scalar registers for an
// address of every vector.  Those of one row lie one behind the other; the chunk is added first, and h then.
void load_q(Item item, uint q_heads, uint h, uint chunk) {
    uint first = (item.row * q_heads + first_head()) * (K_DIM / 4u) + 2u * chunk;
    for (uint n = 0u; n < SIDE_BY_SIDE; ++n) {
        uint from = first + (h + n) * (K_DIM / 4u);
        if (ROWS > 1u || K_BITS > 8u) {
            uvec2 vector = vector_of(item, h + n);
            from = (vector.x * q_heads + vector.y) * (K_DIM / 4u) + 2u * chunk;
        }
        qa[n] = q[from];
        qb[n] = q[from + 1u];
    }
}
