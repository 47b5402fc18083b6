// Step 3 of a leaf and what follows: weighted values by the matrix units, the canonical fold of the leaf into its unit,
// and the unit's state.
//
// The fold works on matrices element by element.  Its products are with powers of two, so its one rounding is its sum's.

MatrixC flushed(MatrixC x) {
    for (uint i = 0u; i < x.length(); ++i) {
        x[i] = flush(x[i]);
    }
    return x;
}

// From p_rows to node.
void find_values(Item item, Leaf leaf, bool first) {
    MatrixC unit_w, leaf_w;
    if (has_strip()) {
        coopMatLoad(unit_w, s_rows, strip() * MAT_M * MAT_N, MAT_N, gl_CooperativeMatrixLayoutRowMajor);
        coopMatLoad(leaf_w, s_rows, (VECTORS + strip() * MAT_M) * MAT_N, MAT_N, gl_CooperativeMatrixLayoutRowMajor);
    }
    [[unroll]] for (uint piece = 0u; piece < V_PIECES; ++piece) {
        barrier();
        load_v_piece(item, leaf, piece);
        barrier();
        if (has_strip()) {
            [[unroll]] for (uint n = 0u; n < PIECE_TILES; ++n) {
                uint dim = (n * PARTS + part_of_strip()) * MAT_N;  // of the piece
                MatrixC sum = MatrixC(0.0);
                [[dont_unroll]] for (uint step = 0u; step < KEYS_PER_LEAF / MAT_K; ++step) {
                    MatrixA a;
                    MatrixB b;
                    coopMatLoad(a, p_rows, strip() * MAT_M * P_PITCH + step * MAT_K, P_PITCH, gl_CooperativeMatrixLayoutRowMajor);
                    coopMatLoad(b, kv_rows, step * MAT_K * KV_PITCH + dim / 4u, KV_PITCH, gl_CooperativeMatrixLayoutRowMajor);
                    sum = coopMatMulAdd(a, b, sum);
                }
                MatrixC old = first ? MatrixC(0.0) : node[piece * PIECE_TILES + n];
                node[piece * PIECE_TILES + n] = flushed(old * unit_w + flushed(sum) * leaf_w);
            }
        }
    }
}

// Write the state of the unit that holds leaf `index`, or, where a query row has only one state, its output and lse.
void emit(Item item, uint index) {
    uint q_heads = work[HEADER_Q_HEADS];
    bool single_pass = work[HEADER_SINGLE_PASS] != 0u;
    [[unroll]] for (uint piece = 0u; piece < V_PIECES; ++piece) {
        barrier();
        if (has_strip()) {
            [[unroll]] for (uint n = 0u; n < PIECE_TILES; ++n) {
                coopMatStore(node[piece * PIECE_TILES + n], s_rows,
                             strip() * MAT_M * S_PITCH + (n * PARTS + part_of_strip()) * MAT_N, S_PITCH,
                             gl_CooperativeMatrixLayoutRowMajor);
            }
        }
        barrier();
        for (uint i = lane; i < VECTORS * (PIECE / 2u); i += LANES) {
            uint t = i / (PIECE / 2u), at = 2u * (i % (PIECE / 2u)), dim = piece * PIECE + at;
            Vector vector = vector_at(item, t);
            if (!vector.real || dim >= V_DIM) {
                continue;
            }
            vec2 x = vec2(s_rows[t * S_PITCH + at], s_rows[t * S_PITCH + at + 1u]);
            float top = node_ml[t].x, sum = node_ml[t].y, keep = 1.0;
            uint slot = (single_pass ? vector.row : state_of(item, vector.row, index)) * q_heads + vector.head;
            if (single_pass) {
                if (work[HEADER_SINK_TABLE] != 0u) {
                    keep = merge_sink(uintBitsToFloat(work[work[HEADER_SINK_TABLE] + vector.head]), top, sum);
                }
                x = normalize(x, keep, sum);
                result[slot * V_DIM + dim] = x.x;
                result[slot * V_DIM + dim + 1u] = x.y;
            } else {
                states[slot * V_DIM + dim] = x.x;
                states[slot * V_DIM + dim + 1u] = x.y;
            }
            if (dim == 0u && single_pass) {
                result[work[HEADER_ROWS] * q_heads * V_DIM + slot] = natural_lse(top, sum);
            } else if (dim == 0u) {
                uint ml = work[HEADER_STATE_STRIDE] * q_heads * V_DIM + 2u * slot;
                states[ml] = top;
                states[ml + 1u] = sum;
            }
        }
    }
}
