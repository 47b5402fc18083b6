// Step 2 of a leaf: from scores to weights, and the canonical maxima and sums.

float lane_scores[WEIGHT_ROUNDS * PARTIAL_KEYS];  // of the lane's pairs [vector][key mod 4]; later weights

// m of a vector, from the maxima of its quarters.
float leaf_maximum(uint t) {
    uint first = t * WEIGHT_PARTIALS;
    float m01 = max(load(reduced[first]), load(reduced[first + 1u]));
    float m23 = max(load(reduced[first + 2u]), load(reduced[first + 3u]));
    return roundEven(max(m01, m23));
}

// Whether all vectors see all keys of a leaf.
bool seen_whole(Item item, Leaf leaf) {
    int key = int(leaf.index * KEYS_PER_LEAF), before = int((item.last_row - item.row) * item.row_step);
    return int(item.first) <= key && int(item.limit) - before >= key + int(KEYS_PER_LEAF);
}

// The scores of a vector and keys `key` and key + 4, from their products.
vec2 pair_scores(Item item, Leaf leaf, Vector vector, uint key, vec2 products) {
    uvec2 position = leaf.index * KEYS_PER_LEAF + key + uvec2(0u, WEIGHT_PARTIALS) + item.key_shift;
    return scores_of(products, score_factors(), uvec2(vector.row, vector.head), position);
}

// To lane_scores, from `first` on: EMPTY_M for keys that a vector does not see.
void hide_unseen(Leaf leaf, Vector vector, uint key, uint first) {
    for (uint j = 0u; j < PARTIAL_KEYS; ++j) {
        int number = int(leaf.index * KEYS_PER_LEAF + j * WEIGHT_PARTIALS + key);
        bool seen = number >= vector.first && number < vector.limit;
        lane_scores[first + j] = seen ? lane_scores[first + j] : EMPTY_M;
    }
}

// To lane_scores: weights, which the kernel may keep, from the products in s_rows. To node_ml: the node's (m, l) with
// this leaf. To node_weight and leaf_weight: the factors of the node's o and of the leaf's.
void find_weights(Item item, Leaf leaf, bool first) {
    [[unroll]] for (uint round = 0u; round < WEIGHT_ROUNDS; ++round) {
        uint i = round * LANES + lane, t = i / WEIGHT_PARTIALS, key = i % WEIGHT_PARTIALS;
        if (i < VECTORS * WEIGHT_PARTIALS) {
            Vector vector = vector_at(item, t);
            for (uint j = 0u; j < PARTIAL_KEYS; j += 2u) {
                uint word = t * S_PITCH + key * PARTIAL_KEYS + j;
                vec2 s = uintBitsToFloat(uvec2(load(s_rows[word]), load(s_rows[word + 1u]))) * product_unit(t);
                s = pair_scores(item, leaf, vector, j * WEIGHT_PARTIALS + key, s);
                lane_scores[round * PARTIAL_KEYS + j] = s.x;
                lane_scores[round * PARTIAL_KEYS + j + 1u] = s.y;
            }
            if (!seen_whole(item, leaf)) {
                hide_unseen(leaf, vector, key, round * PARTIAL_KEYS);
            }
            float top = EMPTY_M;
            for (uint j = 0u; j < PARTIAL_KEYS; ++j) {
                top = max(top, lane_scores[round * PARTIAL_KEYS + j]);
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
            top = top > EMPTY_M ? top : 0.0;  // so that an unseen key has the weight 0
            for (uint j = 0u; j < PARTIAL_KEYS; j += 2u) {
                vec2 s = vec2(lane_scores[round * PARTIAL_KEYS + j], lane_scores[round * PARTIAL_KEYS + j + 1u]);
                vec2 p = vec2(weight(s.x, top), weight(s.y, top));
                lane_scores[round * PARTIAL_KEYS + j] = p.x;
                lane_scores[round * PARTIAL_KEYS + j + 1u] = p.y;
                keep_weights(t, key * PARTIAL_KEYS + j, p);
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
        uint word = lane * WEIGHT_PARTIALS;
        precise float c01 = load(reduced[word]) + load(reduced[word + 1u]);
        precise float c23 = load(reduced[word + 2u]) + load(reduced[word + 3u]);
        precise float l = c01 + c23;
        vec2 old = first ? vec2(EMPTY_M, 0.0) : load(node_ml[lane]);
        vec2 powers = merge_powers(old.x, m);
        store(node_ml[lane], vec2(max(old.x, m), merge(old.y, powers.x, l, powers.y)));
        store(node_weight[lane], first ? 0.0 : powers.x);  // a new node begins with o = 0
        store(leaf_weight[lane], powers.y);
    }
}
