// The state of one leaf: 64 keys, for the HEADS query heads that share their KV head.
//
// Scores and weights: lane = key, two keys a lane.  Values: lane = slice of SLICE head dimensions of all HEADS
// query heads, so that K and V are read once per group.  Where their sums are more than the registers hold, in
// VALUE_PASSES: a pass takes its part of every value row.  LDS holds only weights and a small reduction.
//
// A leaf is leaf_weights, leaf_values for every pass, leaf_sums; m is known after the first, o of a pass after it, l at
// the end.

// Registers of a lane: the leaf's state (m and l of every head, o of the lane's slice in the present pass).
// They are globals because glslang 12 does not reliably pass arrays sized by a specialisation constant.
float m[HEADS], l[HEADS];
vec2 o[HEADS * PAIRS];

struct Leaf {
    uint index;        // keys 64 index ... 64 index + 63
    uint begin;        // of these, keys [begin, count) are seen
    uint count;
    uint row;          // the query row; where ROWS > 1 the first of them
    uint last_row;
    uint page_table;   // word of the sequence's page table
    uint fresh_begin;  // FRESH: tokens from here on are in the uploaded rows, the first of them in row fresh_row
    uint fresh_row;
};
#include "kv.glsl"

// [key][head]: scores, then weights; in between, [head][key mod 4]: partial maxima, partial weight sums.
// One array for both: 2 KiB at 8 heads, so that LDS does not limit the waves per SIMD before the registers do.
shared float scores[LEAF * HEADS];
const uint PARTS = (HEADS * LANES + WAVE - 1u) / WAVE;  // [head][key mod 4] pairs that a lane reduces
float parts[PARTS];

// The dots of one chunk of a query head with two keys.  A pair of steps has one scalar operand and so issues at once.
vec2 chunk_dots(vec4 qa, vec4 qb, vec4 k0a, vec4 k0b, vec4 k1a, vec4 k1b) {
    precise vec2 sum = qa.x * vec2(k0a.x, k1a.x);
    precise vec2 a1 = qa.y * vec2(k0a.y, k1a.y), a2 = qa.z * vec2(k0a.z, k1a.z), a3 = qa.w * vec2(k0a.w, k1a.w);
    sum = sum + a1;
    sum = sum + a2;
    sum = sum + a3;
    precise vec2 b0 = qb.x * vec2(k0b.x, k1b.x), b1 = qb.y * vec2(k0b.y, k1b.y);
    precise vec2 b2 = qb.z * vec2(k0b.z, k1b.z), b3 = qb.w * vec2(k0b.w, k1b.w);
    sum = sum + b0;
    sum = sum + b1;
    sum = sum + b2;
    sum = sum + b3;
    return sum;
}

#include "values.glsl"

