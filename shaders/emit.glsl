// Where the results of pass 1 go: the state of a unit (leaf or node) to the scratch tensor, or, where every query row
// of the call has one state, the final output and lse.

#if LOOP
// The leaf's state (m, l, o) is merged into its unit's (unit_m, unit_l, unit_o).
void merge_into_unit(bool first) {
    for (uint h = 0u; h < VECTORS; ++h) {
        float m_old = first ? EMPTY_M : unit_m[h];
        float l_old = first ? 0.0 : unit_l[h];
        vec2 powers = merge_powers(m_old, m[h]);
        unit_m[h] = max(m_old, m[h]);
        unit_l[h] = merge(l_old, powers.x, l[h], powers.y);
        [[unroll]] for (uint i = 0u; VALUE_PASSES == 1u && i < LANE_PAIRS; ++i) {
            vec2 o_old = first ? vec2(0.0) : unit_o[h * LANE_PAIRS + i];
            unit_o[h * LANE_PAIRS + i] = merge(o_old, powers.x, o[h * LANE_PAIRS + i], powers.y);
        }
    }
}
#define EMITTED(x) unit_##x
#else
#define EMITTED(x) x  // the leaf is the unit, or, in NODE, has been folded to it
#endif

const bool HAS_O = NODE == 1u || VALUE_PASSES == 1u;  // o holds its part of this pass over V

// Write the unit's state, or the output, of vector h, number `place` of the lane's arrays.  index: a leaf of the unit.
void emit_vector(Item item, uint index, uint h, uint place, uint pass) {
    uint q_heads = work[HEADER_Q_HEADS];
    bool single_pass = HAS_O && work[HEADER_SINGLE_PASS] != 0u;
    uvec2 vector = vector_of(item, h);
    uint slot = (single_pass ? vector.x : state_of(item, vector.x, index)) * q_heads + vector.y;
    bool mine = is_mine(item, h);
    float top = EMITTED(m)[place], sum = EMITTED(l)[place], o_power = 1.0;
    if (single_pass && work[HEADER_SINK_TABLE] != 0u) {
        o_power = merge_sink(uintBitsToFloat(work[work[HEADER_SINK_TABLE] + vector.y]), top, sum);
    }
    if (HAS_O && mine && (LANES < WAVE || lane < VALUE_LANES)) {
        [[unroll]] for (uint i = 0u; i < LANE_PAIRS; ++i) {
            uint slice = pass * VALUE_LANES + lane + i / PAIRS * LANES;
            uint at = slot * V_DIM + slice * SLICE + i % PAIRS * 2u;
            vec2 x = EMITTED(o)[place * LANE_PAIRS + i];
            if (single_pass) {
                x = normalize(x, o_power, sum);
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
