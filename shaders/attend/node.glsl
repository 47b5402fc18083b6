// The node of a workgroup's eight waves: the fold of their leaves' states, and the place of the node's state.
//
// The waves share the fold by query vectors: wave w folds vectors w and w + 8, as far as they exist, and its vector f
// is vector w + 8 f. m and l are folded first, because the fold of values needs their powers of two, and each pass that
// writes output needs l. After each pass over V the waves fold o in rounds. In a round every wave puts FOLD_DIMS
// dimensions of its o of all vectors into shared memory, [wave][h][dim][lane], and then takes these dimensions of the
// vectors that it folds from all waves, leaves ascending. So each state crosses shared memory once. With one pass the
// rounds overwrite the weights; with several passes they lie after the weights. The empty state of a leaf without keys
// changes nothing.

shared float wave_m[WAVES * VECTORS];  // [wave][h]
shared float wave_quarters[WAVES * VECTORS * WEIGHT_PARTIALS];  // [wave][h][key mod 4]
const uint FOLDED = (VECTORS + WAVES - 1u) / WAVES;  // vectors that a wave folds
vec2 fold_powers[FOLDED * WAVES];  // [f][wave]: powers of two for (the sum so far, the wave's leaf)

// Vector f of the wave. Numbers after the last vector repeat that vector, and the wave does not write the results.
uint folded_vector(uint f) {
    return min(wave + f * WAVES, VECTORS - 1u);
}

// To state.m[f] and state.l[f]: m and l of the node, from every wave's m and quarters. To fold_powers: the powers of
// this fold.
void fold_sums() {
    for (uint g = 0u; g < LANE_QUARTERS; ++g) {
        uint pair = g * LANES + lane;
        if (pair < VECTORS * WEIGHT_PARTIALS) {
            wave_quarters[wave * VECTORS * WEIGHT_PARTIALS + pair] = quarters[g];
        }
    }
    if (lane == 0u) {
        for (uint h = 0u; h < VECTORS; ++h) {
            wave_m[wave * VECTORS + h] = state.m[h];
        }
    }
    barrier();
    for (uint f = 0u; f < FOLDED; ++f) {
        float top = EMPTY_M, sum = 0.0;
        for (uint t = 0u; t < WAVES; ++t) {
            uint leaf = t * VECTORS + folded_vector(f);
            vec2 powers = merge_powers(top, wave_m[leaf]);
            top = max(top, wave_m[leaf]);
            leaf *= WEIGHT_PARTIALS;
            vec2 q01 = vec2(wave_quarters[leaf], wave_quarters[leaf + 1u]);
            vec2 q23 = vec2(wave_quarters[leaf + 2u], wave_quarters[leaf + 3u]);
            sum = merge(sum, powers.x, sum_of_quarters(q01, q23), powers.y);
            fold_powers[f * WAVES + t] = powers;
        }
        state.m[f] = top;
        state.l[f] = sum;
    }
}

// To state.o[f * LANE_PAIRS ...]: the node's o of vector f, from every wave's o of this pass over V.
void fold_values() {
    [[unroll]] for (uint d = 0u; d < 2u * LANE_PAIRS; d += FOLD_DIMS) {
        barrier();  // every wave has read the floats that are overwritten now
        for (uint h = 0u; h < VECTORS; ++h) {
            for (uint e = 0u; e < FOLD_DIMS; ++e) {
                uint slot = FOLD_BEGIN + ((wave * VECTORS + h) * FOLD_DIMS + e) * LANES + lane;
                wave_floats[slot] = state.o[h * LANE_PAIRS + (d + e) / 2u][(d + e) % 2u];
            }
        }
        barrier();
        for (uint i = 0u; i < FOLDED * FOLD_DIMS; ++i) {
            uint f = i / FOLD_DIMS, e = i % FOLD_DIMS;
            float x = 0.0;
            for (uint t = 0u; t < WAVES; ++t) {
                uint slot = FOLD_BEGIN + ((t * VECTORS + folded_vector(f)) * FOLD_DIMS + e) * LANES + lane;
                vec2 powers = fold_powers[f * WAVES + t];
                x = merge(x, powers.x, wave_floats[slot], powers.y);
            }
            state.o[f * LANE_PAIRS + (d + e) / 2u][(d + e) % 2u] = x;
        }
    }
}

// Write the state of vector f for the node, or, if HEADER_SINGLE_PASS is 1, the output: the slices of o that belong to
// this pass over V, and, in the first pass, m and l or the log-sum-exp.
void emit_vector(Item item, uint node, uint f, uint value_pass) {
    uint h = wave + f * WAVES;
    if (h >= VECTORS || !is_mine(item, h)) {
        return;
    }
    uint q_heads = work[HEADER_Q_HEADS];
    bool writes_output = work[HEADER_SINGLE_PASS] != 0u;
    uvec2 vector = vector_of(item, h);
    uint slot = (writes_output ? vector.x : state_of(vector.x, node)) * q_heads + vector.y;
    float top = state.m[f], sum = state.l[f], o_power = 1.0;
    if (writes_output) {
        o_power = merge_sink(HEAD_WORD(vector.y, HEAD_SINK), top, sum);
    }
    if (LANES < WAVE || lane < VALUE_LANES) {
        [[unroll]] for (uint i = 0u; i < LANE_PAIRS; ++i) {
            uint slice = value_pass * VALUE_LANES + lane + i / PAIRS * LANES;
            uint element = slot * V_DIM + slice * SLICE + i % PAIRS * 2u;
            vec2 x = state.o[f * LANE_PAIRS + i];
            if (writes_output) {
                x = normalize(x, o_power, sum);
                result[element] = x.x;
                result[element + 1u] = x.y;
            } else {
                states[element] = x.x;
                states[element + 1u] = x.y;
            }
        }
    }
    if (lane == 0u && value_pass == 0u) {
        if (writes_output && work[HEADER_ROWS] != 0u) {
            result[work[HEADER_ROWS] * q_heads * V_DIM + slot] = natural_lse(top, sum);
        } else if (!writes_output) {
            uint pair = work[HEADER_STATE_STRIDE] * q_heads * V_DIM + 2u * slot;
            states[pair] = top;
            states[pair + 1u] = sum;
        }
    }
}

void emit(Item item, uint node, uint value_pass) {
    for (uint f = 0u; f < FOLDED; ++f) {
        emit_vector(item, node, f, value_pass);
    }
}
