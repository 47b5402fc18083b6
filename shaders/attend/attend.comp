// Pass 1 of split-KV attention (flash decoding). It makes a state (m, l, o) of every node of 512 keys, for the query
// heads that share one KV head.
//
// Grid: x = share of the KV head's query heads, y = work item (query row and range of nodes), z = KV head. Shares read
// the same keys, so they are neighbors in the grid. A workgroup has eight waves and walks the nodes of its item one
// after another. Each wave attends one leaf of 64 keys of a node, and then all waves fold the eight leaves into the
// node. A workgroup keeps nothing from node to node. A query vector is one query head of one query row, and h is its
// number in the workgroup (ROWS 1: heads of one row). A workgroup reads K and V once, for all its vectors.
//
// The steps of a node; the includes before `main` have these numbers:
//     1 scores  s[key][h] = scale * (q[h] . k[key])                      lane = keys: lane, lane + LANES
//               q, K -> dots (registers)
//     2 weights m[h] = roundEven(max over the leaf's keys of s[key][h])  lane = (h, key mod 4)
//               p[key][h] = 2**(s[key][h] - m[h]), 0 for absent keys     lane = keys
//               dots -> m (registers), weights (shared memory), quarters (sums of weights, registers)
//     3 fold    (m, l) of the node from its leaves' (m, l), ascending    wave = vector
//               m, quarters -> m, l
//     4 values  o[h] = sum over the leaf's keys of p[key][h] * v[key]    lane = slice of head dimensions
//               weights, V -> o (registers)
//     5 fold    o of the node likewise                                   wave = vector, lane = slice
//               o -> states, or, if HEADER_SINGLE_PASS is 1, result
//
// A first reading needs six files: this one, item, scores, weights, values and node, for float16 in tiles, ROWS 1,
// arithmetic "canonical", 32 LANES and VALUE_PASSES 1. plain.comp has the same arithmetic without lanes. A first reader
// needs to know of the other files:
//
//     contract, attend_constants, attend_sizes    the words of the work buffer; constants of the pipeline, and sizes
//     words         locate: where a key lies; its words
//     storage       doubled: on a GPU float16 values come twice as large, and the weights are halved for that
//     in_flight     load_chunks, unpack_chunks: chunks of the lane's keys as floats, k0a ... k1b
//                   load_v, unpack_v: a slice of a value row as floats, v
//     score_mod     scores_of: from dot products to scores (scale, softcap, ALiBi, masks)
//     state         merge_powers, merge, normalize, natural_lse: states (m, l, o); m is whole: exact powers
//     integer       arithmetic "integer": from numbers to integers, and sums of blocks
//     floats        weight: 2**(s - m); multiply_add: a * b + c, in the file of that name
//
// Sizes, and their values on a GPU for 16 query heads, 2 KV heads and head_dim 256 in float16:
//
//     LANES            32  invocations of a wave; fewer on some CPU devices
//     VECTORS           8  query vectors of a workgroup
//     CHUNKS_AHEAD      4  step 1: chunks of K, 8 dimensions each, that a lane has in flight of each of its keys
//     KEY_PAIRS         1  pairs of keys of a lane
//     LANE_QUARTERS     1  step 2: pairs (h, key mod 4) whose maximum and sum a lane makes
//     VALUE_PASSES      1  step 4: passes over V; several where registers do not hold all sums of values
//     SLICE             8  head dimensions of a slice, which is a lane's part of a value row in one pass ...
//     PAIRS             4  ... and pairs of them
//     VALUE_LANES      32  slices of a pass, a lane each, unless LANES is less
//     LANE_SLICES       1  slices of a lane; more in a wave of fewer lanes
//     SLICE_LOADS       1  loads of a slice
//     KEYS_AHEAD        8  value rows in flight
//     FOLD_DIMS         2  step 5: head dimensions of a lane that one round folds
#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_KHR_shader_subgroup_basic : require
#extension GL_EXT_control_flow_attributes : require
#include "../contract.glsl"
#include "attend_constants.glsl"