// To scores, m and parts: a leaf's weights, their m, and partial sums of them.
void leaf_weights(Leaf leaf) {
    barrier();
    uint lane = gl_LocalInvocationID.x, count = leaf.count;
    // Absent keys read a place that exists: their slot of the tile, or, in small tiles and fresh rows, the last key's.
    uint last = TILE == LEAF && FRESH == 0 ? LEAF - 1u : max(count, 1u) - 1u;
    uvec2 key0 = locate(leaf, min(lane, last)), key1 = locate(leaf, min(lane + WAVE, last));
    vec2 dots[HEADS];
    for (uint h = 0u; h < HEADS; ++h) {
        dots[h] = vec2(0.0);
    }
    uint q_heads = work[HEADER_Q_HEADS];
    [[dont_unroll]] for (uint c = 0u; c < HEAD_DIM / CHUNK; c += CHUNKS_AHEAD) {
        vec4 k0a[CHUNKS_AHEAD], k0b[CHUNKS_AHEAD], k1a[CHUNKS_AHEAD], k1b[CHUNKS_AHEAD];
        for (uint j = 0u; j < CHUNKS_AHEAD; ++j) {
            load_k(key0, c + j, k0a[j], k0b[j]);
            load_k(key1, c + j, k1a[j], k1b[j]);
        }
        for (uint h = 0u; h < HEADS; ++h) {
            uvec2 vector = vector_of(leaf.row, leaf.last_row, h);
            for (uint j = 0u; j < CHUNKS_AHEAD; ++j) {
                uint at = (vector.x * q_heads + vector.y) * (HEAD_DIM / 4u) + 2u * (c + j);
                vec4 qa = q[at], qb = q[at + 1u];
                precise vec2 sum = dots[h] + chunk_dots(qa, qb, k0a[j], k0b[j], k1a[j], k1b[j]);
                dots[h] = sum;
            }
        }
    }

    float scale = uintBitsToFloat(work[HEADER_SCORE_SCALE]);
    bvec2 present = bvec2(lane >= leaf.begin && lane < count, lane + WAVE >= leaf.begin && lane + WAVE < count);
    for (uint h = 0u; h < HEADS; ++h) {
        precise vec2 s = dots[h] * scale;
        if (SOFTCAP != 0u) {
            s = vec2(soft_capped(s.x), soft_capped(s.y));
        }
        dots[h] = mix(vec2(EMPTY_M), s, present);
    }
    for (uint h = 0u; h < HEADS; ++h) {
        scores[lane * HEADS + h] = dots[h].x;
        scores[(lane + WAVE) * HEADS + h] = dots[h].y;
    }
    barrier();
    uint part_key = lane % LANES;
    for (uint g = 0u; g < PARTS; ++g) {
        uint head = min(g * (WAVE / LANES) + lane / LANES, HEADS - 1u);
        parts[g] = EMPTY_M;
        for (uint t = 0u; t < LEAF; t += LANES) {
            parts[g] = max(parts[g], scores[(t + part_key) * HEADS + head]);
        }
    }
    barrier();
    for (uint g = 0u; g < PARTS; ++g) {
        scores[g * WAVE + lane] = parts[g];
    }
    barrier();
    for (uint h = 0u; h < HEADS; ++h) {
        float top = max(max(scores[h * LANES], scores[h * LANES + 1u]), max(scores[h * LANES + 2u], scores[h * LANES + 3u]));
        m[h] = roundEven(top);
    }
    barrier();
    for (uint h = 0u; h < HEADS; ++h) {
        dots[h] = mix(vec2(0.0), vec2(weight(dots[h].x, m[h]), weight(dots[h].y, m[h])), present);
    }
    for (uint h = 0u; h < HEADS; ++h) {
        scores[lane * HEADS + h] = dots[h].x;
        scores[(lane + WAVE) * HEADS + h] = dots[h].y;
    }
    barrier();
    for (uint g = 0u; g < PARTS; ++g) {
        uint head = min(g * (WAVE / LANES) + lane / LANES, HEADS - 1u);
        precise float sum = 0.0;
        for (uint t = 0u; t < LEAF; t += LANES) {
            sum = sum + scores[(t + part_key) * HEADS + head];
        }
        parts[g] = sum;
    }
}

// To o: slice `slice` of the leaf's weighted value rows.  Lanes from VALUE_LANES on have none.
void leaf_values(Leaf leaf, uint slice) {
    uint count = leaf.count;
    for (uint i = 0u; i < HEADS * PAIRS; ++i) {
        o[i] = vec2(0.0);
    }
    if (gl_LocalInvocationID.x < VALUE_LANES && count > 0u) {
        // Behind the last key the weight is 0 and the last row is read again: adding 0 changes nothing, and no
        // row that was never written (it may hold NaN) is touched.  Rows before a window's first key hold numbers.
        uint t = leaf.begin & ~(KEYS_AHEAD - 1u);
        [[dont_unroll]] do {
            for (uint j = 0u; j < KEYS_AHEAD; ++j) {
                load_v(locate(leaf, min(t + j, count - 1u)), slice, j);
            }
            add_rows(slice, 0u, t);
            if (KEYS_AHEAD > 4u) {
                add_rows(slice, 4u, t + 4u);
            }
            t += KEYS_AHEAD;
        } while (t < count);
    }
    for (uint i = 0u; i < HEADS * PAIRS; ++i) {
        o[i] = flush(o[i]);
    }
}

// To l: the sum of the leaf's weights.  They are gone afterwards.
void leaf_sums() {
    barrier();
    for (uint g = 0u; g < PARTS; ++g) {
        scores[g * WAVE + gl_LocalInvocationID.x] = parts[g];
    }
    barrier();
    for (uint h = 0u; h < HEADS; ++h) {
        precise float c01 = scores[h * LANES] + scores[h * LANES + 1u];
        precise float c23 = scores[h * LANES + 2u] + scores[h * LANES + 3u];
        precise float sum = c01 + c23;
        l[h] = sum;
    }
}

