// Steps 1 and 3 of a leaf: the pieces of K, and then of V, one after another, with the next piece in flight. The
// kernel's add_score_step, share_weights and sum_values work on a piece.

// To score_sums: the products of the piece of K in flight. The function fetches the next piece of K, or V's first.
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
    FOR_STEPS(step, SCORE_STEPS, add_score_step(piece, step))
}

// To s_rows: the products of q and K of every vector and key. Step 2 multiplies them by product_unit.
void find_scores(Item item, Leaf leaf) {
    [[unroll]] for (uint n = 0u; n < SCORE_FRAGMENTS; ++n) {
        score_sums[n] = MatrixC(0.0);
    }
    FOR_PIECES(UNROLLED == 1u, piece, K_PIECES, add_scores(item, leaf, piece))
    if (has_strip()) {
        [[unroll]] for (uint n = 0u; n < SCORE_FRAGMENTS; ++n) {
            uint word = strip() * MAT_M * S_PITCH + (n * STRIP_WAVES + wave_of_strip()) * MAT_N;
            store_c(s_rows[word], score_sums[n], S_PITCH);
        }
    }
    store_v_scales();
    meet();
}

// To node_o: it gains the piece of V in flight, weighted. The function fetches the next piece of V, or the next leaf's
// first piece of K.
void add_values(Item item, Leaf leaf, Leaf next, uint piece) {
    meet();
    store_v();
    share_weights(piece);
    meet();
    if (piece + 1u < V_PIECES) {
        fetch_v(item, leaf, piece + 1u);
    } else {
        fetch_k(item, next, 0u);
    }
    if (has_strip()) {
        sum_values(piece);
    }
}
