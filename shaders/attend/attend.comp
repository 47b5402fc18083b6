// Pass 1 of split-KV attention (flash decoding): a state (m, l, o) of every node of 512 keys, for the query heads that
// share one KV head.
//
// Grid: x = share of the KV head's query heads, y = work item (query row and range of nodes), z = KV head, so that
// shares, which read the same keys, run side by side.  A workgroup is eight waves.  It walks the nodes of its item one
// after another; of each, a wave attends one leaf of 64 keys, and then all waves fold the eight leaves into the node.
// Nothing is kept from node to node.  A query vector is a row of one query head; h is its number in the workgroup
// (ROWS 1: heads of one row).  All use a row of K or V when it is loaded, so that K and V are read once.
//
// The steps of a node; the includes before `main` have these numbers:
//     1 scores  s[key][h] = scale * (q[h] . k[key])                      lane = keys: lane, lane + LANES
//               q, K -> dots (registers)
//     2 weights m[h] = roundEven(max over the leaf's keys of s[key][h])  lane = (h, key mod 4)
//               p[key][h] = 2**(s[key][h] - m[h]), 0 for absent keys     lane = keys
//               dots -> m (registers), weights (shared memory), quarters (sums of weights, registers)
//     3 fold    (m, l) of the node from those of its leaves, ascending   wave = vector
//               m, quarters -> m, l
//     4 values  o[h] = sum over the leaf's keys of p[key][h] * v[key]    lane = slice of head dimensions
//               weights, V -> o (registers)
//     5 fold    o of the node likewise                                   wave = vector, lane = slice
//               o -> states, or, where every row of the call has a single node, result
//
// A first reading can do with item, chunks, scores, weights, values and node, with float16 in tiles, ROWS 1, ARITHMETIC
// CANONICAL, 32 LANES and VALUE_PASSES 1; plain.comp has the same arithmetic without lanes.  Of the other files it is
// enough to know:
//
//     contract, attend_sizes    numbers: the words of the work buffer, and sizes
//     score_mod     scores_of: from dot products to scores (scale, softcap, ALiBi, masks)
//     words         locate: where a key lies; k_chunk, v_words: its words
//     storage       load_k: its floats; doubled: on a GPU float16 values come twice as large, which weights make good
//     state         merge_powers, merge, normalize, natural_lse: states (m, l, o); m is whole: exact powers
//     integer       what arithmetic "integer" does beside: numbers to integers, sums of blocks
//     floats        weight: 2**(s - m); multiply_add: a * b + c, in the file of that name
//
// Sizes, and what they are on a GPU for 16 query heads, 2 KV heads and head_dim 256 in float16:
//
//     LANES            32  invocations of a wave; fewer on some CPU devices
//     VECTORS           8  query vectors of a workgroup
//     CHUNKS_AHEAD      4  step 1: chunks of K, 8 dimensions each, that a lane has in flight of each of its keys
//     KEY_PAIRS         1  pairs of keys of a lane
//     LANE_QUARTERS     1  step 2: pairs (h, key mod 4) of which a lane finds maxima and sums
//     VALUE_PASSES      1  step 4: passes over V; several where value sums are more than registers hold
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

layout(local_size_x_id = ATTEND_SPEC_WORKGROUP_SIZE, local_size_x = 256) in;
const uint WAVES = LEAVES_PER_NODE;               // of a workgroup, a leaf each
const uint LANES = gl_WorkGroupSize.x / WAVES;    // of a wave: 32, 16 or 8
layout(constant_id = ATTEND_SPEC_K_DIM) const uint K_DIM = 128u;  // of q and K, a multiple of 16
layout(constant_id = ATTEND_SPEC_V_DIM) const uint V_DIM = 128u;  // of V and the output, whole slices of a lane
layout(constant_id = ATTEND_SPEC_LATENT) const uint LATENT = 0u;  // 1: V is the first V_DIM dimensions of K
layout(constant_id = ATTEND_SPEC_VECTORS) const uint VECTORS = 4u;  // query vectors of a workgroup
layout(constant_id = ATTEND_SPEC_CHUNKS_AHEAD) const uint CHUNKS_AHEAD = 1u;  // chunks of K in flight: 1, 2 or 4
layout(constant_id = ATTEND_SPEC_TILE) const uint TILE = 64u;  // tokens per tile: 64, or the page size if smaller
layout(constant_id = ATTEND_SPEC_SOFTCAP) const uint SOFTCAP = 0u;  // 1: scores are capped
layout(constant_id = ATTEND_SPEC_BIASES) const uint BIASES = 0u;  // what scores have: a sum of BIAS_...
layout(constant_id = ATTEND_SPEC_MASK) const uint MASK = 0u;  // 1: scores have a bias by row and key
layout(constant_id = ATTEND_SPEC_ROWS_SHARED) const uint ROWS = 1u;  // query rows that share these keys
layout(constant_id = ATTEND_SPEC_K_STORAGE) const uint K_STORAGE = STORAGE_F32;  // type of K
layout(constant_id = ATTEND_SPEC_V_STORAGE) const uint V_STORAGE = STORAGE_F32;  // type of V; a latent shape's is K's
layout(constant_id = ATTEND_SPEC_ARITHMETIC) const uint ARITHMETIC = CANONICAL;  // see multiply_add.glsl, integer.glsl
layout(constant_id = ATTEND_SPEC_SUBGROUPS) const uint SUBGROUPS = 0u;  // 1: those of LANES invocations are waves
layout(constant_id = ATTEND_SPEC_WALKS) const uint WALKS = 1u;  // 0: every item has one node
layout(constant_id = ATTEND_SPEC_K_SIZE) const uint K_SIZE = 128u;  // of K_DIM, dimensions that rows have
layout(constant_id = ATTEND_SPEC_V_SIZE) const uint V_SIZE = 128u;  // of V_DIM
layout(constant_id = ATTEND_SPEC_K_STRIDE) const uint K_STRIDE = 0u;  // bytes from row to row; 0: K lies in tiles
layout(constant_id = ATTEND_SPEC_V_STRIDE) const uint V_STRIDE = 0u;  // of V
layout(constant_id = ATTEND_SPEC_ROWS_AHEAD) const uint ROWS_AHEAD = 8u;  // most rows of V in flight: 4 or 8
layout(constant_id = ATTEND_SPEC_PASS_SUMS) const uint PASS_SUMS = 2048u;  // sums of values of a wave in a pass over V
#include "attend_sizes.glsl"
const bool INTEGER = ARITHMETIC == INTEGER_SUMS;