layout(set = 0, binding = ATTEND_BIND_WORK, std430) restrict readonly buffer Work { uint work[]; };
layout(set = 0, binding = ATTEND_BIND_Q, std430) restrict readonly buffer Q { vec4 q[]; };
layout(set = 0, binding = ATTEND_BIND_STATES, std430) restrict buffer States { float states[]; };
layout(set = 0, binding = ATTEND_BIND_OUT, std430) restrict writeonly buffer Out { float result[]; };

// The arrays that the steps hand on. They are global because glslang 12 does not reliably pass arrays sized by a
// specialization constant; "To x" above a function says that it writes x. All but wave_floats are a lane's registers.
uint wave;                       // number of the invocation's wave
uint lane;                       // number of the invocation in its wave
uint wave_begin;                 // where the wave's part of wave_floats begins
vec2 dots[VECTORS * KEY_PAIRS];  // [h][pair] of the lane's keys: dot products, then scores, then weights
float quarters[LANE_QUARTERS];   // a quarter of a leaf is its keys with the same remainder mod 4: maxima, then sums
struct State {
    float m[VECTORS];              // [h] of the leaf, the same in every lane; from step 3 [f] of the node: node.glsl
    float l[VECTORS];              // [f] of the node
    vec2 o[VECTORS * LANE_PAIRS];  // [h][pair] of the lane's slices, of the leaf; then [f][pair], of the node
} state;
// The waves' shared memory. In steps 2 to 4 a wave's part holds scores as [key][h], then maxima as [h][key mod 4], then
// weights as [key][h]. In step 5 all waves share rounds of o, [wave][h][dim][lane]: in the weights' place if
// VALUE_PASSES is 1, else after the weights. One array serves all four (2 KiB a wave for 8 vectors), so that shared
// memory does not limit the waves per SIMD before the registers do.
shared float wave_floats[SHARED_FLOATS];
#include "../floats.glsl"
#include "state.glsl"
#include "multiply_add.glsl"
#include "item.glsl"
#include "words.glsl"
#include "storage.glsl"
#include "score_mod.glsl"
#include "in_flight.glsl"
#include "integer.glsl"
#include "scores.glsl"   // 1
#include "weights.glsl"  // 2
#include "values.glsl"   // 4
#include "node.glsl"     // 3, 5

// To wave, lane and wave_begin. If subgroups are waves, numbers that depend on the wave alone stay in scalar registers,
// whichever invocations a driver puts into a subgroup. The remainders only tell a compiler the range of the numbers.
void find_wave() {
    bool waves = SUBGROUPS != 0u && gl_SubgroupSize == LANES;
    wave = (waves ? gl_SubgroupID : gl_LocalInvocationID.x / LANES) % WAVES;
    lane = (waves ? gl_SubgroupInvocationID : gl_LocalInvocationID.x) % LANES;
    wave_begin = wave * WAVE_FLOATS;
}

// WALKS and VALUE_PASSES are constants of the pipeline, so that a loop of one trip is no loop, which halves the time of
// lavapipe's code. Each step is called once, because SwiftShader's compiler copies a function to every call.
void main() {
    Item item = read_item();
    find_head_scales();
    find_wave();
    for (uint node = item.node_begin; node < item.node_end; ++node) {
        Leaf leaf = leaf_of(item, node * LEAVES_PER_NODE + wave);
        find_scores(item, leaf);
        find_weights(leaf);
        if (INTEGER) {
            find_value_powers(item, leaf);
        }
        fold_sums();
        uint value_pass = 0u;
        [[dont_unroll]] do {
            sum_slices(item, leaf, value_pass * VALUE_LANES + lane);
            fold_values();
            emit(item, node, value_pass);
        } while (VALUE_PASSES > 1u && ++value_pass < VALUE_PASSES);
        if (WALKS == 0u) {
            break;
        }
    }
}
