// Pass 1 of split-KV attention (flash decoding): the states (m, l, o) of a range of leaves, for the query heads that
// share one KV head.
//
// Grid: x = work item (query row and range of leaves), y = KV head, z = chunk of the KV head's query heads.  A wave is
// 32 invocations, or fewer on some CPU devices, a leaf 64 keys, a node eight leaves.  A query vector is a row of one
// query head; h counts those of a workgroup.  The source is compiled three times:
//
//     single      one wave, one leaf, straight line
//     NODE        eight waves, a leaf of one node each, straight line; then the waves fold their leaves into the node
//     LOOP        one wave, any range of leaves, one after another
//
// What a wave does for each of its leaves:
//
//     scores    s[key][h] = scale * (q[h] . k[key])                      lane = key, two per lane (or four, or eight)
//     weights   m[h] = roundEven(max over the leaf's keys of s[key][h])
//               p[key][h] = 2**(s[key][h] - m[h]), 0 for absent keys     to shared memory, partly summed
//     values    o[h] = sum over the leaf's keys of p[key][h] * v[key]    lane = slice of head dimensions (or several)
//               l[h] = sum over the leaf's keys of p[key][h]
//     fold      node = merge(node, (m, l, o)), leaves ascending            NODE, LOOP
//     emit      the state of each unit, a leaf or a node, when it is complete
//
// All query vectors of a workgroup use a row of K or V when it is loaded, so that K and V are read once.  If their value
// sums are more than the registers hold, the third step makes several passes over V, each for a part of every row.
#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_KHR_shader_subgroup_basic : require
#extension GL_EXT_control_flow_attributes : require
#include "contract.glsl"

#if NODE
const uint MEMBERS = LEAVES_PER_NODE;  // waves of a workgroup
layout(local_size_x = 32, local_size_y = MEMBERS) in;
uint member;  // the wave's number in its workgroup
uint own;     // where the wave's part of `weights` begins
const uint LANES = WAVE;
#else
const uint MEMBERS = 1u;
const uint own = 0u;
layout(local_size_x_id = ATTEND_SPEC_WAVE_SIZE, local_size_x = 32) in;
const uint LANES = gl_WorkGroupSize.x;  // of a wave: 32, 16 or 8
#endif
uint lane;  // the invocation's number in its wave
layout(constant_id = ATTEND_SPEC_K_DIM) const uint K_DIM = 128u;  // of q and K, a multiple of 16
layout(constant_id = ATTEND_SPEC_V_DIM) const uint V_DIM = 128u;  // of V and the output, whole slices of a lane
layout(constant_id = ATTEND_SPEC_LATENT) const uint LATENT = 0u;  // 1: V is the first V_DIM dimensions of K
layout(constant_id = ATTEND_SPEC_VECTORS) const uint VECTORS = 4u;  // query vectors of a workgroup
layout(constant_id = ATTEND_SPEC_CHUNKS_AHEAD) const uint CHUNKS_AHEAD = 1u;  // chunks of K in flight: 1, 2 or 4
layout(constant_id = ATTEND_SPEC_TILE) const uint TILE = 64u;  // tokens per tile: 64, or the page size if smaller
layout(constant_id = ATTEND_SPEC_SOFTCAP) const uint SOFTCAP = 0u;  // 1: scores are capped
layout(constant_id = ATTEND_SPEC_ALIBI) const uint ALIBI = 0u;  // 1: scores have a bias by distance
layout(constant_id = ATTEND_SPEC_MASK) const uint MASK = 0u;  // 1: scores have a bias by row and key, which can hide keys
layout(constant_id = ATTEND_SPEC_ROWS_SHARED) const uint ROWS = 1u;  // query rows that share these keys
layout(constant_id = ATTEND_SPEC_K_STORAGE) const uint K_STORAGE = STORAGE_F32;  // type of K
layout(constant_id = ATTEND_SPEC_V_STORAGE) const uint V_STORAGE = STORAGE_F32;  // type of V; a latent shape's is K's
layout(constant_id = ATTEND_SPEC_FUSED) const uint FUSED = 0u;  // arithmetic "fused": see multiply_add.glsl
#include "attend_sizes.glsl"

