// Floats as pairs of int8 for the matrix units, and q in this form.

// Integers in two int8: words of the high int8 and of the low int8. Each number times `power` is at most 2**12. The sum
// with 3 * 2**22 rounds to a whole number, whether a driver fuses it with the product, which is exact, or not. With 128
// more, bits 8 ... 15 are the high int8.
uvec2 halved(vec4 x, float power) {
    precise vec4 whole = fma(x, vec4(power), vec4(12582912.0 + 128.0));
    uvec4 w = floatBitsToUint(whole);
    uvec2 pairs = w.xy & 0xFFFFu | w.zw << 16u;
    uint high = pairs.x >> 8u & 0x00FF00FFu | pairs.y & 0xFF00FF00u;
    uint low = pairs.x & 0x00FF00FFu | pairs.y << 8u & 0xFF00FF00u;
    return uvec2(high, low ^ 0x80808080u);
}

// The largest number of the four lanes of a vector.
float largest_of_four(float x) {
    x = max(x, subgroupShuffleXor(x, 1u));
    return max(x, subgroupShuffleXor(x, 2u));
}

// Dimensions 4 i ... 4 i + 3 of a vector's q.
vec4 q_quad(Vector vector, uint i) {
    vec4 x = q[(vector.row * work[HEADER_Q_HEADS] + vector.head) * (K_DIM / 4u) + min(i, K_DIM / 4u - 1u)];
    return vector.real && i < K_DIM / 4u ? x : vec4(0.0);
}

// To q_units. A row of q comes rounded, to integers of at most 2**11; where its largest number was rounded up to 2**11,
// integer_power has half the row's power of two. So integers of at most 2**12 hold every row.
void find_q_units(Item item) {
    for (uint i = lane; i < VECTORS * 4u; i += LANES) {
        Vector vector = vector_at(item, i / 4u);
        float top = 0.0;
        for (uint quad = i % 4u; quad < K_DIM / 4u; quad += 4u) {
            vec4 x = abs(q_quad(vector, quad));
            top = max(top, max(max(x.x, x.y), max(x.z, x.w)));
        }
        top = largest_of_four(top);
        if (i % 4u == 0u) {
            store(q_units[i / 4u], 0.5 * inverse_power(integer_power(top)));
        }
    }
    meet();
}

// To q_held, through s_rows: piece `piece` of the dimensions.
void hold_q(Item item, uint piece) {
    for (uint i = lane; i < VECTORS * (MATRIX_PIECE / 4u); i += LANES) {
        uint t = i / (MATRIX_PIECE / 4u), quad = i % (MATRIX_PIECE / 4u);
        vec4 x = q_quad(vector_at(item, t), piece * (MATRIX_PIECE / 4u) + quad);
        uvec2 w = halved(x, inverse_power(load(q_units[t])));
        store(s_rows[t * PITCH + quad], w.x);
        store(s_rows[PLANE + t * PITCH + quad], w.y);
    }
    meet();
    [[unroll]] for (uint step = 0u; step < PIECE_STEPS; ++step) {
        if (has_strip()) {
            uint word = strip() * MAT_M * PITCH + step * MAT_K / 4u;
            q_held[piece * PIECE_STEPS + step] = load_a(s_rows[word], PITCH);
            q_held[(K_PIECES + piece) * PIECE_STEPS + step] = load_a(s_rows[PLANE + word], PITCH);
        }
    }
    meet();
}

// To q_held or q_rows.
void load_q(Item item) {
    find_q_units(item);
    if (Q_HELD) {
        FOR_PIECES(true, piece, K_PIECES, hold_q(item, piece))
        return;
    }
    const uint WORDS = K_BLOCKS * BLOCK / 4u;
    for (uint i = lane; i < VECTORS * WORDS; i += LANES) {
        uint t = i / WORDS, word = i % WORDS;
        uvec2 w = halved(q_quad(vector_at(item, t), word), inverse_power(load(q_units[t])));
        store(q_rows[t * Q_PITCH + word], w.x);
        store(q_rows[(VECTORS + t) * Q_PITCH + word], w.y);
    }
}
