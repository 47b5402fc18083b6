// Step 1 of a leaf: scores by the matrix units.

MatrixC score_sums[SCORE_FRAGMENTS];  // the subgroup's fragments of its strip's scores

// To score_sums: block `block` of the piece, times its scales.
void add_score_block(uint piece, uint block) {
    if (!has_strip() || (piece * PIECE_BLOCKS + block) * BLOCK >= K_DIM) {
        return;
    }
    MatrixA a[2u * BLOCK_STEPS];
    [[unroll]] for (uint i = 0u; i < 2u * BLOCK_STEPS; ++i) {
        uint step = block * BLOCK_STEPS + i % BLOCK_STEPS, low = i / BLOCK_STEPS;
        if (Q_HELD) {
            a[i] = q_held[(low * K_PIECES + piece) * PIECE_STEPS + step];
        } else {
            uint at = (piece * MATRIX_PIECE + step * MAT_K) / 4u;
            a[i] = load_a(q_rows[(low * VECTORS + strip() * MAT_M) * Q_PITCH + at], Q_PITCH);
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

// To score_sums: the products of the piece of K that is in flight.  The next one is fetched, or the first one of V.
void add_scores(Item item, Leaf leaf, uint piece) {
    meet();
    store_k();
    meet();
    if (piece + 1u < K_PIECES) {
        fetch_k(item, leaf, piece + 1u);
    } else {
        fetch_v(item, leaf, 0u);
        fetch_v_scales(item, leaf);
    }
    FOR_STEPS(block, PIECE_BLOCKS, add_score_block(piece, block))
}

// To s_rows: the products of q's integers, and of K, of every vector and key.
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
    store_v_scales();
    meet();
}

float product_unit(uint t) {
    return load(q_units[t]);
}

// Weights stay in lane_scores.
void keep_weights(uint t, uint row, vec2 p) {
}
