// The states of nodes go to the scratch tensor or become the output; and the kernels' main().

// To node_o and node_ml: the state of no keys.
void make_empty() {
    for (uint n = 0u; n < V_PIECES * PIECE_FRAGMENTS; ++n) {
        node_o[n] = MatrixC(0.0);
    }
    if (lane < VECTORS) {
        store(node_ml[lane], vec2(EMPTY_M, 0.0));
    }
}

// To node_o: it gains the leaf's weighted values.
void find_values(Item item, Leaf leaf, Leaf next) {
    FOR_PIECES(UNROLLED == 1u, piece, V_PIECES, add_values(item, leaf, next, piece))
}

struct Node {
    uint index;
    bool first;  // whether it is the item's first node
    bool last;
};

// (m, l) of the total so far, with the node: merge.comp has the same (m, l) after this state.
vec2 total_with_node(uint t) {
    vec2 total = load(total_ml[t]), ml = load(node_ml[t]);
    vec2 powers = merge_powers(total.x, ml.x);
    return vec2(max(total.x, ml.x), merge(total.y, powers.x, ml.y, powers.y));
}

// Write dimensions dim and dim + 1 of vector t of the node: to the node's state, or, where the item has all nodes of
// its rows, to the total of these nodes. The total lies in the row's place of `states` until it is the output, because
// the output may be memory of the host. The lane that writes a pair of the total reads the pair at the next node.
void emit_pair(Item item, Node node, uint t, uint dim, vec2 x) {
    Vector vector = vector_at(item, t);
    if (!vector.real || dim >= V_DIM) {
        return;
    }
    uint q_heads = work[HEADER_Q_HEADS];
    vec2 ml = load(node_ml[t]);
    if (work[HEADER_SINGLE_PASS] != 0u) {
        uint slot = vector.row * q_heads + vector.head, element = slot * V_DIM + dim;
        if (!node.first) {
            vec2 powers = merge_powers(load(total_ml[t]).x, ml.x);
            x = merge(vec2(states[element], states[element + 1u]), powers.x, x, powers.y);
            ml = total_with_node(t);
        }
        if (!node.last) {
            states[element] = x.x;
            states[element + 1u] = x.y;
            return;
        }
        float top = ml.x, sum = ml.y, o_power = merge_sink(HEAD_WORD(vector.head, HEAD_SINK), top, sum);
        x = normalize(x, o_power, sum);
        result[element] = x.x;
        result[element + 1u] = x.y;
        if (dim == 0u && work[HEADER_ROWS] != 0u) {
            result[work[HEADER_ROWS] * q_heads * V_DIM + slot] = natural_lse(top, sum);
        }
        return;
    }
    uint slot = state_of(vector.row, node.index) * q_heads + vector.head;
    states[slot * V_DIM + dim] = x.x;
    states[slot * V_DIM + dim + 1u] = x.y;
    if (dim == 0u) {
        uint pair = work[HEADER_STATE_STRIDE] * q_heads * V_DIM + 2u * slot;
        states[pair] = ml.x;
        states[pair + 1u] = ml.y;
    }
}

// Write the node's piece `piece` of all vectors, through s_rows.
void emit_piece(Item item, Node node, uint piece) {
    meet();
    if (has_strip()) {
        [[unroll]] for (uint n = 0u; n < PIECE_FRAGMENTS; ++n) {
            uint word = strip() * MAT_M * S_PITCH + fragment_of(n) * MAT_N;
            store_c(s_rows[word], node_o[piece * PIECE_FRAGMENTS + n], S_PITCH);
        }
    }
    meet();
    for (uint i = lane; i < VECTORS * (MATRIX_PIECE / 2u); i += LANES) {
        uint t = i / (MATRIX_PIECE / 2u), dim = 2u * (i % (MATRIX_PIECE / 2u));
        uvec2 x = uvec2(load(s_rows[t * S_PITCH + dim]), load(s_rows[t * S_PITCH + dim + 1u]));
        emit_pair(item, node, t, piece * MATRIX_PIECE + dim, uintBitsToFloat(x));
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

void main() {
    Item item = read_item();
    if (item.node_begin >= item.node_end) {
        return;
    }
    find_head_scales();
    load_q(item);
    bool keys = item.limit > 0u;  // else the item's rows see no key, and their state is the empty state
    // The first leaf that some row sees, and the leaf after the last such leaf.
    uint first = item.first - min((item.last_row - item.row) * item.row_step, item.first);
    uint begin = max(item.node_begin * LEAVES_PER_NODE, first / KEYS_PER_LEAF);
    uint end = keys ? min(item.node_end * LEAVES_PER_NODE, (item.limit - 1u) / KEYS_PER_LEAF + 1u) : begin + 1u;
    make_empty();
    if (keys) {
        fetch_k(item, leaf_of(item, begin), 0u);
    }
    [[dont_unroll]] for (uint index = begin; index < end; ++index) {
        Leaf leaf = leaf_of(item, index), next = leaf_of(item, min(index + 1u, end - 1u));
        bool first_of_node = index == begin || index % LEAVES_PER_NODE == 0u;
        if (keys) {
            find_scores(item, leaf);
            find_weights(item, leaf, first_of_node);
            find_values(item, leaf, next);
        }
        if ((index + 1u) % LEAVES_PER_NODE == 0u || index + 1u == end) {
            uint node = index / LEAVES_PER_NODE;
            emit(item, Node(node, node == begin / LEAVES_PER_NODE, index + 1u == end));
        }
    }
}
