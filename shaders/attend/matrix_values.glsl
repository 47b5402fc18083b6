// Step 3 of a leaf and what follows: weighted values by the matrix units, the canonical fold of the leaf into its node,
// and the node's state.
//
// The fold works on matrices element by element.  Its products are with powers of two, so only its sum rounds.

MatrixC flushed(MatrixC x) {
    for (uint i = 0u; i < x.length(); ++i) {
        x[i] = flush(x[i]);
    }
    return x;
}

MatrixC value_sums[PIECE_FRAGMENTS];  // the subgroup's fragments of a piece of its strip's weighted values

// To value_sums: the products with MAT_K keys.
void add_value_step(uint step) {
    MatrixA a = load_a(s_rows[strip() * MAT_M * S_PITCH + step * MAT_K / 2u], S_PITCH);
    [[unroll]] for (uint n = 0u; n < PIECE_FRAGMENTS; ++n) {
        uint at = (n * STRIP_WAVES + wave_of_strip()) * MAT_N * PITCH + step * MAT_K / 2u;
        MatrixB b = load_b(kv_rows[at], PITCH);
        value_sums[n] = coopMatMulAdd(a, b, value_sums[n]);
    }
}

// To node_o: the piece of V that is in flight, weighted and folded.  The next one is fetched, or the next leaf's first
// piece of K.
void add_values(Item item, Leaf leaf, Leaf next, bool first, uint piece) {
    meet();
    store_v();
    meet();
    if (piece + 1u < V_PIECES) {
        fetch_v(item, leaf, piece + 1u);
    } else {
        fetch_k(item, next, 0u);
    }
    if (has_strip()) {
        [[unroll]] for (uint n = 0u; n < PIECE_FRAGMENTS; ++n) {
            value_sums[n] = MatrixC(0.0);
        }
        FOR_STEPS(step, KEYS_PER_LEAF / MAT_K, add_value_step(step))
        MatrixC node_w = load_rows(node_weight[strip() * MAT_M]), leaf_w = load_rows(leaf_weight[strip() * MAT_M]);
        [[unroll]] for (uint n = 0u; n < PIECE_FRAGMENTS; ++n) {
            MatrixC old = first ? MatrixC(0.0) : node_o[piece * PIECE_FRAGMENTS + n];
            node_o[piece * PIECE_FRAGMENTS + n] = flushed(old * node_w + flushed(value_sums[n] * WEIGHT_UNIT) * leaf_w);
        }
    }
}

// To node_o and node_ml: the state of no keys.
void make_empty() {
    for (uint n = 0u; n < V_PIECES * PIECE_FRAGMENTS; ++n) {
        node_o[n] = MatrixC(0.0);
    }
    if (lane < VECTORS) {
        store(node_ml[lane], vec2(EMPTY_M, 0.0));
    }
}

// To node_o: the leaf's weighted values.
void find_values(Item item, Leaf leaf, Leaf next, bool first) {
    FOR_PIECES(UNROLLED == 1u, piece, V_PIECES, add_values(item, leaf, next, first, piece))
}

struct Node {
    uint index;
    bool first;  // of the item's
    bool last;
};

// (m, l) of the total so far, with the node: what merge.comp has behind this state.
vec2 total_with_node(uint t) {
    vec2 total = load(total_ml[t]), ml = load(node_ml[t]);
    vec2 powers = merge_powers(total.x, ml.x);
    return vec2(max(total.x, ml.x), merge(total.y, powers.x, ml.y, powers.y));
}

// Write dimensions dim and dim + 1 of vector t of the node: to its state, or, where the item has all nodes of its rows,
// to the total of these.  That lies in the row's place of `states` until it is the output, which may be memory of the
// host.  The lane that writes a pair of the total reads it at the next node.
void emit_pair(Item item, Node node, uint t, uint dim, vec2 x) {
    Vector vector = vector_at(item, t);
    if (!vector.real || dim >= V_DIM) {
        return;
    }
    uint q_heads = work[HEADER_Q_HEADS];
    vec2 ml = load(node_ml[t]);
    if (work[HEADER_SINGLE_PASS] != 0u) {
        uint slot = vector.row * q_heads + vector.head, at = slot * V_DIM + dim;
        if (!node.first) {
            vec2 powers = merge_powers(load(total_ml[t]).x, ml.x);
            x = merge(vec2(states[at], states[at + 1u]), powers.x, x, powers.y);
            ml = total_with_node(t);
        }
        if (!node.last) {
            states[at] = x.x;
            states[at + 1u] = x.y;
            return;
        }
        float top = ml.x, sum = ml.y, o_power = merge_sink(HEAD_WORD(vector.head, HEAD_SINK), top, sum);
        x = normalize(x, o_power, sum);
        result[at] = x.x;
        result[at + 1u] = x.y;
        if (dim == 0u) {
            result[work[HEADER_ROWS] * q_heads * V_DIM + slot] = natural_lse(top, sum);
        }
        return;
    }
    uint slot = state_of(vector.row, node.index) * q_heads + vector.head;
    states[slot * V_DIM + dim] = x.x;
    states[slot * V_DIM + dim + 1u] = x.y;
    if (dim == 0u) {
        uint at = work[HEADER_STATE_STRIDE] * q_heads * V_DIM + 2u * slot;
        states[at] = ml.x;
        states[at + 1u] = ml.y;
    }
}

// The node's piece `piece` of all vectors, through s_rows.
void emit_piece(Item item, Node node, uint piece) {
    meet();
    if (has_strip()) {
        [[unroll]] for (uint n = 0u; n < PIECE_FRAGMENTS; ++n) {
            uint at = strip() * MAT_M * S_PITCH + (n * STRIP_WAVES + wave_of_strip()) * MAT_N;
            store_c(s_rows[at], node_o[piece * PIECE_FRAGMENTS + n], S_PITCH);
        }
    }
    meet();
    for (uint i = lane; i < VECTORS * (MATRIX_PIECE / 2u); i += LANES) {
        uint t = i / (MATRIX_PIECE / 2u), at = 2u * (i % (MATRIX_PIECE / 2u));
        uvec2 x = uvec2(load(s_rows[t * S_PITCH + at]), load(s_rows[t * S_PITCH + at + 1u]));
        emit_pair(item, node, t, piece * MATRIX_PIECE + at, uintBitsToFloat(x));
    }
}

void emit(Item item, Node node) {
    FOR_PIECES(UNROLLED == 1u, piece, V_PIECES, emit_piece(item, node, piece))
    if (work[HEADER_SINGLE_PASS] == 0u || node.last) {
        return;
    }
    meet();
    if (lane < VECTORS) {
        store(total_ml[lane], node.first ? load(node_ml[lane]) : total_with_node(lane));
    }
}
