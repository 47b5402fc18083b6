// Step 1 of a leaf, the scores: lane = keys, two a lane, or four, or eight.
//
// Every lane has the same q, so q comes through scalar loads, a chunk (eight dimensions) of SIDE_BY_SIDE vectors at a
// time, which meets all keys of the lane. The products of a chunk are summed on their own, and then the sum is added to
// the dot product. find_scores, at the end, has the order of the loops.

vec4 qa[SIDE_BY_SIDE], qb[SIDE_BY_SIDE];  // [vector]: a chunk of q
vec2 chunk_sum[SIDE_BY_SIDE];  // [vector]: the dots of this chunk with a pair of keys

// Key i of the lane.
uint key_of(uint i) {
    return lane + i * LANES;
}

// Which keys of the lane's pair g the row sees: keys 2 g and 2 g + 1 of the lane.
bvec2 present(Leaf leaf, uint g) {
    uint a = key_of(2u * g), b = key_of(2u * g + 1u);
    return bvec2(a >= leaf.begin && a < leaf.end, b >= leaf.begin && b < leaf.end);
}

// To key0 and key1. An absent key gets its own slot of the tile, or, in small tiles and in rows, the last key's place.
void find_keys(Item item, Leaf leaf) {
    uint last = TILE == KEYS_PER_LEAF && !NHD ? KEYS_PER_LEAF - 1u : leaf.end - 1u;
    for (uint i = 0u; i < KEY_PAIRS; ++i) {
        key0[i] = locate(item, leaf, min(key_of(2u * i), last));
        key1[i] = locate(item, leaf, min(key_of(2u * i + 1u), last));
    }
}

// To qa and qb: a chunk of vectors h ... h + SIDE_BY_SIDE - 1. Types of at most 8 bits leave no scalar registers for an
// address of every vector. The q of one row's heads are neighbors, so that their addresses are sums of a single one.
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

// To chunk_sum: the dots of q's chunk with the chunk and pair of keys in `slot`. Both keys meet the same value of q, so
// a GPU with dual issue takes them in one cycle.
void sum_chunk(uint slot) {
    [[unroll]] for (uint n = 0u; n < SIDE_BY_SIDE; ++n) {
        precise vec2 product = qa[n].x * vec2(k0a[slot].x, k1a[slot].x);
        chunk_sum[n] = product;
    }
    [[unroll]] for (uint d = 1u; d < 4u; ++d) {
        [[unroll]] for (uint n = 0u; n < SIDE_BY_SIDE; ++n) {
            chunk_sum[n] = multiply_add(vec2(qa[n][d]), vec2(k0a[slot][d], k1a[slot][d]), chunk_sum[n]);
        }
    }
    [[unroll]] for (uint d = 0u; d < 4u; ++d) {
        [[unroll]] for (uint n = 0u; n < SIDE_BY_SIDE; ++n) {
            chunk_sum[n] = multiply_add(vec2(qb[n][d]), vec2(k0b[slot][d], k1b[slot][d]), chunk_sum[n]);
        }
    }
}

// To dots: they gain the dots of q's chunk with chunk j of the chunks in use.
void add_chunk(uint h, uint j) {
    for (uint i = 0u; i < KEY_PAIRS; ++i) {
        uint slot = j * KEY_PAIRS + i;
        sum_chunk(slot);
        [[unroll]] for (uint n = 0u; n < SIDE_BY_SIDE; ++n) {
            uint to = (h + n) * KEY_PAIRS + i;
            if (INTEGER) {
                block_dots[to] += chunk_sum[n];
                continue;
            }
            precise vec2 sum = dots[to] + chunk_sum[n];
            dots[to] = sum;
        }
    }
}

// To dots: from dot products to scores, EMPTY_M for absent keys.
void finish_scores(Item item, Leaf leaf) {
    vec3 factors = score_factors();
    uint first_key = leaf.index * KEYS_PER_LEAF + lane + item.key_shift;
    for (uint i = 0u; i < KEY_PAIRS; ++i) {
        bvec2 seen = present(leaf, i);
        for (uint h = 0u; h < VECTORS; ++h) {
            uvec2 position = first_key + uvec2(2u * i, 2u * i + 1u) * LANES;
            precise vec2 products = dots[h * KEY_PAIRS + i];
            if (doubled(K_STORAGE)) {
                products = products * 0.5;
            }
            vec2 s = scores_of(products, factors, vector_of(item, h), position);
            dots[h * KEY_PAIRS + i] = mix(vec2(EMPTY_M), s, seen);
        }
    }
}

// Step 1. To dots: the scores of the lane's keys. A wave whose leaf has no keys loads nothing.
void find_scores(Item item, Leaf leaf) {
    barrier();  // every wave has read the node before; for a single node it halves the time of lavapipe's code
    for (uint i = 0u; i < VECTORS * KEY_PAIRS; ++i) {
        dots[i] = vec2(0.0);
    }
    for (uint i = 0u; INTEGER && i < VECTORS * KEY_PAIRS; ++i) {
        block_dots[i] = vec2(0.0);
    }
    uint q_heads = work[HEADER_Q_HEADS];
    if (ROWS > 1u || has_keys(leaf)) {  // ROWS > 1: an item has whole nodes, so no leaf is empty
        find_keys(item, leaf);
        [[dont_unroll]] for (uint c = 0u; c < K_DIM / CHUNK; c += CHUNKS_AHEAD) {
            load_chunks(c);
            for (uint ahead = 0u; ahead < CHUNKS_AHEAD; ahead += TOGETHER) {
                unpack_chunks(c, ahead);
                for (uint h = 0u; h < VECTORS; h += SIDE_BY_SIDE) {
                    for (uint j = 0u; j < TOGETHER; ++j) {
                        load_q(item, q_heads, h, c + ahead + j);
                        add_chunk(h, j);
                    }
                }
            }
            if (INTEGER && ends_block(c + CHUNKS_AHEAD)) {
                add_block_dots();
            }
        }
    }
    finish_scores(item, leaf);
}
