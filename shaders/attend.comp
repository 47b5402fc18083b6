// Pass 1 of split-KV attention (flash decoding): the states (m, l, o) of a range of leaves, for the query heads that
// share one KV head.
//
// Grid: x = work item (query row and range of leaves), y = KV head, z = share of the KV head's query heads.  A leaf is
// 64 keys, a node eight leaves, and a unit is what gets a state: a leaf or a node, as the item says.  A query vector is
// a row of one query head; h is its number in the workgroup (ROWS 1: heads of one row).  All use a row of K or V when
// it is loaded, so that K and V are read once.
//
// What a wave does for each of its leaves; the includes before `main` have these numbers:
//     1 scores  s[key][h] = scale * (q[h] . k[key])                      lane = keys: lane, lane + LANES
//               q, K -> dots (registers)
//     2 weights m[h] = roundEven(max over the leaf's keys of s[key][h])  lane = (h, key mod 4)
//               p[key][h] = 2**(s[key][h] - m[h]), 0 for absent keys     lane = keys
//               dots -> m (registers), weights (shared memory), parts (partial sums of weights)
//     3 values  o[h] = sum over the leaf's keys of p[key][h] * v[key]    lane = slice of head dimensions
//               weights, V -> o (registers)
//               l[h] = sum over the leaf's keys of p[key][h]             NODE: first, for 4
//               parts -> l
//     4 fold    unit = merge(unit, (m, l, o)), leaves ascending          NODE, LOOP
//     5 emit    the unit's state, when it is complete, or the output     m, l, o -> states, or result
//
// The source is compiled three times: *single* (one wave, one leaf, straight line), NODE (eight waves, each with a leaf
// of the same node, then the waves fold their leaves) and LOOP (one wave, any range of leaves, one after another).
//
// A first reading can do with item, scores, weights, values and emit, of LOOP with float16 in tiles, ROWS 1, FUSED 0,
// 32 LANES and VALUE_PASSES 1.  Of the other files it is enough to know:
//
//     contract, attend_sizes    numbers: the words of the work buffer, and sizes
//     chunks        key_of, present: the lane's keys, and which the row sees; k0a ... k1b, qa, qb: chunks in use
//     bias          scores_of: from dot products to scores (scale, softcap, ALiBi, masks)
//     cache, rows, storage, masked    locate: where a key lies; load_k: its floats; v_words: V's words; doubled: on a
//                   GPU float16 values come twice as large, which weights make good
//     state         merge_powers, merge, weight, normalize, natural_lse: states (m, l, o); m is whole: exact powers
//     multiply_add  a * b + c
//     passes        find_values: sum_slices, in several passes where value sums are more than registers hold
//     place, node   find_place; NODE: steps 3 (l) to 5, where m, l, o are those of the vectors that the wave folds
//
// Sizes, and what they are on a GPU for 16 query heads, 2 KV heads and head_dim 256 in float16, in LOOP:
//
//     LANES            32  invocations of a wave; fewer on some CPU devices
//     MEMBERS           1  waves of a workgroup; 8 in NODE
//     VECTORS           8  query vectors of a workgroup
//     CHUNKS_AHEAD      4  step 1: chunks of K, 8 dimensions each, that a lane has in flight of each of its keys
//     KEY_PAIRS         1  pairs of keys of a lane
//     PARTS             1  step 2: pairs (h, key mod 4) of which a lane finds maxima and sums
//     VALUE_PASSES      1  step 3: passes over V
//     SLICE             8  head dimensions of a slice, which is a lane's part of a value row in one pass ...
//     PAIRS             4  ... and pairs of them
//     VALUE_LANES      32  slices of a pass, a lane each, unless LANES is less
//     LANE_SLICES       1  slices of a lane; more in a wave of fewer lanes
//     SLICE_LOADS       1  loads of a slice
//     KEYS_AHEAD        2  value rows in flight
#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_KHR_shader_subgroup_basic : require
#extension GL_EXT_control_flow_attributes : require
#include "contract.glsl"

