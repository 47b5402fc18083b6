// What the matrix units are fed with: int8 of q, K and V in shared memory.

// Numbers, of which each times `power` is at most 2**11, as integers in two int8: words of the high and of the low ones.
// The sum with 3 * 2**22 rounds to a whole number, whether the product, which is exact, is fused with it or not; with 128
// more, bits 8 ... 15 are the high one.
uvec2 halved(vec4 x, float power) {
    precise vec4 whole = fma(x, vec4(power), vec4(12582912.0 + 128.0));
    uvec4 w = floatBitsToUint(whole);
    uvec2 pairs = w.xy & 0xFFFFu | w.zw << 16u;
    uint high = pairs.x >> 8u & 0x00FF00FFu | pairs.y & 0xFF00FF00u;
    uint low = pairs.x & 0x00FF00FFu | pairs.y << 8u & 0xFF00FF00u;
    return uvec2(high, low ^ 0x80808080u);
}

// The largest of the four lanes of a vector.
float largest_of_four(float x) {
    x = max(x, subgroupShuffleXor(x, 1u));
    return max(x, subgroupShuffleXor(x, 2u));
}

// Dimensions 4 i ... 4 i + 3 of a vector's q.
vec4 q_quad(Vector vector, uint i) {
    vec4 x = q[(vector.row * work[HEADER_Q_HEADS] + vector.head) * (K_DIM / 4u) + min(i, K_DIM / 4u - 1u)];
    return vector.real && i < K_DIM / 4u ? x : vec4(0.0);
}

void find_q_units(Item item) {
    for (uint i = lane; i < VECTORS * 4u; i += LANES) {
        Vector vector = vector_at(item, i / 4u);
        float top = 0.0;
        for (uint at = i % 4u; at < K_DIM / 4u; at += 4u) {
            vec4 x = abs(q_quad(vector, at));
            top = max(top, max(max(x.x, x.y), max(x.z, x.w)));
        }
        top = largest_of_four(top);
        if (i % 4u == 0u) {
            store(q_units[i / 4u], inverse_power(integer_power(top)));
        }
    }
    meet();
}

