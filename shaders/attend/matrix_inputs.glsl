// Inputs of the matrix units in shared memory: q, K and V as halves.

uint halves(vec2 x) {
    return packFloat2x16(f16vec2(x));
}

// Dimensions 2 pair and 2 pair + 1 of vector t's q.
uint q_pair(Item item, uint t, uint pair) {
    Vector vector = vector_at(item, t);
    uint quad = (vector.row * work[HEADER_Q_HEADS] + vector.head) * (K_DIM / 4u) + min(pair, K_DIM / 2u - 1u) / 2u;
    vec4 x = q[quad];
    return vector.real && pair < K_DIM / 2u ? halves(pair % 2u == 0u ? x.xy : x.zw) : 0u;
}

// To q_held, through kv_rows: piece `piece` of the dimensions.
void hold_q(Item item, uint piece) {
    meet();
    for (uint i = lane; i < VECTORS * (MATRIX_PIECE / 2u); i += LANES) {
        uint t = i / (MATRIX_PIECE / 2u), pair = i % (MATRIX_PIECE / 2u);
        store(kv_rows[t * PITCH + pair], q_pair(item, t, piece * (MATRIX_PIECE / 2u) + pair));
    }
    meet();
    [[unroll]] for (uint step = 0u; step < PIECE_STEPS; ++step) {
        if (has_strip()) {
            uint word = strip() * MAT_M * PITCH + step * MAT_K / 2u;
            q_held[piece * PIECE_STEPS + step] = load_a(kv_rows[word], PITCH);
        }
    }
}

// To q_held or q_rows.
void load_q(Item item) {
    if (!Q_HELD) {
        for (uint i = lane; i < VECTORS * (K_DIM / 2u); i += LANES) {
            uint t = i / (K_DIM / 2u), pair = i % (K_DIM / 2u);
            store(q_rows[t * Q_PITCH + pair], q_pair(item, t, pair));
        }
        return;
    }
    FOR_PIECES(true, piece, K_PIECES, hold_q(item, piece))
}

// Eight dimensions of a key, as halves.
uvec4 k_halves(uvec2 where, uint chunk) {
    if (K_STORAGE == STORAGE_F16) {
        return k_chunk(where, chunk, 0u, 0u);
    }
    vec4 low, high;
    load_k(where, chunk, 0u, k_block(where, chunk / (BLOCK / CHUNK)), low, high);
    return uvec4(halves(low.xy), halves(low.zw), halves(high.xy), halves(high.zw));
}

// Four dimensions of a value row, as halves.
uvec2 v_halves(uvec2 where, uint dim) {
    if (V_BITS == 16u) {
        uvec2 w = v_words(where, dim / 2u, 2u).xy;
        if (V_STORAGE == STORAGE_BF16) {
            w = uvec2(halves(from_half_words(V_STORAGE, w.x)), halves(from_half_words(V_STORAGE, w.y)));
        }
        return w;
    }
    Block block = v_block(where, dim / BLOCK);
    uint word = v_words(where, dim * V_BITS / 32u, 1u).x, fifth = block.fifth >> (dim % BLOCK);
    word >>= NHD && V_BITS == 4u ? dim % 8u : dim % (32u / V_BITS) * V_BITS;  // NHD: high halves are dimensions 4 to 7
    vec4 v;
    for (uint i = 0u; i < 4u; ++i) {
        v[i] = narrow_value(V_STORAGE, word, i, fifth, block);
    }
    return uvec2(halves(v.xy), halves(v.zw));
}

// To ahead: the lane's chunks of piece `piece` of K. Neighboring lanes take neighboring keys. After the last key and
// the last dimension the lane loads the last one again, which is a number: no row sees that key, and q is 0 in that
// dimension.
void fetch_k(Item item, Leaf leaf, uint piece) {
    [[unroll]] for (uint u = 0u; u < LOADS; ++u) {
        uint i = u * LANES + lane, key = i % KEYS_PER_LEAF, chunk = piece * (MATRIX_PIECE / CHUNK) + i / KEYS_PER_LEAF;
        ahead[u] = k_halves(locate(item, leaf, min(key, leaf.end - 1u)), min(chunk, K_DIM / CHUNK - 1u));
    }
}

// To ahead, from piece `piece` of V: four dimensions of the keys of two neighboring rows.
const uint ROW_PAIRS = KEYS_PER_LEAF / 2u;
void fetch_v(Item item, Leaf leaf, uint piece) {
    [[unroll]] for (uint u = 0u; u < LOADS; ++u) {
        uint i = u * LANES + lane, dim = min(piece * MATRIX_PIECE + i / ROW_PAIRS * 4u, V_DIM - 4u);
        uint row = 2u * (i % ROW_PAIRS), last = leaf.end - 1u;
        ahead[u] = uvec4(v_halves(locate(item, leaf, min(key_of(row), last)), dim),
                         v_halves(locate(item, leaf, min(key_of(row + 1u), last)), dim));
    }
}

// From ahead to kv_rows.
void store_k() {
    [[unroll]] for (uint u = 0u; u < LOADS; ++u) {
        uint i = u * LANES + lane, word = row_of(i % KEYS_PER_LEAF) * PITCH + i / KEYS_PER_LEAF * (CHUNK / 2u);
        [[unroll]] for (uint w = 0u; w < 4u; ++w) {
            store(kv_rows[word + w], ahead[u][w]);
        }
    }
}

void store_v() {
    [[unroll]] for (uint u = 0u; u < LOADS; ++u) {
        uint i = u * LANES + lane, word = i / ROW_PAIRS * 4u * PITCH + i % ROW_PAIRS;
        [[unroll]] for (uint w = 0u; w < 2u; ++w) {
            uint a = ahead[u][w], b = ahead[u][w + 2u];
            store(kv_rows[word + 2u * w * PITCH], a & 0xFFFFu | b << 16);
            store(kv_rows[word + (2u * w + 1u) * PITCH], a >> 16 | b & 0xFFFF0000u);
        }
    }
}

// The values of K and V are products with their scales already.
void fetch_v_scales(Item item, Leaf leaf) {
}

void store_v_scales() {
}
