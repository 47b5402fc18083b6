// Step 1 of a leaf: scores by the matrix units.

const uint SCORE_STEPS = PIECE_BLOCKS;  // of a piece

// To score_sums: they gain block `block` of the piece, times the block's scales.
void add_score_step(uint piece, uint block) {
    if (!has_strip() || (piece * PIECE_BLOCKS + block) * BLOCK >= K_DIM) {
        return;
    }
    MatrixA a[2u * BLOCK_STEPS];
    [[unroll]] for (uint i = 0u; i < 2u * BLOCK_STEPS; ++i) {
        uint step = block * BLOCK_STEPS + i % BLOCK_STEPS, low = i / BLOCK_STEPS;
        if (Q_HELD) {
            a[i] = q_held[(low * K_PIECES + piece) * PIECE_STEPS + step];
        } else {
            uint word = (piece * MATRIX_PIECE + step * MAT_K) / 4u;
            a[i] = load_a(q_rows[(low * VECTORS + strip() * MAT_M) * Q_PITCH + word], Q_PITCH);
        }
    }
    [[unroll]] for (uint n = 0u; n < SCORE_FRAGMENTS; ++n) {
        uint row = (n * STRIP_WAVES + wave_of_strip()) * MAT_N;
        MatrixB k[BLOCK_STEPS];
        MatrixI dots = MatrixI(0);
        [[unroll]] for (uint i = 0u; i < BLOCK_STEPS; ++i) {
            k[i] = load_b(kv_rows[row * PITCH + (block * BLOCK + i * MAT_K) / 4u], PITCH);
            dots = coopMatMulAdd(a[i], k[i], dots);
        }
        dots = dots * 256;
        [[unroll]] for (uint i = 0u; i < BLOCK_STEPS; ++i) {
            dots = coopMatMulAdd(a[BLOCK_STEPS + i], k[i], dots);
        }
        MatrixC whole = MatrixC(dots), scale = load_columns(reduced[block * KEYS_PER_LEAF + row]);
        for (int e = 0; e < whole.length(); ++e) {
            precise float product = whole[e] * scale[e];
            precise float sum = score_sums[n][e] + product;
            score_sums[n][e] = sum;
        }
    }
}

float product_unit(uint t) {
    return load(q_units[t]);
}

// Weights stay in lane_scores.
void keep_weights(uint t, uint row, vec2 p) {
}
