// Step 3 of a leaf in one pass over V, or, where value sums are more than the registers hold, in several.

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
        vec2 powers = merge_powers(first ? EMPTY_M : unit_m[h], m[h]);
        for (uint i = 0u; i < PAIRS; ++i) {
            vec2 o_old = first ? vec2(0.0) : vec2(states[at + 2u * i], states[at + 2u * i + 1u]);
            o[h * PAIRS + i] = merge(o_old, powers.x, o[h * PAIRS + i], powers.y);
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