#if NODE
const uint MEMBERS = LEAVES_PER_NODE, LANES = WAVE;
layout(local_size_x = 32, local_size_y = MEMBERS) in;
uint member;  // the wave's number in its workgroup
uint own;     // where the wave's part of `weights` begins
#else
layout(local_size_x_id = ATTEND_SPEC_WAVE_SIZE, local_size_x = 32) in;
const uint MEMBERS = 1u, LANES = gl_WorkGroupSize.x;  // 32, 16 or 8
const uint own = 0u;
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
layout(constant_id = ATTEND_SPEC_MASK) const uint MASK = 0u;  // 1: scores have a bias by row and key; 2: times a slope
layout(constant_id = ATTEND_SPEC_ROWS_SHARED) const uint ROWS = 1u;  // query rows that share these keys
layout(constant_id = ATTEND_SPEC_K_STORAGE) const uint K_STORAGE = STORAGE_F32;  // type of K
layout(constant_id = ATTEND_SPEC_V_STORAGE) const uint V_STORAGE = STORAGE_F32;  // type of V; a latent shape's is K's
layout(constant_id = ATTEND_SPEC_FUSED) const uint FUSED = 0u;  // arithmetic "fused": see multiply_add.glsl
layout(constant_id = ATTEND_SPEC_K_SIZE) const uint K_SIZE = 128u;  // of K_DIM, dimensions that rows have
layout(constant_id = ATTEND_SPEC_V_SIZE) const uint V_SIZE = 128u;  // of V_DIM
layout(constant_id = ATTEND_SPEC_K_STRIDE) const uint K_STRIDE = 0u;  // bytes from row to row; 0: K lies in tiles
layout(constant_id = ATTEND_SPEC_V_STRIDE) const uint V_STRIDE = 0u;  // of V
#include "attend_sizes.glsl"

layout(set = 0, binding = ATTEND_BIND_WORK, std430) restrict readonly buffer Work { uint work[]; };
layout(set = 0, binding = ATTEND_BIND_Q, std430) restrict readonly buffer Q { vec4 q[]; };
layout(set = 0, binding = ATTEND_BIND_STATES, std430) restrict buffer States { float states[]; };
layout(set = 0, binding = ATTEND_BIND_OUT, std430) restrict writeonly buffer Out { float result[]; };

// What the steps hand on.  These arrays are global because glslang 12 does not reliably pass arrays sized by a
// specialization constant; "To x" above a function says that it writes x.  All but `weights` are a lane's registers.
const uint KEY_PAIRS = KEYS_PER_LEAF / LANES / 2u;  // keys lane and lane + LANES, then the next two
const uint LANE_SLICES = LANES == WAVE ? 1u : VALUE_LANES / LANES;  // slices lane, lane + LANES, ...
const uint LANE_PAIRS = LANE_SLICES * PAIRS;  // of dimensions, in all of them
const uint PARTS = (VECTORS * WEIGHT_PARTIALS + LANES - 1u) / LANES;
vec2 dots[VECTORS * KEY_PAIRS];  // [h][pair] of the lane's keys: dot products, then scores, then weights
float parts[PARTS];              // sums of weights: the part of l that the lane makes
float m[VECTORS];                // the leaf's state, m and l the same in every lane ...
float l[VECTORS];
vec2 o[VECTORS * LANE_PAIRS];    // ... and [h][pair] of the lane's slices of o
#if LOOP
float unit_m[VECTORS];           // the unit's state so far
float unit_l[VECTORS];
vec2 unit_o[VECTORS * LANE_PAIRS];  // with one pass over V; else it is in the scratch tensor
#endif
// Of each wave [key][h]: scores, then weights; then [h][key mod 4]: maxima, and sums but in NODE; at NODE's end, o.
// One array serves all (2 KiB a wave for 8 vectors), so that shared memory does not limit the waves per SIMD before the
// registers do.
const uint WAVE_WEIGHTS = KEYS_PER_LEAF * VECTORS;
// NODE with several passes over V folds behind the weights, one dimension of o at a time.
const uint FOLD_DIMS = VALUE_PASSES == 1u ? 2u : 1u;
const uint FOLD_AT = VALUE_PASSES == 1u ? 0u : MEMBERS * WAVE_WEIGHTS;
shared float weights[MEMBERS * WAVE_WEIGHTS + (MEMBERS == 1u ? 0u : FOLD_AT / 2u)];
const bool CPU = CHUNKS_AHEAD == 1u;  // a CPU device: none else has a single chunk of K in flight
#include "state.glsl"
#include "multiply_add.glsl"
#include "item.glsl"
#include "cache.glsl"
#include "storage.glsl"
#include "masked.glsl"
#include "scores.glsl"   // 1
#include "weights.glsl"  // 2
#include "values.glsl"   // 3
#include "passes.glsl"
#include "emit.glsl"     // 4 of LOOP, 5
#include "place.glsl"
#if NODE
#include "node.glsl"  // 4
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
    fold_ml_of_members();          // 3 and 4 of m and l
    find_node_values(item, leaf);  // 3, 4 and 5 of o
#elif LOOP
    [[dont_unroll]] for (uint index = item.leaf_begin; index < item.leaf_end; ++index) {
        Leaf leaf = leaf_of(item, index);
        find_scores(item, leaf);
        find_weights(leaf);
        bool starts_unit = index == item.leaf_begin || (index & (item.leaves_per_state - 1u)) == 0u;
        find_values(item, leaf, starts_unit);
        sum_weights();                 // 3: l
        merge_into_unit(starts_unit);  // 4
        if (((index + 1u) & (item.leaves_per_state - 1u)) == 0u || index + 1u == item.leaf_end) {
            emit(item, index);
        }
        barrier();  // everybody has read `weights`
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
