// Inputs of the matrix units in shared memory: K and V as int8.

// Four values as int8: a word of a type of 8 bits, or, of the eight values in a word of a type of 4 bits, the four from
// number i, 0 or 4, on. fifth: the fifth bits of these four, from bit 0 on.
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
    return locate(item, leaf, min(key, leaf.end - 1u));
}

// To k_ahead: the lane's chunks of piece `piece` of K; to k_scales_ahead: the scales of the piece's blocks. Neighboring
// lanes take neighboring keys. After the last key and the last dimension the lane loads the last one again: no row sees
// that key, and q is 0 in that dimension.
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

// To v_ahead: four dimensions of V for the keys of four neighboring rows. Neighboring lanes have neighboring
// dimensions.
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

// To kv_rows, from k_ahead; to reduced, from k_scales_ahead.
void store_k() {
    [[unroll]] for (uint u = 0u; u < LOADS; ++u) {
        uint i = u * LANES + lane, word = row_of(i % KEYS_PER_LEAF) * PITCH + i / KEYS_PER_LEAF * (CHUNK / 4u);
        store(kv_rows[word], k_ahead[u].x);
        store(kv_rows[word + 1u], k_ahead[u].y);
    }
    [[unroll]] for (uint u = 0u; u < K_SCALE_LOADS; ++u) {
        uint i = u * LANES + lane;
        if (i < PIECE_BLOCKS * KEYS_PER_LEAF) {
            store(reduced[i / KEYS_PER_LEAF * KEYS_PER_LEAF + row_of(i % KEYS_PER_LEAF)], k_scales_ahead[u]);
        }
    }
}

// To kv_rows, from v_ahead, which is [key][dimension].
void store_v() {
    [[unroll]] for (uint u = 0u; u < V_LOADS; ++u) {
        uint i = u * LANES + lane, word = i % PIECE_QUADS * 4u * PITCH + i / PIECE_QUADS;
        uvec4 w = v_ahead[u];
        uvec2 even = w.xz & 0x00FF00FFu | (w.yw & 0x00FF00FFu) << 8u;
        uvec2 odd = w.xz >> 8u & 0x00FF00FFu | w.yw & 0xFF00FF00u;
        if (i < PIECE_QUADS * (KEYS_PER_LEAF / 4u)) {
            store(kv_rows[word], even.x & 0xFFFFu | even.y << 16u);
            store(kv_rows[word + PITCH], odd.x & 0xFFFFu | odd.y << 16u);
            store(kv_rows[word + 2u * PITCH], even.x >> 16u | even.y & 0xFFFF0000u);
            store(kv_rows[word + 3u * PITCH], odd.x >> 16u | odd.y & 0xFFFF0000u);
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
