// Step 1 of a leaf, the scores: lane = key, two keys per lane, or four, or eight.
//
// Q is the same for every lane and comes through scalar loads, a chunk of SIDE_BY_SIDE vectors at a time, which meets
// all keys of the lane.  Eight dimensions (a chunk) are summed on their own before they join the dot product.
// find_scores, at the end, has the order of the loops.

vec2 chunk_sum[SIDE_BY_SIDE];  // [vector]: the dots of this chunk with a pair of keys

// To chunk_sum: the dots of q's chunk with the pair at `at`.  Both keys have the query value in common, so a GPU with
// dual issue takes them in one cycle.
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

// q's chunk and chunk j of those in use join dots.
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

// From dot products to scores, EMPTY_M for absent keys.
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

// Step 1.  To dots: the scores of the lane's keys.  A wave whose leaf has none loads nothing.
void find_scores(Item item, Leaf leaf) {
    barrier();  // everybody has read `weights`; lavapipe's code is twice as fast if it is here, for a single node, too
    for (uint i = 0u; i < VECTORS * KEY_PAIRS; ++i) {
        dots[i] = vec2(0.0);
    }
    for (uint i = 0u; INTEGER && i < VECTORS * KEY_PAIRS; ++i) {
        block_dots[i] = vec2(0.0);
    }
    uint q_heads = work[HEADER_Q_HEADS];
    if (ROWS > 1u || has_keys(leaf)) {  // rows share whole nodes
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
