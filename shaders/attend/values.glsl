// Step 4 of a leaf, the weighted values: lane = LANE_SLICES slices of SLICE head dimensions, for every query vector.
//
// KEYS_AHEAD value rows are in flight as stored words, and one row is in use as floats.

const uint ROWS_ADDED = KEYS_AHEAD > 4u ? 4u : KEYS_AHEAD;  // at a time

// To state.o: o gains ROWS_ADDED of the rows in flight, from number `ahead` on. The first of these rows is key t.
// Compilers unroll four rows of eight vectors but not eight rows. A single loop over the array of sums that is not
// unrolled would move all sums to memory.
void add_rows(uint slice, uint ahead, uint t) {
    // The weights of the first row begin at wave_begin + t * VECTORS. The bound lets a compiler put (j, h) into the
    // immediate offsets of the loads.
    uint first = (wave_begin / (ROWS_ADDED * VECTORS) + t / ROWS_ADDED & 0xFFFFu) * (ROWS_ADDED * VECTORS);
    [[unroll]] for (uint j = 0u; j < ROWS_ADDED; ++j) {
        [[unroll]] for (uint s = 0u; s < LANE_SLICES; ++s) {
            unpack_v(slice + s * LANES, (ahead + j) * LANE_SLICES + s, s * PAIRS);
        }
        [[unroll]] for (uint h = 0u; h < VECTORS; ++h) {
            float p = wave_floats[first + (j * VECTORS + h)];
            [[unroll]] for (uint i = 0u; i < LANE_PAIRS; ++i) {
                uint s = i / PAIRS;
                float factor = p;
                if (INTEGER) {
                    Block block = v_blocks[(ahead + j) * LANE_SLICES + s];
                    factor = integer_weight(p, block, slice_powers[h * LANE_SLICES + s]);
                }
                state.o[h * LANE_PAIRS + i] = multiply_add(v[i], vec2(factor), state.o[h * LANE_PAIRS + i]);
            }
        }
    }
}

// To state.o: slices slice, slice + LANES, ... of the sum of the leaf's weighted value rows. Lanes from VALUE_LANES on
// have no slice.
void sum_slices(Item item, Leaf leaf, uint slice) {
    uint count = leaf.end;
    [[unroll]] for (uint i = 0u; i < VECTORS * LANE_PAIRS; ++i) {
        state.o[i] = vec2(0.0);
    }
    find_slice_powers(slice);
    if ((LANES < WAVE || lane < VALUE_LANES) && has_keys(leaf)) {
        // The last trip may pass the last key. The weights are 0 there, and the last row is read again, because a row
        // that was never written may hold NaN. Rows before a window's first key hold numbers.
        uint t = leaf.begin & ~(KEYS_AHEAD - 1u);
        [[dont_unroll]] do {
            for (uint j = 0u; j < KEYS_AHEAD; ++j) {
                uvec2 where = locate(item, leaf, min(t + j, count - 1u));
                [[unroll]] for (uint s = 0u; s < LANE_SLICES; ++s) {
                    load_v(where, slice + s * LANES, j * LANE_SLICES + s);
                }
            }
            add_rows(slice, 0u, t);
            if (KEYS_AHEAD > 4u) {
                add_rows(slice, 4u, t + 4u);
            }
            t += KEYS_AHEAD;
        } while (t < count);
    }
    [[unroll]] for (uint i = 0u; i < VECTORS * LANE_PAIRS; ++i) {
        precise vec2 sum = state.o[i];
        if (FUSED) {
            sum = sum * (1.0 / FUSED_SCALE);
        }
        if (INTEGER) {
            sum = sum * inverse_power(slice_powers[i / PAIRS]);
        }
        state.o[i] = flush(sum);
    }
}
