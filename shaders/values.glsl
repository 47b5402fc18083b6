// Value rows: lane = slice of SLICE head dimensions; KEYS_AHEAD rows in flight, one of them in use as floats.
vec2 v[PAIRS];
uvec4 v_raw[KEYS_AHEAD * V_LOADS];
#if defined(KV_Q8_0)
float v_scales[KEYS_AHEAD];
#endif

// Dimensions SLICE slice ... SLICE slice + SLICE - 1 of value rows, in two steps: rows in flight hold registers for the
// stored words alone, and the row in use those for its floats.
void load_v(uvec2 where, uint slice, uint row) {
#if defined(KV_Q8_0)
    v_scales[row] = v_scale(where, slice * SLICE / 32u);
#endif
    for (uint i = 0u; i < V_LOADS; ++i) {
        v_raw[row * V_LOADS + i] = v_words(where, slice * SLICE * ROW_VALUES / HEAD_DIM + 4u * i, V_WORDS);
    }
}

// To v: the floats of row `row` of those in flight.
void unpack_v(uint slice, uint row) {
    for (uint i = 0u; i < PAIRS; ++i) {
#if defined(KV_Q8_0)
        uint word = v_raw[row][(i / 2u) % 4u];
        v[i] = from_int8(SLICE == 2u ? word >> (16u * (slice & 1u)) : word >> (16u * (i & 1u)), v_scales[row]).xy;
#elif defined(KV_F32)
        uvec4 w = v_raw[row * V_LOADS + i / 2u];
        v[i] = uintBitsToFloat((i & 1u) == 0u ? w.xy : w.zw);
#else
        v[i] = PAIR(v_raw[row * V_LOADS + i / 4u][i % 4u]);
#endif
    }
}

// Up to four of the value rows in flight, from row `first` of them, key t, join o.  (Compilers unroll four rows of 8
// heads, but not eight, and only an unrolled row stays in registers.)
void add_rows(uint slice, uint first, uint t) {
    for (uint j = 0u; j < min(KEYS_AHEAD, 4u); ++j) {
        unpack_v(slice, first + j);
        for (uint h = 0u; h < HEADS; ++h) {
            float p = scores[(t + j) * HEADS + h];
            for (uint i = 0u; i < PAIRS; ++i) {
                precise vec2 pv = v[i] * p;
                precise vec2 sum = o[h * PAIRS + i] + pv;
                o[h * PAIRS + i] = sum;
            }
        }
    }
}
