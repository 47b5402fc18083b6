// Steps 1 and 2 of a leaf: scores by the matrix units, then the canonical maxima, weights and sums.

// Weights are rounded to float16 as p * 2**15, so that only those below 2**-29 lose digits.
const float WEIGHT_SCALE = 32768.0, WEIGHT_UNIT = 1.0 / 32768.0;

MatrixC score_sums[SCORE_FRAGMENTS];  // the subgroup's fragments of its strip's scores
float lane_scores[WEIGHT_ROUNDS * PARTIAL_KEYS];  // of the lane's pairs [vector][key mod 4], then weights

// To score_sums: the products of MAT_K dimensions.
void add_score_step(uint piece, uint step) {
    if (!has_strip() || K_DIM % MATRIX_PIECE != 0u && piece * MATRIX_PIECE + step * MAT_K >= K_DIM) {
        return;
    }
    MatrixA a;
    if (Q_HELD) {
        a = q_held[piece * PIECE_STEPS + step];
    } else {
        uint at = piece * (MATRIX_PIECE / 2u) + step * (MAT_K / 2u);
        a = load_a(q_rows[strip() * MAT_M * Q_PITCH + at], Q_PITCH);
    }
    [[unroll]] for (uint n = 0u; n < SCORE_FRAGMENTS; ++n) {
        uint at = (n * STRIP_WAVES + wave_of_strip()) * MAT_N * PITCH + step * MAT_K / 2u;
        MatrixB b = load_b(kv_rows[at], PITCH);
        score_sums[n] = coopMatMulAdd(a, b, score_sums[n]);
    }
}

// To score_sums: the products of the piece of K that is in flight.  The next one is fetched, or the first one of V.
void add_scores(Item item, Leaf leaf, uint piece) {
    meet();
    store_k();
    meet();
    if (piece + 1u < K_PIECES) {
        fetch_k(item, leaf, piece + 1u);
    } else {
        fetch_v(item, leaf, 0u);
    }
    FOR_STEPS(step, PIECE_STEPS, add_score_step(piece, step))
}

// To s_rows: q . k of every vector and key.
void find_scores(Item item, Leaf leaf) {
    [[unroll]] for (uint n = 0u; n < SCORE_FRAGMENTS; ++n) {
        score_sums[n] = MatrixC(0.0);
    }
    FOR_PIECES(UNROLLED == 1u, piece, K_PIECES, add_scores(item, leaf, piece))
    if (has_strip()) {
        [[unroll]] for (uint n = 0u; n < SCORE_FRAGMENTS; ++n) {
            uint at = strip() * MAT_M * S_PITCH + (n * STRIP_WAVES + wave_of_strip()) * MAT_N;
            store_c(s_rows[at], score_sums[n], S_PITCH);
        }
    }
    meet();
}

// m of a vector, from the partial maxima.
float leaf_maximum(uint t) {
    uint at = t * WEIGHT_PARTIALS;
    float m01 = max(load(reduced[at]), load(reduced[at + 1u]));
    float m23 = max(load(reduced[at + 2u]), load(reduced[at + 3u]));
    return roundEven(max(m01, m23));
}

// The products of a vector with keys `key` and key + 4 as scores, EMPTY_M for keys that it does not see.
vec2 seen_scores(Item item, Leaf leaf, Vector vector, uint key, vec2 products) {
    ivec2 number = int(leaf.index * KEYS_PER_LEAF + key) + ivec2(0, WEIGHT_PARTIALS);
    vec2 s = scores_of(products, score_factors(), uvec2(vector.row, vector.head), uvec2(number) + item.key_shift);
    bvec2 behind = greaterThanEqual(number, ivec2(vector.first)), before = lessThan(number, ivec2(vector.limit));
    bvec2 seen = bvec2(behind.x && before.x, behind.y && before.y);
    return mix(vec2(EMPTY_M), s, seen);
}

// In s_rows from scores to weights; to node_ml: the node's (m, l) with this leaf; and what its o and the leaf's are
// multiplied with.
void find_weights(Item item, Leaf leaf, bool first) {
    [[unroll]] for (uint round = 0u; round < WEIGHT_ROUNDS; ++round) {
        uint i = round * LANES + lane, t = i / WEIGHT_PARTIALS, key = i % WEIGHT_PARTIALS;
        if (i < VECTORS * WEIGHT_PARTIALS) {
            Vector vector = vector_at(item, t);
            float top = EMPTY_M;
            for (uint j = 0u; j < PARTIAL_KEYS; j += 2u) {
                uint at = t * S_PITCH + key * PARTIAL_KEYS + j;
                vec2 s = uintBitsToFloat(uvec2(load(s_rows[at]), load(s_rows[at + 1u])));
                s = seen_scores(item, leaf, vector, j * WEIGHT_PARTIALS + key, s);
                s = vector.real ? s : vec2(EMPTY_M);
                lane_scores[round * PARTIAL_KEYS + j] = s.x;
                lane_scores[round * PARTIAL_KEYS + j + 1u] = s.y;
                top = max(top, max(s.x, s.y));
            }
            store(reduced[i], top);
        }
    }
    meet();
    float m = leaf_maximum(min(lane, VECTORS - 1u)), sums[WEIGHT_ROUNDS];
    [[unroll]] for (uint round = 0u; round < WEIGHT_ROUNDS; ++round) {
        uint i = round * LANES + lane, t = i / WEIGHT_PARTIALS, key = i % WEIGHT_PARTIALS;
        precise float sum = 0.0;
        if (i < VECTORS * WEIGHT_PARTIALS) {
            float top = leaf_maximum(t);
            for (uint j = 0u; j < PARTIAL_KEYS; j += 2u) {
                vec2 s = vec2(lane_scores[round * PARTIAL_KEYS + j], lane_scores[round * PARTIAL_KEYS + j + 1u]);
                vec2 p = mix(vec2(0.0), vec2(weight(s.x, top), weight(s.y, top)), greaterThan(s, vec2(EMPTY_M)));
                lane_scores[round * PARTIAL_KEYS + j] = p.x;
                lane_scores[round * PARTIAL_KEYS + j + 1u] = p.y;
                store(s_rows[t * S_PITCH + (key * PARTIAL_KEYS + j) / 2u], halves(p * WEIGHT_SCALE));
            }
            for (uint j = 0u; j < PARTIAL_KEYS; ++j) {
                sum = sum + lane_scores[round * PARTIAL_KEYS + j];
            }
        }
        sums[round] = sum;
    }
    meet();
    [[unroll]] for (uint round = 0u; round < WEIGHT_ROUNDS; ++round) {
        uint i = round * LANES + lane;
        if (i < VECTORS * WEIGHT_PARTIALS) {
            store(reduced[i], sums[round]);
        }
    }
    meet();
    if (lane < VECTORS) {
        uint at = lane * WEIGHT_PARTIALS;
        precise float c01 = load(reduced[at]) + load(reduced[at + 1u]);
        precise float c23 = load(reduced[at + 2u]) + load(reduced[at + 3u]);
        precise float l = c01 + c23;
        vec2 old = first ? vec2(EMPTY_M, 0.0) : load(node_ml[lane]);
        vec2 powers = merge_powers(old.x, m);
        store(node_ml[lane], vec2(max(old.x, m), merge(old.y, powers.x, l, powers.y)));
        store(node_weight[lane], powers.x);
        store(leaf_weight[lane], powers.y);
    }
}
