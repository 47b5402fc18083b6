// Where the results of pass 1 go: the state of a unit (leaf or node) to the scratch tensor, or, where a query row has
// only one state, the final output and lse.

#if !NODE
// With several passes over V, o does not wait for the other passes: slice `slice` of the leaf's o is merged into the
// unit's in the scratch tensor at once, before m and l are.  Only this lane reads or writes these words.
void merge_slice(Item item, Leaf leaf, uint slice, bool first) {
    [[unroll]] for (uint h = 0u; h < VECTORS; ++h) {
        uvec2 vector = vector_of(item, h);
        uint state = state_of(item, vector.x, leaf.index);
        uint at = (state * work[HEADER_Q_HEADS] + vector.y) * V_DIM + slice * SLICE;
        if (lane >= VALUE_LANES || !is_mine(item, h)) {
            continue;
        }
#if LOOP
        vec2 w = merge_weights(first ? EMPTY_M : unit_m[h], m[h]);
        for (uint i = 0u; i < PAIRS; ++i) {
            vec2 o_old = first ? vec2(0.0) : vec2(states[at + 2u * i], states[at + 2u * i + 1u]);
            o[h * PAIRS + i] = merge(o_old, w.x, o[h * PAIRS + i], w.y);
        }
#endif
        for (uint i = 0u; i < PAIRS; ++i) {
            states[at + 2u * i] = o[h * PAIRS + i].x;
            states[at + 2u * i + 1u] = o[h * PAIRS + i].y;
        }
    }
}

// Step 3 of a leaf: to o in one pass over V, or in several to the scratch tensor.
void find_values(Item item, Leaf leaf, bool first) {
    if (VALUE_PASSES == 1u) {
        sum_slices(item, leaf, lane);
        return;
    }
    [[dont_unroll]] for (uint pass = 0u; pass < VALUE_PASSES; ++pass) {
        sum_slices(item, leaf, pass * VALUE_LANES + lane);
        merge_slice(item, leaf, pass * VALUE_LANES + lane, first);
    }
}
#endif

#if LOOP
// The leaf's state (m, l, o) is merged into its unit's (unit_m, unit_l, unit_o).
void merge_into_unit(bool first) {
    for (uint h = 0u; h < VECTORS; ++h) {
        float m_old = first ? EMPTY_M : unit_m[h];
        float l_old = first ? 0.0 : unit_l[h];
        vec2 w = merge_weights(m_old, m[h]);
        unit_m[h] = max(m_old, m[h]);
        unit_l[h] = merge(l_old, w.x, l[h], w.y);
        [[unroll]] for (uint i = 0u; VALUE_PASSES == 1u && i < LANE_PAIRS; ++i) {
            vec2 o_old = first ? vec2(0.0) : unit_o[h * LANE_PAIRS + i];
            unit_o[h * LANE_PAIRS + i] = merge(o_old, w.x, o[h * LANE_PAIRS + i], w.y);
        }
    }
}
#define UNIT(x) unit_##x
#else
#define UNIT(x) x
#endif

const bool HAS_O = NODE == 1u || VALUE_PASSES == 1u;  // o holds its part of this pass over V

// Write the state of the unit that holds leaf `index`, for query vector h, number `place` of the lane's arrays.
void emit_vector(Item item, uint index, uint h, uint place, uint pass) {
    uint q_heads = work[HEADER_Q_HEADS];
    bool single_pass = HAS_O && work[HEADER_SINGLE_PASS] != 0u;
    uvec2 vector = vector_of(item, h);
    uint slot = (single_pass ? vector.x : state_of(item, vector.x, index)) * q_heads + vector.y;
    bool mine = is_mine(item, h);
    float top = UNIT(m)[place], sum = UNIT(l)[place], o_weight = 1.0;
    if (single_pass && work[HEADER_SINK_TABLE] != 0u) {
        o_weight = merge_sink(uintBitsToFloat(work[work[HEADER_SINK_TABLE] + vector.y]), top, sum);
    }
    if (HAS_O && mine && (LANES < WAVE || lane < VALUE_LANES)) {
        [[unroll]] for (uint i = 0u; i < LANE_PAIRS; ++i) {
            uint slice = pass * VALUE_LANES + lane + i / PAIRS * LANES;
            uint at = slot * V_DIM + slice * SLICE + i % PAIRS * 2u;
            vec2 x = UNIT(o)[place * LANE_PAIRS + i];
            if (single_pass) {
                x = normalize(x, o_weight, sum);
                result[at] = x.x;
                result[at + 1u] = x.y;
            } else {
                states[at] = x.x;
                states[at + 1u] = x.y;
            }
        }
    }
    if (mine && lane == 0u && pass == 0u) {
        if (single_pass) {
            result[work[HEADER_ROWS] * q_heads * V_DIM + slot] = natural_lse(top, sum);
        } else {
            uint at = work[HEADER_STATE_STRIDE] * q_heads * V_DIM + 2u * slot;
            states[at] = top;
            states[at + 1u] = sum;
        }
    }
}

// The same for every vector of the workgroup.
void emit(Item item, uint index) {
    [[unroll]] for (uint h = 0u; h < VECTORS; ++h) {
        emit_vector(item, index, h, h, 0u);
    }
}