// To q_held, through s_rows: piece `piece` of the dimensions.
void hold_q(Item item, uint piece) {
    for (uint i = lane; i < VECTORS * (MATRIX_PIECE / 4u); i += LANES) {
        uint t = i / (MATRIX_PIECE / 4u), at = i % (MATRIX_PIECE / 4u);
        vec4 x = q_quad(vector_at(item, t), piece * (MATRIX_PIECE / 4u) + at);
        uvec2 w = halved(x, inverse_power(load(q_units[t])));
        store(s_rows[t * PITCH + at], w.x);
        store(s_rows[PLANE + t * PITCH + at], w.y);
    }
    meet();
    [[unroll]] for (uint step = 0u; step < PIECE_STEPS; ++step) {
        if (has_strip()) {
            uint at = strip() * MAT_M * PITCH + step * MAT_K / 4u;
            q_held[piece * PIECE_STEPS + step] = load_a(s_rows[at], PITCH);
            q_held[(K_PIECES + piece) * PIECE_STEPS + step] = load_a(s_rows[PLANE + at], PITCH);
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
        uint t = i / WORDS, at = i % WORDS;
        uvec2 w = halved(q_quad(vector_at(item, t), at), inverse_power(load(q_units[t])));
        store(q_rows[t * Q_PITCH + at], w.x);
        store(q_rows[(VECTORS + t) * Q_PITCH + at], w.y);
    }
}

// Four values as int8: of 8 bits a word, of 4 bits the values of a word of eight from number i, 0 or 4, on.  fifth: their
// fifth bits, from bit 0 on.
uint int8s(uint storage, uint w, uint i, uint fifth) {
    if (storage == STORAGE_Q8_0) {
        return w;
    }
    w >>= NHD ? i : 4u * i;
    if (storage == STORAGE_IQ4_NL) {
        uint bytes = 0u;
        [[unroll]] for (uint k = 0u; k < 4u; ++k) {
            bytes |= uint(int(narrow_value(storage, w, k, 0u, Block(1.0, 0.0, 0u))) & 0xFF) << 8u * k;
        }
        return bytes;
    }
    if (!NHD) {
        w = (w & 0xFFFFu | w << 8u) & 0x00FF00FFu;
        w |= w << 4u;
    }
    w &= 0x0F0F0F0Fu;
    if (storage == STORAGE_Q5_0) {
        w |= ((fifth & 0xFu) * 0x00204081u & 0x01010101u) << 4u;
    }
    return (w | 0x80808080u) - (storage == STORAGE_Q5_0 ? 0x10101010u : 0x08080808u) ^ 0x80808080u;
}

uvec2 where_of(Item item, Leaf leaf, uint key) {
    return locate(item, leaf, min(key, leaf.count - 1u));
}

// To k_ahead: the lane's chunks of piece `piece` of K, and to k_scales_ahead its blocks' scales.  Neighboring lanes take
// neighboring keys.  Behind the last key and the last dimension it is the last one again: no row sees that key, and q
// is 0 in that dimension.
void fetch_k(Item item, Leaf leaf, uint piece) {
    [[unroll]] for (uint u = 0u; u < LOADS; ++u) {
        uint i = u * LANES + lane, chunk = piece * (MATRIX_PIECE / CHUNK) + i / KEYS_PER_LEAF;
        uvec2 where = where_of(item, leaf, i % KEYS_PER_LEAF);
        chunk = min(chunk, K_DIM / CHUNK - 1u);
        uvec4 w = k_chunk(where, chunk, 0u, 0u);
        uint fifth = k_block(where, chunk / (BLOCK / CHUNK)).fifth >> chunk * CHUNK % BLOCK;
        k_ahead[u].x = int8s(K_STORAGE, w.x, 0u, fifth);
        k_ahead[u].y = int8s(K_STORAGE, K_BITS == 8u ? w.y : w.x, 4u, fifth >> 4u);
    }
    [[unroll]] for (uint u = 0u; u < K_SCALE_LOADS; ++u) {
        uint i = u * LANES + lane, block = min(piece * PIECE_BLOCKS + i / KEYS_PER_LEAF, K_BLOCKS - 1u);
        k_scales_ahead[u] = k_block(where_of(item, leaf, i % KEYS_PER_LEAF), block).scale;
    }
}

// The same of V: four dimensions of the keys of four neighboring rows.  Neighboring lanes take neighboring dimensions.
const uint PIECE_QUADS = MATRIX_PIECE / 4u;
void fetch_v(Item item, Leaf leaf, uint piece) {
    [[unroll]] for (uint u = 0u; u < V_LOADS; ++u) {
        uint i = u * LANES + lane, dim = min(piece * MATRIX_PIECE + i % PIECE_QUADS * 4u, V_DIM - 4u);
        [[unroll]] for (uint r = 0u; r < 4u; ++r) {
            uvec2 where = where_of(item, leaf, key_of(i / PIECE_QUADS * 4u % KEYS_PER_LEAF + r));
            uint fifth = v_block(where, dim / BLOCK).fifth >> dim % BLOCK;
            v_ahead[u][r] = int8s(V_STORAGE, v_words(where, dim * V_BITS / 32u, 1u).x, dim % 8u, fifth);
        }
    }
}

void fetch_v_scales(Item item, Leaf leaf) {
    [[unroll]] for (uint u = 0u; u < V_SCALE_LOADS; ++u) {
        uint i = u * LANES + lane;
        uvec2 where = where_of(item, leaf, key_of(i % KEYS_PER_LEAF));
        v_scales_ahead[u] = v_block(where, min(i / KEYS_PER_LEAF, V_BLOCKS - 1u)).scale;
    }
}

// From k_ahead to kv_rows, and scales.
void store_k() {
    [[unroll]] for (uint u = 0u; u < LOADS; ++u) {
        uint i = u * LANES + lane, at = row_of(i % KEYS_PER_LEAF) * PITCH + i / KEYS_PER_LEAF * (CHUNK / 4u);
        store(kv_rows[at], k_ahead[u].x);
        store(kv_rows[at + 1u], k_ahead[u].y);
    }
    [[unroll]] for (uint u = 0u; u < K_SCALE_LOADS; ++u) {
        uint i = u * LANES + lane;
        if (i < PIECE_BLOCKS * KEYS_PER_LEAF) {
            store(k_scales[i / KEYS_PER_LEAF * KEYS_PER_LEAF + row_of(i % KEYS_PER_LEAF)], k_scales_ahead[u]);
        }
    }
}

// From v_ahead, [key][dimension], to kv_rows.
void store_v() {
    [[unroll]] for (uint u = 0u; u < V_LOADS; ++u) {
        uint i = u * LANES + lane, at = i % PIECE_QUADS * 4u * PITCH + i / PIECE_QUADS;
        uvec4 w = v_ahead[u];
        uvec2 even = w.xz & 0x00FF00FFu | (w.yw & 0x00FF00FFu) << 8u, odd = w.xz >> 8u & 0x00FF00FFu | w.yw & 0xFF00FF00u;
        if (i < PIECE_QUADS * (KEYS_PER_LEAF / 4u)) {
            store(kv_rows[at], even.x & 0xFFFFu | even.y << 16u);
            store(kv_rows[at + PITCH], odd.x & 0xFFFFu | odd.y << 16u);
            store(kv_rows[at + 2u * PITCH], even.x >> 16u | even.y & 0xFFFF0000u);
            store(kv_rows[at + 3u * PITCH], odd.x >> 16u | odd.y & 0xFFFF0000u);
        }
    }
}

void store_v_scales() {
    [[unroll]] for (uint u = 0u; u < V_SCALE_LOADS; ++u) {
        if (u * LANES + lane < V_BLOCKS * KEYS_PER_LEAF) {
            store(v_scales[u * LANES + lane], v_scales_ahead[u]);
        }
    }
}
