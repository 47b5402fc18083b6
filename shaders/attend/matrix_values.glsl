// Step 3 of a leaf: weighted values by the matrix units, and the canonical fold of the leaf into its node.
//
// The fold works on matrices element by element. Its products are with powers of two, so only its sum rounds.

// Number, in the piece, of the subgroup's fragment n.
uint fragment_of(uint n) {
    return n * STRIP_WAVES + wave_of_strip();
}

MatrixC flushed(MatrixC x) {
    for (uint i = 0u; i < x.length(); ++i) {
        x[i] = flush(x[i]);
    }
    return x;
}

MatrixC value_sums[PIECE_FRAGMENTS];  // the subgroup's fragments of a piece of its strip's weighted values

// To value_sums: they gain the products with MAT_K keys.
void add_value_step(uint step) {
    MatrixA a = load_a(s_rows[strip() * MAT_M * S_PITCH + step * MAT_K / 2u], S_PITCH);
    [[unroll]] for (uint n = 0u; n < PIECE_FRAGMENTS; ++n) {
        uint word = fragment_of(n) * MAT_N * PITCH + step * MAT_K / 2u;
        MatrixB b = load_b(kv_rows[word], PITCH);
        value_sums[n] = coopMatMulAdd(a, b, value_sums[n]);
    }
}

// Nothing is left to do: the weights are in s_rows, and the values are products with their scales.
void share_weights(uint piece) {
}

// To node_o: it gains a piece of V, weighted.
void sum_values(uint piece) {
    [[unroll]] for (uint n = 0u; n < PIECE_FRAGMENTS; ++n) {
        value_sums[n] = MatrixC(0.0);
    }
    FOR_STEPS(step, KEYS_PER_LEAF / MAT_K, add_value_step(step))
    MatrixC node_w = load_rows(node_weight[strip() * MAT_M]), leaf_w = load_rows(leaf_weight[strip() * MAT_M]);
    [[unroll]] for (uint n = 0u; n < PIECE_FRAGMENTS; ++n) {
        uint fragment = piece * PIECE_FRAGMENTS + n;
        node_o[fragment] = flushed(node_o[fragment] * node_w + flushed(value_sums[n] * WEIGHT_UNIT) * leaf_w);
    }
}