layout(set = 0, binding = ATTEND_BIND_WORK, std430) restrict readonly buffer Work { uint work[]; };
layout(set = 0, binding = ATTEND_BIND_Q, std430) restrict readonly buffer Q { vec4 q[]; };
layout(set = 0, binding = ATTEND_BIND_STATES, std430) restrict buffer States { float states[]; };
layout(set = 0, binding = ATTEND_BIND_OUT, std430) restrict writeonly buffer Out { float result[]; };

// What the steps hand on.  These arrays are global because glslang 12 does not reliably pass arrays sized by a
// specialization constant; "To x" above a function says that it writes x.  All but `wave_floats` are a lane's registers.
const uint KEY_PAIRS = KEYS_PER_LEAF / LANES / 2u;  // keys lane and lane + LANES, then the next two
const uint LANE_SLICES = LANES == WAVE ? 1u : VALUE_LANES / LANES;  // slices lane, lane + LANES, ...
const uint LANE_PAIRS = LANE_SLICES * PAIRS;  // of dimensions, in all of them
const uint LANE_QUARTERS = (VECTORS * WEIGHT_PARTIALS + LANES - 1u) / LANES;
uint wave;                       // the invocation's wave
uint lane;                       // its number in the wave
uint wave_begin;                        // where the wave's part of `wave_floats` begins
vec2 dots[VECTORS * KEY_PAIRS];  // [h][pair] of the lane's keys: dot products, then scores, then weights
float quarters[LANE_QUARTERS];   // sums of weights of a quarter of a leaf, the keys that are the same mod 4
struct State {
    float m[VECTORS];              // [h] of the leaf, the same in every lane; then [f] of the node: see node.glsl
    float l[VECTORS];              // [f] of the node
    vec2 o[VECTORS * LANE_PAIRS];  // [h][pair] of the lane's slices of the leaf's; then [f][pair] of the node's
} state;
// Of each wave [key][h]: scores, then weights; between them [h][key mod 4]: maxima; in the end o.  One array serves
// all (2 KiB a wave for 8 vectors), so that shared memory does not limit the waves per SIMD before the registers do.
shared float wave_floats[SHARED_FLOATS];
const bool CPU = CHUNKS_AHEAD == 1u;  // a CPU device: none else has a single chunk of K in flight
#include "../floats.glsl"
#include "state.glsl"
#include "multiply_add.glsl"
#include "item.glsl"
#include "words.glsl"
#include "storage.glsl"
#include "score_mod.glsl"
#include "chunks.glsl"
#include "integer.glsl"
#include "scores.glsl"   // 1
#include "weights.glsl"  // 2
#include "values.glsl"   // 4
#include "node.glsl"     // 3, 5

// To wave, lane and own.  Where subgroups are waves, whichever invocations a driver puts into them, a number that a
// subgroup has in common keeps what follows from it in scalar registers.  The remainders change nothing; they tell a
// compiler what can be.
void find_wave() {
    bool waves = SUBGROUPS != 0u && gl_SubgroupSize == LANES;
    wave = (waves ? gl_SubgroupID : gl_LocalInvocationID.x / LANES) % WAVES;
    lane = (waves ? gl_SubgroupInvocationID : gl_LocalInvocationID.x) % LANES;
    wave_begin = wave * WAVE_FLOATS;
}

// Both loops end where the pipeline's constants say so: lavapipe's code is half as slow without a loop around all this.
// Each step is called once, because SwiftShader's compiler copies a function to every call.
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
        uint pass = 0u;
        [[dont_unroll]] do {
            sum_slices(item, leaf, pass * VALUE_LANES + lane);
            fold_values();
            emit(item, node, pass);
        } while (VALUE_PASSES > 1u && ++pass < VALUE_PASSES);
        if (WALKS == 0u) {
            break;
        }
    }
}
