// Step 1 of a leaf: scores by the matrix units; and the weights as step 3 takes them.

// Weights are rounded to float16 as p * 2**15, so that only weights below 2**-29 lose digits.
const float WEIGHT_SCALE = 32768.0, WEIGHT_UNIT = 1.0 / 32768.0;

const uint SCORE_STEPS = PIECE_STEPS;  // of a piece

// To score_sums: they gain the products of MAT_K dimensions.
void add_score_step(uint piece, uint step) {
    if (!has_strip() || K_DIM % MATRIX_PIECE != 0u && piece * MATRIX_PIECE + step * MAT_K >= K_DIM) {
        return;
    }
    MatrixA a;
    if (Q_HELD) {
        a = q_held[piece * PIECE_STEPS + step];
    } else {
        uint word = piece * (MATRIX_PIECE / 2u) + step * (MAT_K / 2u);
        a = load_a(q_rows[strip() * MAT_M * Q_PITCH + word], Q_PITCH);
    }
    [[unroll]] for (uint n = 0u; n < SCORE_FRAGMENTS; ++n) {
        uint word = (n * STRIP_WAVES + wave_of_strip()) * MAT_N * PITCH + step * MAT_K / 2u;
        MatrixB b = load_b(kv_rows[word], PITCH);
        score_sums[n] = coopMatMulAdd(a, b, score_sums[n]);
    }
}

float product_unit(uint t) {
    return 1.0;
}

// To s_rows: weights of vector t, for the keys of two neighboring rows.
void keep_weights(uint t, uint row, vec2 p) {
    store(s_rows[t * S_PITCH + row / 2u], halves(p * WEIGHT_SCALE));
}
