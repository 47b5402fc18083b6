// Where the results of pass 1 go: the states of a unit (leaf or node) to the scratch tensor, or, where a state is a
// row's only one, the final output and lse.

#if LOOP
// The unit's state so far; where there are several passes over V, its o is in the scratch tensor.
float node_m[HEADS], node_l[HEADS];
vec2 node_o[HEADS * PAIRS];
#define RESULT(x) node_##x
#else
#define RESULT(x) x
#endif

// The state of row `row` for the unit that holds leaf `index`.
uint state_of(uint row, uint index, uint unit_leaves) {
    uint record = work[HEADER_ROW_TABLE] + row * ROW_WORDS;
    return work[record + ROW_STATE] + index / unit_leaves - work[record + ROW_UNIT];
}

// Does this workgroup write the results of vector h?
bool is_mine(uint first_row, uint last_row, uint h) {
    return ROWS == 1u ? h >= repeated_heads() : first_row + h / ROW_HEADS <= last_row;
}

// A leaf's o joins slice `slice` of its unit's in the scratch tensor, before its m does.  Nobody but this lane reads or
// writes these words.  first: the leaf is the unit's first.
void join_values(Leaf leaf, uint unit_leaves, uint slice, bool first) {
    [[unroll]] for (uint h = 0u; h < HEADS; ++h) {
        uvec2 vector = vector_of(leaf.row, leaf.last_row, h);
        uint state = state_of(vector.x, leaf.index, unit_leaves);
        uint at = (state * work[HEADER_Q_HEADS] + vector.y) * HEAD_DIM + slice * SLICE;
        if (gl_LocalInvocationID.x >= VALUE_LANES || !is_mine(leaf.row, leaf.last_row, h)) {
            continue;
        }
#if LOOP
        vec2 w = merge_weights(first ? EMPTY_M : node_m[h], m[h]);
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

// A leaf's weighted values: in one pass over V to o, which the caller adds to its unit; in several to the unit at once.
void all_values(Leaf leaf, uint unit_leaves, bool first) {
    uint lane = gl_LocalInvocationID.x;
    if (VALUE_PASSES == 1u) {
        leaf_values(leaf, lane);
        return;
    }
    [[dont_unroll]] for (uint pass = 0u; pass < VALUE_PASSES; ++pass) {
        leaf_values(leaf, pass * VALUE_LANES + lane);
        join_values(leaf, unit_leaves, pass * VALUE_LANES + lane, first);
    }
}

// Write the unit's states.
void emit(uint first_row, uint last_row, uint index, uint unit_leaves) {
    uint lane = gl_LocalInvocationID.x;
    uint q_heads = work[HEADER_Q_HEADS];
    bool direct = VALUE_PASSES == 1u && work[HEADER_DIRECT] != 0u;
    uint lse_base = work[HEADER_ROWS] * q_heads * HEAD_DIM;
    uint ml_base = work[HEADER_STATE_STRIDE] * q_heads * HEAD_DIM;
    [[unroll]] for (uint h = 0u; h < HEADS; ++h) {
        uvec2 vector = vector_of(first_row, last_row, h);
        uint slot = (direct ? vector.x : state_of(vector.x, index, unit_leaves)) * q_heads + vector.y;
        bool mine = is_mine(first_row, last_row, h);
        float top = RESULT(m)[h], sum = RESULT(l)[h], keep = 1.0;
        if (direct && work[HEADER_SINK_TABLE] != 0u) {
            keep = join_sink(uintBitsToFloat(work[work[HEADER_SINK_TABLE] + vector.y]), top, sum);
        }
        if (VALUE_PASSES == 1u && mine && lane < VALUE_LANES) {
            for (uint i = 0u; i < PAIRS; ++i) {
                uint at = slot * HEAD_DIM + lane * SLICE + 2u * i;
                vec2 x = RESULT(o)[h * PAIRS + i];
                if (direct) {
                    x = normalised(x, keep, sum);
                    result[at] = x.x;
                    result[at + 1u] = x.y;
                } else {
                    states[at] = x.x;
                    states[at + 1u] = x.y;
                }
            }
        }
        if (mine && lane == 0u) {
            if (direct) {
                result[lse_base + slot] = natural_lse(top, sum);
            } else {
                states[ml_base + 2u * slot] = top;
                states[ml_base + 2u * slot + 1u] = sum;
            }
        }
    }
}