layout(set = 0, binding = ATTEND_BIND_WORK, std430) restrict readonly buffer Work { uint work[]; };
layout(set = 0, binding = ATTEND_BIND_Q, std430) restrict readonly buffer Q { vec4 q[]; };
layout(set = 0, binding = ATTEND_BIND_STATES, std430) restrict buffer States { float states[]; };
layout(set = 0, binding = ATTEND_BIND_OUT, std430) restrict writeonly buffer Out { float result[]; };

// What the steps hand on.  These arrays are global because glslang 12 does not reliably pass arrays sized by a
// specialization constant; each step says which of them it reads and writes.  All but the last are a lane's registers.
const uint KEY_PAIRS = KEYS_PER_LEAF / LANES / 2u;  // of a lane: keys lane and lane + LANES, then the next two
const uint LANE_SLICES = LANES == WAVE ? 1u : VALUE_LANES / LANES;  // of a lane: slice lane, lane + LANES, ...
const uint LANE_PAIRS = LANE_SLICES * PAIRS;
const uint PARTS = (VECTORS * WEIGHT_PARTIALS + LANES - 1u) / LANES;  // pairs [h][key mod 4] that a lane reduces
vec2 dots[VECTORS * KEY_PAIRS];  // [h][pair] of the lane's keys: scores
float parts[PARTS];            // sums of the weights of the lane's pairs
float m[VECTORS];                // the leaf's state, the same in every lane ...
float l[VECTORS];
vec2 o[VECTORS * LANE_PAIRS];    // ... and [h][pair] of the lane's slices of o
#if LOOP
float node_m[VECTORS];           // the unit's state so far
float node_l[VECTORS];
vec2 node_o[VECTORS * LANE_PAIRS];  // unused with several passes over V: it is in the scratch tensor then
#endif
// Of each wave [key][h]: weights.  In between, [h][key mod 4]: partial maxima and sums.  At the end of NODE, pairs
// of o.  One array serves all (2 KiB a wave for 8 vectors), so that shared memory does not limit the waves per SIMD
// before the registers do.
const uint WAVE_WEIGHTS = KEYS_PER_LEAF * VECTORS;
shared float weights[MEMBERS * WAVE_WEIGHTS];

const bool CPU = CHUNKS_AHEAD == 1u;  // a CPU device: none else has a single chunk of K in flight
#include "state.glsl"
#include "multiply_add.glsl"
#include "item.glsl"
#include "cache.glsl"
#include "storage.glsl"
#include "masked.glsl"
#include "scores.glsl"
#include "weights.glsl"
#include "values.glsl"
#include "emit.glsl"
#if NODE
#include "node.glsl"
#else
// To lane.  lavapipe, the one driver with smaller waves, makes gl_LocalInvocationID by a division for each use, but its
// subgroups, all of them full, have their numbers at hand.
void find_place() {
    lane = gl_LocalInvocationID.x;
    if (LANES < WAVE && gl_SubgroupSize <= LANES) {
        lane = (gl_SubgroupID * gl_SubgroupSize + gl_SubgroupInvocationID) % LANES;
    }
}
#endif

void main() {
    Item item = read_item();
    if (item.leaf_begin >= item.leaf_end) {
        return;
    }
    find_head_scales();
    find_place();
#if NODE
    Leaf leaf = leaf_of_member(item);
    find_scores(item, leaf);
    find_weights(leaf);
    find_values(item, leaf, true);
    sum_weights();
    fold_members();
    if (member < VECTORS) {
        emit_vector(item, item.leaf_begin, member, 0u);
    }
#elif LOOP
    [[dont_unroll]] for (uint index = item.leaf_begin; index < item.leaf_end; ++index) {
        Leaf leaf = leaf_of(item, index);
        find_scores(item, leaf);
        find_weights(leaf);
        bool first = index == item.leaf_begin || (index & (item.leaves_per_state - 1u)) == 0u;  // leaf of its unit
        find_values(item, leaf, first);
        sum_weights();
        merge_into_node(first);
        if (((index + 1u) & (item.leaves_per_state - 1u)) == 0u || index + 1u == item.leaf_end) {
            emit(item, index);
        }
        barrier();
    }
#else
    Leaf leaf = leaf_of(item, item.leaf_begin);
    find_scores(item, leaf);
    find_weights(leaf);
    find_values(item, leaf, true);
    sum_weights();
    emit(item, item.leaf_begin);
#endif
}
