// Step 4 of a leaf, the weighted values: lane = LANE_SLICES slices of SLICE head dimensions, for every query vector.
//
// KEYS_AHEAD value rows are in flight as stored words, and one of them is in use as floats.

const uint WORD_VALUES = 2u * WORD_PAIRS;
const bool V_IN_PART = NHD && SLICE < WORD_VALUES;  // a slice is loaded without the rest of its word
vec2 v[LANE_PAIRS];  // the row in use
uvec4 v_raw[KEYS_AHEAD * LANE_SLICES * SLICE_LOADS];
Block v_blocks[KEYS_AHEAD * LANE_SLICES];  // of types that have blocks
const uint ROWS_ADDED = KEYS_AHEAD > 4u ? 4u : KEYS_AHEAD;  // at a time

// To v_raw: dimensions SLICE slice ... SLICE slice + SLICE - 1 of a value row, as slice `ahead` of those in flight.
void load_v(uvec2 where, uint slice, uint ahead) {
    if (V_BITS <= 8u) {
        v_blocks[ahead] = v_block(where, slice * SLICE / BLOCK);
    }
    for (uint i = 0u; i < SLICE_LOADS; ++i) {
        if (V_IN_PART) {
            v_raw[ahead * SLICE_LOADS] = uvec4(v_row_part(where.x, slice * SLICE), 0u, 0u, 0u);
            continue;
        }
        v_raw[ahead * SLICE_LOADS + i] = v_words(where, slice * SLICE * V_BITS / 32u + LOAD_WORDS * i, LOAD_WORDS);
    }
}

// To v, from pair `to` on: the floats of that row.
void unpack_v(uint slice, uint ahead, uint to) {
    for (uint i = 0u; i < PAIRS; ++i) {
        if (V_STORAGE == STORAGE_F32) {
            uvec4 w = v_raw[ahead * SLICE_LOADS + 2u * i / LOAD_WORDS];
            v[to + i] = uintBitsToFloat(2u * i % LOAD_WORDS == 0u ? w.xy : w.zw);
            continue;
        }
        uint index = i / WORD_PAIRS, word = v_raw[ahead * SLICE_LOADS + index / LOAD_WORDS][index % LOAD_WORDS];
        if (V_BITS == 16u) {
            v[to + i] = from_half_words(V_STORAGE, word);
        } else {
            Block block = v_blocks[ahead];
            uint fifth = block.fifth >> ((slice * SLICE + index * WORD_VALUES) % BLOCK), j = 2u * i % WORD_VALUES;
            if (SLICE < WORD_VALUES && !V_IN_PART) {  // several lanes share the word
                word >>= slice * SLICE % WORD_VALUES * V_BITS;
            }
            v[to + i] = vec2(narrow_value(V_STORAGE, word, j, fifth, block),
                             narrow_value(V_STORAGE, word, j + 1u, fifth, block));
        }
    }
}

// ROWS_ADDED of the rows in flight, from number `ahead` on, whose first is key t, are added to o.  (Compilers unroll
// four rows of eight vectors but not eight, and only what is unrolled stays in registers: a loop that is left over an
// array of sums makes memory of all of them.)
void add_rows(uint slice, uint ahead, uint t) {
    // Weights of the first row: own + t * VECTORS, with a bound, so that a compiler puts (j, h) into the loads'
    // immediate offsets.
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
                    factor = integer_weight(p, v_blocks[(ahead + j) * LANE_SLICES + s], slice_powers[h * LANE_SLICES + s]);
                }
                state.o[h * LANE_PAIRS + i] = multiply_add(v[i], vec2(factor), state.o[h * LANE_PAIRS + i]);
            }
        }
    }
}

// To o: slices slice, slice + LANES, ... of the sum of the leaf's weighted value rows.  Lanes from VALUE_LANES on have
// none.
void sum_slices(Item item, Leaf leaf, uint slice) {
    uint count = leaf.count;
    [[unroll]] for (uint i = 0u; i < VECTORS * LANE_PAIRS; ++i) {
        state.o[i] = vec2(0.0);
    }
    find_slice_powers(slice);
    if ((LANES < WAVE || lane < VALUE_LANES) && has_keys(leaf)) {
        // The last trip may go beyond the last key: the weight is 0 there, and the last row is read again, so that no
        // row that was never written (it may hold NaN) is touched.  Rows before a window's first key hold numbers.
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
