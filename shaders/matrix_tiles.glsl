// What the matrix units are fed with: float16 rows of q, K and V in shared memory, rounded to even, zeros where there is
// nothing (rows behind the item's last vector, keys behind the last one, dimensions behind the last one).

const float HALF_NORMAL = 6.103515625e-05;  // 2**-14: the least number of float16 with all its digits

struct Vector {
    uint row;   // query row
    uint head;  // query head
    bool real;  // false behind the item's last vector
    int first;  // it sees keys [first, limit)
    int limit;
};

// Vector `t` of the workgroup.  From row to row of an item, first and limit grow by its step; the item has the last row's.
Vector vector_at(Item item, uint t) {
    uint group = work[HEADER_GROUP], at = gl_WorkGroupID.z * VECTORS + t, row = min(item.row + at / group, item.last_row);
    int before = int((item.last_row - row) * item.row_step);
    return Vector(row, (work[HEADER_KV_FIRST] + gl_WorkGroupID.y) * group + at % group,
                  at < (item.last_row - item.row + 1u) * group, int(item.first) - before, int(item.limit) - before);
}

// The nearest number of float16, as a float32: half of the numbers between two go to the even one.
float round_to_half(float x) {
    uint bits = floatBitsToUint(abs(x));
    float normal = uintBitsToFloat((bits + 0xFFFu + (bits >> 13 & 1u)) & ~0x1FFFu);
    precise float raised = abs(x) + 0.5;  // below 2**-14 float16 has the steps that float32 has from 1/2 on
    precise float small = raised - 0.5;
    float size = abs(x) < HALF_NORMAL ? small : normal;
    return x < 0.0 ? -size : size;
}

f16vec2 to_half(vec2 x) {
    return f16vec2(round_to_half(x.x), round_to_half(x.y));
}

f16vec4 to_half(vec4 x) {
    return f16vec4(to_half(x.xy), to_half(x.zw));
}

// To q_rows.
void load_q(Item item) {
    uint q_heads = work[HEADER_Q_HEADS];
    for (uint i = lane; i < VECTORS * (K_DIM / 4u); i += LANES) {
        uint t = i / (K_DIM / 4u), at = i % (K_DIM / 4u);
        Vector vector = vector_at(item, t);
        vec4 x = vector.real ? q[(vector.row * q_heads + vector.head) * (K_DIM / 4u) + at] : vec4(0.0);
        q_rows[t * Q_PITCH + at] = to_half(x);
    }
}

// To kv_rows: dimensions 64 piece ... 64 piece + 63 of the leaf's keys.  Neighboring lanes take neighboring keys.
void load_k_piece(Item item, Leaf leaf, uint piece) {
    for (uint i = lane; i < KEYS_PER_LEAF * (PIECE / CHUNK); i += LANES) {
        uint key = i % KEYS_PER_LEAF, part = i / KEYS_PER_LEAF, chunk = piece * (PIECE / CHUNK) + part;
        f16vec4 low = f16vec4(0.0), high = f16vec4(0.0);
        if (key < leaf.count && chunk < K_DIM / CHUNK) {
            uvec2 where = locate(item, leaf, key);
            if (K_STORAGE == STORAGE_F16) {
                uvec4 w = k_chunk(where, chunk, 0u);
                low = f16vec4(unpackFloat2x16(w.x), unpackFloat2x16(w.y));
                high = f16vec4(unpackFloat2x16(w.z), unpackFloat2x16(w.w));
            } else {
                Block block = k_block(where, chunk / (BLOCK / CHUNK));
                vec4 a, b;
                load_k(where, chunk, block, a, b);
                low = to_half(a);
                high = to_half(b);
            }
        }
        kv_rows[key * KV_PITCH + 2u * part] = low;
        kv_rows[key * KV_PITCH + 2u * part + 1u] = high;
    }
}

// Dimensions dim and dim + 1 of a value row.
f16vec2 v_pair(uvec2 where, uint dim) {
    if (V_STORAGE == STORAGE_F16) {
        return unpackFloat2x16(v_words(where, dim / 2u, 1u).x);
    }
    if (V_STORAGE == STORAGE_BF16) {
        return to_half(from_half_words(V_STORAGE, v_words(where, dim / 2u, 1u).x));
    }
    uint values = 32u / V_BITS;  // of a word
    Block block = v_block(where, dim / BLOCK);
    uint word = v_words(where, dim / values, 1u).x;
    return to_half(quantized(V_STORAGE, word, dim % values / 2u, block.fifth >> (dim % BLOCK), block));
}

// The same for V.  Neighboring lanes take neighboring dimensions.
void load_v_piece(Item item, Leaf leaf, uint piece) {
    for (uint i = lane; i < KEYS_PER_LEAF * (PIECE / 4u); i += LANES) {
        uint key = i / (PIECE / 4u), at = i % (PIECE / 4u), dim = piece * PIECE + 4u * at;
        f16vec2 low = f16vec2(0.0), high = f16vec2(0.0);
        if (key < leaf.count) {
            uvec2 where = locate(item, leaf, key);
            if (dim < V_DIM) {
                low = v_pair(where, dim);
            }
            if (dim + 2u < V_DIM) {
                high = v_pair(where, dim + 2u);
            }
        }
        kv_rows[key * KV_PITCH + at] = f16vec4(low, high);
    }
}

// The subgroup's strip and its part of the strip's tiles.  Subgroups from STRIPS * PARTS on have none.
bool has_strip() {
    return gl_SubgroupID < STRIPS * PARTS;
}

uint strip() {
    return gl_SubgroupID / PARTS;
}

uint part_of_strip() {
    return gl_SubgroupID % PARTS;
}
