// Step 3 of a leaf: weights as integers, and values weighted by the matrix units and folded into the node.

// To s_rows and reduced: the weights of the lane's pairs [vector][key mod 4] times V's scales, as integers, for both
// blocks of a piece.
void share_weights(uint piece) {
    [[unroll]] for (uint b = 0u; b < PIECE_BLOCKS; ++b) {
        uint block = min(piece * PIECE_BLOCKS + b, V_BLOCKS - 1u);
        [[unroll]] for (uint round = 0u; round < WEIGHT_ROUNDS; ++round) {
            uint i = round * LANES + lane, t = i / WEIGHT_PARTIALS, first = i % WEIGHT_PARTIALS * PARTIAL_KEYS;
            if (i < VECTORS * WEIGHT_PARTIALS) {
                float w[PARTIAL_KEYS], top = 0.0;
                [[unroll]] for (uint j = 0u; j < PARTIAL_KEYS; ++j) {
                    float scale = load(v_scales[block * KEYS_PER_LEAF + first + j]);
                    precise float weighted = lane_scores[round * PARTIAL_KEYS + j] * scale;
                    w[j] = weighted;
                    top = max(top, abs(weighted));
                }
                float power = integer_power(largest_of_four(top));
                uint word = 2u * b * PLANE + t * PITCH + first / 4u;
                [[unroll]] for (uint j = 0u; j < PARTIAL_KEYS; j += 4u) {
                    uvec2 u = halved(vec4(w[j], w[j + 1u], w[j + 2u], w[j + 3u]), power);
                    store(s_rows[word + j / 4u], u.x);
                    store(s_rows[word + PLANE + j / 4u], u.y);
                }
                if (first == 0u) {
                    store(reduced[b * VECTORS + t], inverse_power(power));
                }
            }
        }
    }
}

// Number, in the piece, of the subgroup's fragment n.
uint fragment_of(uint n) {
    return wave_of_strip() * PIECE_FRAGMENTS + n;
}

// To node_o: it gains the subgroup's fragments of a block of V, number `part` of the subgroup's blocks of the piece.
void add_value_block(uint piece, uint part) {
    uint fragment = fragment_of(part * BLOCK_FRAGMENTS), block = fragment * MAT_N / BLOCK;
    MatrixA u[2u * KEY_STEPS];
    [[unroll]] for (uint i = 0u; i < 2u * KEY_STEPS; ++i) {
        uint plane = (2u * block + i / KEY_STEPS) * PLANE, step = i % KEY_STEPS;
        u[i] = load_a(s_rows[plane + strip() * MAT_M * PITCH + step * MAT_K / 4u], PITCH);
    }
    MatrixC unit = load_rows(reduced[block * VECTORS + strip() * MAT_M]);
    MatrixC node_w = load_rows(node_weight[strip() * MAT_M]), leaf_w = load_rows(leaf_weight[strip() * MAT_M]);
    [[unroll]] for (uint n = 0u; n < BLOCK_FRAGMENTS; ++n) {
        MatrixB v[KEY_STEPS];
        MatrixI sums = MatrixI(0);
        [[unroll]] for (uint i = 0u; i < KEY_STEPS; ++i) {
            v[i] = load_b(kv_rows[(fragment + n) * MAT_N * PITCH + i * MAT_K / 4u], PITCH);
            sums = coopMatMulAdd(u[i], v[i], sums);
        }
        sums = sums * 256;
        [[unroll]] for (uint i = 0u; i < KEY_STEPS; ++i) {
            sums = coopMatMulAdd(u[KEY_STEPS + i], v[i], sums);
        }
        uint number = piece * PIECE_FRAGMENTS + part * BLOCK_FRAGMENTS + n;
        MatrixC whole = MatrixC(sums), old = node_o[number];
        for (int e = 0; e < whole.length(); ++e) {
            precise float leaf = whole[e] * unit[e];
            whole[e] = merge(old[e], node_w[e], leaf, leaf_w[e]);
        }
        node_o[number] = whole;
    }
}

// To node_o: it gains a piece of V, weighted.
void sum_values(uint piece) {
    FOR_STEPS(part, OWN_BLOCKS, add_value_block(piece, part))
}
