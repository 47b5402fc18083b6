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
layout(constant_id = ATTEND_SPEC_CHUNKS_AHEAD) const uint CHUNKS_AHEAD = 1u;  // chunks of K in flight: 1, 2 or 4
layout(constant_id = ATTEND_SPEC_TILE) const uint TILE = 64u;  // tokens per tile: 64, or the page size if smaller
layout(constant_id = ATTEND_SPEC_SOFTCAP) const uint SOFTCAP = 0u;  // 1: scores are capped
layout(constant_id = ATTEND_SPEC_ROWS_SHARED) const uint ROWS = 1u;  // query rows that share these keys; HEADS counts all of theirs
const uint ROW_HEADS = HEADS / ROWS;
// Passes over V: a lane's sums in one are as many as its registers hold.
const uint SLICE_ALL = HEAD_DIM <= 64u ? 2u : (HEAD_DIM <= 128u ? 4u : (HEAD_DIM <= 256u ? 8u : 16u));
const uint LANE_SUMS = MAX_ACCUMULATORS / WAVE;
const uint VALUE_PASSES = SLICE_ALL * HEADS <= LANE_SUMS ? 1u : (SLICE_ALL * HEADS <= 2u * LANE_SUMS ? 2u : 4u);
const uint SLICE = SLICE_ALL / VALUE_PASSES;
const uint PAIRS = SLICE / 2u;
const uint VALUE_LANES = HEAD_DIM / (SLICE * VALUE_PASSES);  // lanes that own a slice; 20 to 32
#if defined(KV_F32)
const uint V_WORDS_ALL = SLICE;  // words of a lane's slice of a value row
#elif defined(KV_Q8_0)
const uint V_WORDS_ALL = SLICE <= 4u ? 1u : SLICE / 4u;  // where SLICE is 2, two lanes share one
#else
const uint V_WORDS_ALL = PAIRS;
#endif
const uint V_WORDS = V_WORDS_ALL <= 4u ? V_WORDS_ALL : 4u;  // per load
const uint V_LOADS = V_WORDS_ALL / V_WORDS;
// Value rows in flight.  On a GPU as many as leave registers for 12 waves per SIMD (single) or 9 (loop); a CPU has no
// use for them (CHUNKS_AHEAD is 1 there).
#if LOOP
const uint GPU_KEYS_AHEAD = SLICE <= 4u ? 8u : (SLICE * HEADS > 48u || V_LOADS > 1u ? 2u : 4u);
const uint CPU_KEYS_AHEAD = SLICE <= 4u ? 4u : 2u;
#else
const uint GPU_KEYS_AHEAD = V_LOADS == 1u ? 8u : (V_LOADS == 2u ? 4u : 2u);
const uint CPU_KEYS_AHEAD = V_LOADS == 1u ? 4u : 2u;
#endif
const uint KEYS_AHEAD = CHUNKS_AHEAD > 1u ? GPU_KEYS_AHEAD : CPU_KEYS_AHEAD;

layout(set = 0, binding = ATTEND_BIND_WORK, std430) restrict readonly buffer Work { uint work[]; };
layout(set = 0, binding = ATTEND_BIND_Q, std430) restrict readonly buffer Q { vec4 q[]; };
layout(set = 0, binding = ATTEND_BIND_STATES, std430) restrict buffer States { float states[]; };
layout(set = 0, binding = ATTEND_BIND_OUT, std430) restrict writeonly buffer Out { float result[]; };

// First query head of this workgroup.  The last chunk of a group begins early enough to be full; its first
// repeated_heads() heads are the previous chunk's, which writes them.
uint first_head() {
    uint group = work[HEADER_GROUP];
    return (work[HEADER_KV_FIRST] + gl_WorkGroupID.y) * group + min(gl_WorkGroupID.z * HEADS, group - HEADS);
}

uint repeated_heads() {
    return max(gl_WorkGroupID.z * HEADS + HEADS, work[HEADER_GROUP]) - work[HEADER_GROUP];
}

// Query row and head of the workgroup's vector h.  Rows behind an item's last repeat it; nobody writes them.
uvec2 vector_of(uint row, uint last_row, uint h) {
    if (ROWS == 1u) {
        return uvec2(row, first_head() + h);
    }
    return uvec2(min(row + h / ROW_HEADS, last_row), first_head() + h % ROW_HEADS);
}

#include "state.glsl"
#include "softcap.glsl"
#include "leaf.glsl"
#include "emit.glsl"

void main() {
    uint item = HEADER_WORDS + gl_WorkGroupID.x * ITEM_WORDS;
    uint row = work[item + ITEM_ROW], limit = work[item + ITEM_LIMIT];
    uint index = work[item + ITEM_LEAF_BEGIN], end = work[item + ITEM_LEAF_END];
    uint first_key = work[item + ITEM_FIRST], unit_leaves = work[item + ITEM_UNIT_LEAVES];
    uint last_row = row + work[item + ITEM_ROWS] - 1u;
    Leaf leaf = Leaf(index, 0u, 0u, row, last_row, work[item + ITEM_PAGE_TABLE], work[item + ITEM_FRESH_BEGIN], work[item + ITEM_FRESH_ROW]);
    if (index >= end) {
        return;
    }
#if LOOP
    uint begin = index;
    [[dont_unroll]] for (; index < end; ++index) {
        leaf.index = index;
        leaf.begin = max(first_key, index * LEAF) - index * LEAF;
        leaf.count = min(limit - index * LEAF, LEAF);
        leaf_weights(leaf);
        bool first = index == begin || (index & (unit_leaves - 1u)) == 0u;
        all_values(leaf, unit_leaves, first);
        leaf_sums();
        for (uint h = 0u; h < HEADS; ++h) {
            float m_old = first ? EMPTY_M : node_m[h];
            float l_old = first ? 0.0 : node_l[h];
            vec2 w = merge_weights(m_old, m[h]);
            node_m[h] = max(m_old, m[h]);
            node_l[h] = merge(l_old, w.x, l[h], w.y);
            for (uint i = 0u; VALUE_PASSES == 1u && i < PAIRS; ++i) {
                vec2 o_old = first ? vec2(0.0) : node_o[h * PAIRS + i];
                node_o[h * PAIRS + i] = merge(o_old, w.x, o[h * PAIRS + i], w.y);
            }
        }
        if (((index + 1u) & (unit_leaves - 1u)) == 0u || index + 1u == end) {
            emit(row, last_row, index, unit_leaves);
        }
        barrier();
    }
#else
    leaf.begin = max(first_key, index * LEAF) - index * LEAF;
    leaf.count = min(limit - index * LEAF, LEAF);
    leaf_weights(leaf);
    all_values(leaf, unit_leaves, true);
    leaf_sums();
    emit(row, last_row, index, unit_leaves);
#endif
}
