// The state of one leaf: 64 keys, for the HEADS query heads that share their KV head.
//
// Scores and weights: lane = key, two keys a lane.  Values: lane = slice of SLICE head dimensions of all HEADS
// query heads, so that K and V are read once per group.  LDS holds only weights and a small reduction.

// Registers of a lane: the leaf's state (m and l of every head, o of the lane's slice), and value rows in flight.
// They are globals because glslang 12 does not reliably pass arrays sized by a specialisation constant.
float m[HEADS], l[HEADS];
vec2 o[HEADS * PAIRS];
vec2 v[KEYS_AHEAD * PAIRS];
#include "kv.glsl"

shared float scores[LEAF * HEADS];  // [key][head]: scores, then weights
shared float parts[HEADS * LANES];  // [head][key mod 4]: partial maxima, then partial weight sums

float chunk_dot(vec4 qa, vec4 qb, vec4 ka, vec4 kb) {
    precise vec4 a = qa * ka;
    precise vec4 b = qb * kb;
    precise float sum = a.x + a.y;
    sum = sum + a.z;
    sum = sum + a.w;
    sum = sum + b.x;
    sum = sum + b.y;
    sum = sum + b.z;
    sum = sum + b.w;
    return sum;
}

// The state of the first `count` keys of a leaf, to m, l and o.
void attend_leaf(uint row, uint tile, uint count) {
    barrier();
    uint lane = gl_LocalInvocationID.x;
    vec2 dots[HEADS];
    for (uint h = 0u; h < HEADS; ++h) {
        dots[h] = vec2(0.0);
    }
    uint row_base = row * work[HEADER_Q_HEADS];
    [[dont_unroll]] for (uint c = 0u; c < HEAD_DIM / CHUNK; ++c) {
        vec4 k0a, k0b, k1a, k1b;
        load_k(tile, c, lane, k0a, k0b);
        load_k(tile, c, lane + WAVE, k1a, k1b);
        for (uint h = 0u; h < HEADS; ++h) {
            uint at = (row_base + query_head(h)) * (HEAD_DIM / 4u) + 2u * c;
            vec4 qa = q[at], qb = q[at + 1u];
            precise vec2 sum = dots[h] + vec2(chunk_dot(qa, qb, k0a, k0b), chunk_dot(qa, qb, k1a, k1b));
            dots[h] = sum;
        }
    }

    float scale = uintBitsToFloat(work[HEADER_SCORE_SCALE]);
    bvec2 present = bvec2(lane < count, lane + WAVE < count);
    for (uint h = 0u; h < HEADS; ++h) {
        precise vec2 s = dots[h] * scale;
        dots[h] = mix(vec2(EMPTY_M), s, present);
        scores[lane * HEADS + h] = dots[h].x;
        scores[(lane + WAVE) * HEADS + h] = dots[h].y;
    }
    barrier();
    uint part_head = lane / LANES, part_key = lane % LANES;
    if (part_head < HEADS) {
        float top = EMPTY_M;
        for (uint t = part_key; t < LEAF; t += LANES) {
            top = max(top, scores[t * HEADS + part_head]);
        }
        parts[lane] = top;
    }
    barrier();
    for (uint h = 0u; h < HEADS; ++h) {
        float top = max(max(parts[h * LANES], parts[h * LANES + 1u]), max(parts[h * LANES + 2u], parts[h * LANES + 3u]));
        m[h] = roundEven(top);
        scores[lane * HEADS + h] = present.x ? weight(dots[h].x, m[h]) : 0.0;
        scores[(lane + WAVE) * HEADS + h] = present.y ? weight(dots[h].y, m[h]) : 0.0;
    }
    barrier();
    if (part_head < HEADS) {
        precise float sum = 0.0;
        for (uint t = part_key; t < LEAF; t += LANES) {
            sum = sum + scores[t * HEADS + part_head];
        }
        parts[lane] = sum;
    }

    for (uint i = 0u; i < HEADS * PAIRS; ++i) {
        o[i] = vec2(0.0);
    }
    if (lane < VALUE_LANES) {
        // Behind the last key the weight is 0 and the last row is read again: adding 0 changes nothing, and no
        // row that was never written (it may hold NaN) is touched.
        [[dont_unroll]] for (uint t = 0u; t < count; t += KEYS_AHEAD) {
            for (uint j = 0u; j < KEYS_AHEAD; ++j) {
                load_v(tile, min(t + j, count - 1u), lane, j * PAIRS);
            }
            for (uint j = 0u; j < KEYS_AHEAD; ++j) {
                for (uint h = 0u; h < HEADS; ++h) {
                    float p = scores[(t + j) * HEADS + h];
                    for (uint i = 0u; i < PAIRS; ++i) {
                        precise vec2 pv = v[j * PAIRS + i] * p;
                        precise vec2 sum = o[h * PAIRS + i] + pv;
                        o[h * PAIRS + i] = sum;
                    }
                }
            }
        }
    }
    barrier();
    for (uint h = 0u; h < HEADS; ++h) {
        precise float c01 = parts[h * LANES] + parts[h * LANES + 1u];
        precise float c23 = parts[h * LANES + 2u] + parts[h * LANES + 3u];
        precise float sum = c01 + c23;
        l[h] = sum;
        for (uint i = 0u; i < PAIRS; ++i) {
            o[h * PAIRS + i] = flush(o[h * PAIRS + i]);
        }
    }
}

