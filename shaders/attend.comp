// Pass 1 of split-KV (flash decoding) attention: the states of a range of leaves, for the query heads that
// share one KV head.
//
// Grid: x = work item (a query row and a range of leaves), y = KV head, z = chunk of HEADS query heads.
// One workgroup is one wave of 32.  A leaf is 64 keys.  Scores and weights: lane = key, two keys a lane.
// Values: lane = slice of SLICE head dimensions, for all HEADS query heads, so K and V are read once per group.
// LOOP 0: one leaf, one state.  LOOP 1: leaves fold into a state that is emitted per unit (leaf or node).
#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require
#include "contract.glsl"

layout(local_size_x = 32) in;
layout(constant_id = ATTEND_SPEC_HEAD_DIM) const uint HEAD_DIM = 128u;
layout(constant_id = ATTEND_SPEC_HEADS) const uint HEADS = 4u;
const uint SLICE = HEAD_DIM <= 64u ? 2u : (HEAD_DIM <= 128u ? 4u : (HEAD_DIM <= 256u ? 8u : 16u));
const uint PAIRS = SLICE / 2u;
const uint VALUE_LANES = HEAD_DIM / SLICE;  // lanes that own a slice; 20 to 32
const uint KEYS_AHEAD = 4u;                 // value rows in flight

layout(set = 0, binding = ATTEND_BIND_WORK, std430) restrict readonly buffer Work { uint work[]; };
layout(set = 0, binding = ATTEND_BIND_Q, std430) restrict readonly buffer Q { vec4 q[]; };
layout(set = 0, binding = ATTEND_BIND_STATES, std430) restrict writeonly buffer States { float states[]; };
layout(set = 0, binding = ATTEND_BIND_OUT, std430) restrict writeonly buffer Out { float result[]; };
#include "state.glsl"

// Registers of a lane: the leaf's state (m and l of every head, o of the lane's slice), and value rows in flight.
float m[HEADS], l[HEADS];
vec2 o[HEADS * PAIRS];
vec2 v[KEYS_AHEAD * PAIRS];
#if LOOP
float node_m[HEADS], node_l[HEADS];
vec2 node_o[HEADS * PAIRS];
#define RESULT(x) node_##x
#else
#define RESULT(x) x
#endif
#include "kv.glsl"

shared float scores[LEAF * HEADS];  // [key][head]: scores, then weights
shared float parts[HEADS * LANES];  // [head][key mod 4]: partial maxima, then partial weight sums

// Index of this workgroup's query head h; a chunk that is not full repeats the group's last head.
uint query_head(uint h) {
    uint group = work[HEADER_GROUP];
    return gl_WorkGroupID.y * group + min(gl_WorkGroupID.z * HEADS + h, group - 1u);
}

bool is_absent(uint h) {
    return gl_WorkGroupID.z * HEADS + h >= work[HEADER_GROUP];
}

// The tile of a leaf: pages hold page_tiles tiles of every KV head.
uint tile_of(uint leaf, uint page_table) {
    uint shift = work[HEADER_PAGE_SHIFT];
    uint page = work[page_table + (leaf >> shift)];
    return (page * work[HEADER_KV_HEADS] + gl_WorkGroupID.y) * work[HEADER_PAGE_TILES] + (leaf & ((1u << shift) - 1u));
}

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

// Write a state to the scratch tensor, or, where it is a row's only one, the final output and lse.
void emit(uint row, uint state) {
    uint lane = gl_LocalInvocationID.x;
    uint q_heads = work[HEADER_Q_HEADS];
    bool direct = work[HEADER_DIRECT] != 0u;
    uint lse_base = work[HEADER_ROWS] * q_heads * HEAD_DIM;
    uint ml_base = work[HEADER_STATE_STRIDE] * q_heads * HEAD_DIM;
    for (uint h = 0u; h < HEADS; ++h) {
        if (is_absent(h)) {
            break;
        }
        uint slot = (direct ? row : state) * q_heads + query_head(h);
        if (lane < VALUE_LANES) {
            for (uint i = 0u; i < PAIRS; ++i) {
                uint at = slot * HEAD_DIM + lane * SLICE + 2u * i;
                vec2 x = RESULT(o)[h * PAIRS + i];
                if (direct) {
                    x = normalised(x, RESULT(l)[h]);
                    result[at] = x.x;
                    result[at + 1u] = x.y;
                } else {
                    states[at] = x.x;
                    states[at + 1u] = x.y;
                }
            }
        }
        if (lane == 0u) {
            if (direct) {
                result[lse_base + slot] = natural_lse(RESULT(m)[h], RESULT(l)[h]);
            } else {
                states[ml_base + 2u * slot] = RESULT(m)[h];
                states[ml_base + 2u * slot + 1u] = RESULT(l)[h];
            }
        }
    }
}

void main() {
    uint item = HEADER_WORDS + gl_WorkGroupID.x * ITEM_WORDS;
    uint row = work[item + ITEM_ROW];
    uint limit = work[item + ITEM_LIMIT];
    uint leaf = work[item + ITEM_LEAF_BEGIN];
    uint leaf_end = work[item + ITEM_LEAF_END];
    uint state = work[item + ITEM_STATE];
    uint page_table = work[item + ITEM_PAGE_TABLE];
    if (leaf >= leaf_end) {
        return;
    }
#if LOOP
    uint unit_leaves = work[HEADER_UNIT_LEAVES];
    [[dont_unroll]] for (; leaf < leaf_end; ++leaf) {
        attend_leaf(row, tile_of(leaf, page_table), min(limit - leaf * LEAF, LEAF));
        bool first = leaf % unit_leaves == 0u;
        for (uint h = 0u; h < HEADS; ++h) {
            float m_old = first ? EMPTY_M : node_m[h];
            float l_old = first ? 0.0 : node_l[h];
            float top = max(m_old, m[h]);
            float w_old = pow2(m_old - top), w_new = pow2(m[h] - top);
            node_m[h] = top;
            node_l[h] = merge(l_old, w_old, l[h], w_new);
            for (uint i = 0u; i < PAIRS; ++i) {
                vec2 o_old = first ? vec2(0.0) : node_o[h * PAIRS + i];
                node_o[h * PAIRS + i] = merge(o_old, w_old, o[h * PAIRS + i], w_new);
            }
        }
        if ((leaf + 1u) % unit_leaves == 0u || leaf + 1u == leaf_end) {
            emit(row, state);
            ++state;
        }
        barrier();
    }
#else
    attend_leaf(row, tile_of(leaf, page_table), min(limit - leaf * LEAF, LEAF));
    emit(row, state);
#endif
}
