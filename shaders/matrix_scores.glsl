// Steps 1 and 2 of a leaf: scores by the matrix units, then the canonical maxima, weights and sums.

// To s_rows: q . k of every vector and key.
void find_scores(Item item, Leaf leaf) {
    MatrixC sums[KEY_TILES];
    [[unroll]] for (uint n = 0u; n < KEY_TILES; ++n) {
        sums[n] = MatrixC(0.0);
    }
    [[dont_unroll]] for (uint piece = 0u; piece < (K_DIM + PIECE - 1u) / PIECE; ++piece) {
        barrier();
        load_k_piece(item, leaf, piece);
        barrier();
        uint steps = min(PIECE, K_DIM - piece * PIECE) / MAT_K;
        if (has_strip()) {
            [[dont_unroll]] for (uint step = 0u; step < steps; ++step) {
                MatrixA a;
                coopMatLoad(a, q_rows, strip() * MAT_M * Q_PITCH + (piece * PIECE + step * MAT_K) / 4u, Q_PITCH,
                            gl_CooperativeMatrixLayoutRowMajor);
                [[unroll]] for (uint n = 0u; n < KEY_TILES; ++n) {
                    MatrixB b;
                    coopMatLoad(b, kv_rows, (n * PARTS + part_of_strip()) * MAT_N * KV_PITCH + step * MAT_K / 4u, KV_PITCH,
                                gl_CooperativeMatrixLayoutColumnMajor);
                    sums[n] = coopMatMulAdd(a, b, sums[n]);
                }
            }
        }
    }
    if (has_strip()) {
        [[unroll]] for (uint n = 0u; n < KEY_TILES; ++n) {
            coopMatStore(sums[n], s_rows, strip() * MAT_M * S_PITCH + (n * PARTS + part_of_strip()) * MAT_N, S_PITCH,
                         gl_CooperativeMatrixLayoutRowMajor);
        }
    }
    barrier();
}

// m of a vector, from the partial maxima.
float leaf_maximum(uint t) {
    uint at = t * WEIGHT_PARTIALS;
    return roundEven(max(max(reduced[at], reduced[at + 1u]), max(reduced[at + 2u], reduced[at + 3u])));
}

// The scores of a vector's keys `key` and key + 4, EMPTY_M for keys that it does not see.
vec2 scores_of(Item item, Leaf leaf, Vector vector, uint t, uint key) {
    uint at = t * S_PITCH + key, first_key = leaf.index * KEYS_PER_LEAF + key;
    ivec2 number = ivec2(int(first_key), int(first_key + WEIGHT_PARTIALS));
    precise vec2 s = vec2(s_rows[at], s_rows[at + WEIGHT_PARTIALS]) * uintBitsToFloat(work[HEADER_SCORE_SCALE]);
    if (SOFTCAP != 0u) {
        s = vec2(soft_capped(s.x), soft_capped(s.y));
    }
    if (ALIBI != 0u || MASK != 0u) {
        s = biased(vector.row, vector.head, uvec2(number) + item.key_shift, s);
    }
    bvec2 seen = bvec2(number.x >= vector.first && number.x < vector.limit, number.y >= vector.first && number.y < vector.limit);
    return mix(vec2(EMPTY_M), s, seen);
}

// From s_rows to p_rows, and to node_ml: the unit's (m, l) with this leaf.  s_rows then has the powers of two that the
// unit's o and the leaf's are multiplied with, MAT_N times each: [vector] of the unit, then [vector] of the leaf.
void find_weights(Item item, Leaf leaf, bool first) {
    for (uint i = lane; i < VECTORS * WEIGHT_PARTIALS; i += LANES) {
        uint t = i / WEIGHT_PARTIALS, key = i % WEIGHT_PARTIALS;
        Vector vector = vector_at(item, t);
        float top = EMPTY_M;
        for (uint j = key; j < KEYS_PER_LEAF; j += 2u * WEIGHT_PARTIALS) {
            vec2 s = vector.real ? scores_of(item, leaf, vector, t, j) : vec2(EMPTY_M);
            s_rows[t * S_PITCH + j] = s.x;
            s_rows[t * S_PITCH + j + WEIGHT_PARTIALS] = s.y;
            top = max(top, max(s.x, s.y));
        }
        reduced[i] = top;
    }
    barrier();
    float sums[WEIGHT_ROUNDS];
    [[unroll]] for (uint round = 0u; round < WEIGHT_ROUNDS; ++round) {
        uint i = round * LANES + lane, t = i / WEIGHT_PARTIALS, key = i % WEIGHT_PARTIALS;
        if (i >= VECTORS * WEIGHT_PARTIALS) {
            break;
        }
        float m = leaf_maximum(t);
        precise float sum = 0.0;
        for (uint j = key; j < KEYS_PER_LEAF; j += WEIGHT_PARTIALS) {
            float s = s_rows[t * S_PITCH + j];
            float p = s > EMPTY_M ? weight(s, m) : 0.0;
            sum = sum + p;
            p_rows[t * P_PITCH + j] = float16_t(round_to_half(p));
        }
        sums[round] = sum;
    }
    float m = leaf_maximum(min(lane, VECTORS - 1u));
    barrier();
    [[unroll]] for (uint round = 0u; round < WEIGHT_ROUNDS; ++round) {
        uint i = round * LANES + lane;
        if (i < VECTORS * WEIGHT_PARTIALS) {
            reduced[i] = sums[round];
        }
    }
    barrier();
    if (lane < VECTORS) {
        uint at = lane * WEIGHT_PARTIALS;
        precise float c01 = reduced[at] + reduced[at + 1u];
        precise float c23 = reduced[at + 2u] + reduced[at + 3u];
        precise float l = c01 + c23;
        vec2 old = first ? vec2(EMPTY_M, 0.0) : node_ml[lane];
        vec2 w = merge_weights(old.x, m);
        node_ml[lane] = vec2(max(old.x, m), merge(old.y, w.x, l, w.y));
        for (uint i = 0u; i < MAT_N; ++i) {
            s_rows[lane * MAT_N + i] = w.x;
            s_rows[(VECTORS + lane) * MAT_N + i] = w.y;
        }
    }
    barrier();
}
