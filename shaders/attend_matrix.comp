// Pass 1 with matrix units (arithmetic "matrix"): the states (m, l, o) of a range of leaves for a block of query vectors.
//
// Grid: x = work item (query rows of one sequence and range of leaves), y = KV head, z = block of VECTORS vectors.  A
// vector is a query row of one head; vector t of an item is row t / group, head t % group of the KV head's.
//
// The arithmetic is attend.comp's but for two products, which VK_KHR_cooperative_matrix makes of float16 factors with
// float32 sums: of a leaf's 64 keys
//
//     scores    s[vector][key] = scale * (q[vector] . k[key])      k ascending in steps of MAT_K dimensions
//     values    o[vector] = sum over keys of p[vector][key] * v[key]   keys ascending in steps of MAT_K
//
// q, k, v and p are rounded to float16 (to even).  A device sums the products of a step in an order of its own; all else,
// maxima, weights, l, the fold of leaves into nodes and what follows, has the canonical bits.
//
// A strip of MAT_M vectors belongs to PARTS subgroups, which share its tiles out.  K and V go through shared memory 64
// dimensions at a time.
#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require
#extension GL_EXT_shader_explicit_arithmetic_types_float16 : require
#extension GL_KHR_cooperative_matrix : require
#extension GL_KHR_memory_scope_semantics : require
#extension GL_KHR_shader_subgroup_basic : require
#include "contract.glsl"

layout(local_size_x_id = MATRIX_SPEC_LANES, local_size_x = 128) in;
layout(constant_id = MATRIX_SPEC_K_DIM) const uint K_DIM = 128u;  // of q and K, a multiple of 16
layout(constant_id = MATRIX_SPEC_V_DIM) const uint V_DIM = 128u;  // of V and the output, even
layout(constant_id = MATRIX_SPEC_LATENT) const uint LATENT = 0u;  // 1: V is the first V_DIM dimensions of K
layout(constant_id = MATRIX_SPEC_VECTORS) const uint VECTORS = 64u;  // of a workgroup, whole strips
layout(constant_id = MATRIX_SPEC_MAT_M) const uint MAT_M = 16u;  // a tile: MAT_M vectors ...
layout(constant_id = MATRIX_SPEC_MAT_N) const uint MAT_N = 16u;  // ... by MAT_N keys or dimensions, ...
layout(constant_id = MATRIX_SPEC_MAT_K) const uint MAT_K = 16u;  // ... MAT_K products at a time; 8 or 16 each
layout(constant_id = MATRIX_SPEC_TILE) const uint TILE = 64u;  // tokens per tile of K and V
layout(constant_id = MATRIX_SPEC_SOFTCAP) const uint SOFTCAP = 0u;
layout(constant_id = MATRIX_SPEC_ALIBI) const uint ALIBI = 0u;
layout(constant_id = MATRIX_SPEC_MASK) const uint MASK = 0u;
layout(constant_id = MATRIX_SPEC_K_STORAGE) const uint K_STORAGE = STORAGE_F16;
layout(constant_id = MATRIX_SPEC_V_STORAGE) const uint V_STORAGE = STORAGE_F16;
const uint FROM_UPLOAD = 0u;   // plain Vulkan orders an append before the attend that reads it
const uint CHUNKS_AHEAD = 1u;  // storage.glsl: conversions are not folded into products here
const uint HEADS = 1u, ROWS = 1u;
#define LOOP 1u
#include "attend_sizes.glsl"

layout(set = 0, binding = ATTEND_BIND_WORK, std430) restrict readonly buffer Work { uint work[]; };
layout(set = 0, binding = ATTEND_BIND_Q, std430) restrict readonly buffer Q { vec4 q[]; };
layout(set = 0, binding = ATTEND_BIND_STATES, std430) restrict buffer States { float states[]; };
layout(set = 0, binding = ATTEND_BIND_OUT, std430) restrict writeonly buffer Out { float result[]; };

const uint LANES = gl_WorkGroupSize.x;
const uint STRIPS = VECTORS / MAT_M;
const uint PARTS = LANES / WAVE / STRIPS;              // subgroups of a strip
const uint PIECE = 64u;                                // dimensions of K or V in shared memory
const uint PIECE_TILES = PIECE / MAT_N / PARTS;        // tiles of a piece that fall to a subgroup
const uint KEY_TILES = KEYS_PER_LEAF / MAT_N / PARTS;  // tiles of scores that fall to a subgroup
const uint V_PIECES = (V_DIM + PIECE - 1u) / PIECE;
const uint WEIGHT_ROUNDS = (VECTORS * WEIGHT_PARTIALS + LANES - 1u) / LANES;  // pairs [vector][key mod 4] of a lane
// MatrixA in shared memory have 8 halves (4 floats) more than they need, so that neighboring rows lie in different banks.
const uint Q_PITCH = (K_DIM + 8u) / 4u;  // in f16vec4
const uint KV_PITCH = (PIECE + 8u) / 4u;
const uint P_PITCH = KEYS_PER_LEAF + 8u;  // in halves
const uint S_PITCH = KEYS_PER_LEAF + 4u;  // in floats

#define MatrixC coopmat<float, gl_ScopeSubgroup, MAT_M, MAT_N, gl_MatrixUseAccumulator>
#define MatrixA coopmat<float16_t, gl_ScopeSubgroup, MAT_M, MAT_K, gl_MatrixUseA>
#define MatrixB coopmat<float16_t, gl_ScopeSubgroup, MAT_K, MAT_N, gl_MatrixUseB>

shared f16vec4 q_rows[VECTORS * Q_PITCH];
shared f16vec4 kv_rows[KEYS_PER_LEAF * KV_PITCH];  // of 64 keys a piece of K or V
shared float16_t p_rows[VECTORS * P_PITCH];        // weights
// Of each vector the leaf's scores; then what the node and the leaf are weighted with, each MAT_N times; at a node's end
// a piece of its o.
shared float s_rows[VECTORS * S_PITCH];
shared float reduced[VECTORS * WEIGHT_PARTIALS];  // [vector][key mod 4]: maxima, then sums
shared vec2 node_ml[VECTORS];
MatrixC node[V_PIECES * PIECE_TILES];  // the subgroup's part of its strip's o, of the unit so far

#define lane gl_LocalInvocationIndex
#include "state.glsl"
#include "item.glsl"
#include "cache.glsl"
#include "storage.glsl"
#include "softcap.glsl"
#include "bias.glsl"
#include "matrix_tiles.glsl"
#include "matrix_scores.glsl"
#include "matrix_values.glsl"

void main() {
    Item item = read_item();
    if (item.leaf_begin >= item.leaf_end) {
        return;
    }
    find_head_scales();
    load_q(item);
    [[dont_unroll]] for (uint index = item.leaf_begin; index < item.leaf_end; ++index) {
        Leaf leaf = leaf_of(item, index);
        bool first = index == item.leaf_begin || (index & (item.leaves_per_state - 1u)) == 0u;  // leaf of its unit
        find_scores(item, leaf);
        find_weights(item, leaf, first);
        find_values(item, leaf, first);
        if (((index + 1u) & (item.leaves_per_state - 1u)) == 0u || index + 1u == item.leaf_end) {
            emit(item, index);
        }
    }
}
