// Pass 1 with matrix units (arithmetic "matrix"): the states (m, l, o) of a range of nodes, for a block of vectors.
//
// Grid: x = work item (query rows of one sequence and range of nodes), y = KV head, z = block of VECTORS vectors.  A
// vector is a query row of one head; vector t of an item is row t / group, head t % group of the KV head's.
//
// The arithmetic is attend.comp's but for two products, which VK_KHR_cooperative_matrix makes of float16 factors with
// float32 sums: of a leaf's 64 keys
//
//     scores    s[vector][key] = scale * (q[vector] . k[key])        MAT_K dimensions a step, ascending
//     values    o[vector] = sum over keys of p[vector][key] * v[key]   MAT_K keys a step, in the order of row_of
//
// q, k, v and p are rounded to float16.  A device sums the products of a step in an order of its own; all else, maxima,
// weights, l, the fold of leaves into nodes and what follows, has the canonical bits.
//
// A strip of MAT_M vectors belongs to STRIP_WAVES subgroups, which share its fragments out.  K and V go through shared
// memory 64 dimensions (a piece) at a time, and the next piece is in flight as this one is multiplied.
#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require
#extension GL_EXT_spirv_intrinsics : require
#extension GL_EXT_shader_explicit_arithmetic_types_float16 : require
#extension GL_KHR_cooperative_matrix : require
#extension GL_KHR_memory_scope_semantics : require
#extension GL_KHR_shader_subgroup_basic : require
#include "../contract.glsl"

layout(local_size_x_id = MATRIX_SPEC_WORKGROUP_SIZE, local_size_x = 128) in;
layout(constant_id = MATRIX_SPEC_K_DIM) const uint K_DIM = 128u;  // of q and K, a multiple of 16
layout(constant_id = MATRIX_SPEC_V_DIM) const uint V_DIM = 128u;  // of V and the output, a multiple of 8
layout(constant_id = MATRIX_SPEC_LATENT) const uint LATENT = 0u;  // 1: V is the first V_DIM dimensions of K
layout(constant_id = MATRIX_SPEC_VECTORS) const uint VECTORS = 64u;  // of a workgroup, whole strips
layout(constant_id = MATRIX_SPEC_MAT_M) const uint MAT_M = 16u;  // a fragment: MAT_M vectors ...
layout(constant_id = MATRIX_SPEC_MAT_N) const uint MAT_N = 16u;  // ... by MAT_N keys or dimensions, ...
layout(constant_id = MATRIX_SPEC_MAT_K) const uint MAT_K = 16u;  // ... MAT_K products at a time; 8 or 16 each
layout(constant_id = MATRIX_SPEC_UNROLLED) const uint UNROLLED = 0u;  // 1 on GPUs: pieces one behind the other, no loop
layout(constant_id = MATRIX_SPEC_WAVES) const uint WAVES = 0u;  // 1: subgroups are waves; else they may be smaller
layout(constant_id = MATRIX_SPEC_TILE) const uint TILE = 64u;  // tokens per tile of K and V
layout(constant_id = MATRIX_SPEC_SOFTCAP) const uint SOFTCAP = 0u;
layout(constant_id = MATRIX_SPEC_BIASES) const uint BIASES = 0u;
layout(constant_id = MATRIX_SPEC_MASK) const uint MASK = 0u;
layout(constant_id = MATRIX_SPEC_K_STORAGE) const uint K_STORAGE = STORAGE_F16;
layout(constant_id = MATRIX_SPEC_V_STORAGE) const uint V_STORAGE = STORAGE_F16;
layout(constant_id = MATRIX_SPEC_K_SIZE) const uint K_SIZE = 128u;  // of K_DIM, dimensions that rows have
layout(constant_id = MATRIX_SPEC_V_SIZE) const uint V_SIZE = 128u;  // of V_DIM
layout(constant_id = MATRIX_SPEC_K_STRIDE) const uint K_STRIDE = 0u;  // bytes from row to row; 0: K lies in tiles
layout(constant_id = MATRIX_SPEC_V_STRIDE) const uint V_STRIDE = 0u;  // of V
const bool INTEGER = false;
const uint CHUNKS_AHEAD = 1u;  // storage.glsl: conversions are not folded into products here
const uint ROWS = 1u;  // of item.glsl's vector_of, in place of which vector_at of matrix_inputs.glsl is called here
const uint LANES = gl_WorkGroupSize.x;
#include "attend_sizes.glsl"

layout(set = 0, binding = ATTEND_BIND_WORK, std430) restrict readonly buffer Work { uint work[]; };
layout(set = 0, binding = ATTEND_BIND_Q, std430) restrict readonly buffer Q { vec4 q[]; };
layout(set = 0, binding = ATTEND_BIND_STATES, std430) restrict buffer States { float states[]; };
layout(set = 0, binding = ATTEND_BIND_OUT, std430) restrict writeonly buffer Out { float result[]; };

const uint STRIPS = VECTORS / MAT_M;
const uint STRIP_WAVES = LANES / WAVE / STRIPS;                    // subgroups of a strip
const uint PIECE_FRAGMENTS = MATRIX_PIECE / MAT_N / STRIP_WAVES;  // fragments of a piece that fall to a subgroup
const uint SCORE_FRAGMENTS = KEYS_PER_LEAF / MAT_N / STRIP_WAVES;  // fragments of scores that fall to a subgroup
const uint PIECE_STEPS = MATRIX_PIECE / MAT_K;         // steps of products over a piece's dimensions
const uint K_PIECES = (K_DIM + MATRIX_PIECE - 1u) / MATRIX_PIECE;
const uint V_PIECES = (V_DIM + MATRIX_PIECE - 1u) / MATRIX_PIECE;
const uint LOADS = KEYS_PER_LEAF * MATRIX_PIECE / CHUNK / LANES;  // of 8 values, by a lane for a piece
const uint PARTIAL_KEYS = KEYS_PER_LEAF / WEIGHT_PARTIALS;  // keys of a leaf that are the same mod 4
const uint WEIGHT_ROUNDS = (VECTORS * WEIGHT_PARTIALS + LANES - 1u) / LANES;  // pairs [vector][key mod 4] of a lane
// Subgroups hold their strip's q in registers where these have room; else it lies in shared memory.
const bool Q_HELD = UNROLLED == 1u && K_DIM <= MATRIX_HELD_DIMS;
// Rows in shared memory are 16 bytes longer than they need be, so that neighboring rows lie in different banks.
const uint PITCH = (MATRIX_PIECE + 8u) / 2u;  // words of 64 halves
const uint Q_PITCH = (K_DIM + 8u) / 2u;       // words
const uint S_PITCH = KEYS_PER_LEAF + 4u;      // words

#define MatrixC coopmat<float, gl_ScopeSubgroup, MAT_M, MAT_N, gl_MatrixUseAccumulator>
#define MatrixA coopmat<float16_t, gl_ScopeSubgroup, MAT_M, MAT_K, gl_MatrixUseA>
#define MatrixB coopmat<float16_t, gl_ScopeSubgroup, MAT_K, MAT_N, gl_MatrixUseB>

shared uint q_rows[Q_HELD ? 4u : VECTORS * Q_PITCH];  // pairs of halves, [vector][dimension]
// A piece of K, [row_of(key)][dimension], or of V, [dimension][row_of(key)].
shared uint kv_rows[KEYS_PER_LEAF * PITCH];
// [vector][row_of(key)]: scores as float32, then weights as halves.  At a node's end [vector][dimension], a piece of o.
shared uint s_rows[VECTORS * S_PITCH];
shared float reduced[VECTORS * WEIGHT_PARTIALS];      // [vector][key mod 4]: maxima, then sums
shared float node_weight[VECTORS];                    // what the node so far and the leaf are multiplied with
shared float leaf_weight[VECTORS];
shared vec2 node_ml[VECTORS];
shared vec2 total_ml[VECTORS];                        // of the item's nodes before this one
MatrixA q_held[Q_HELD ? K_PIECES * PIECE_STEPS : 1u];
MatrixC node_o[V_PIECES * PIECE_FRAGMENTS];  // the subgroup's part of its strip's o, of the node so far
uvec4 ahead[LOADS];                    // what the lane has in flight of the next piece, as halves

// `body` for every piece.  Compilers keep matrices in memory that a loop around barriers indexes, also if it has one
// trip, so with `unrolled` up to four pieces stand one behind the other.
#define FOR_PIECES(unrolled, piece, count, body)                         \
    if (unrolled && count <= 4u) {                                       \
        { const uint piece = 0u; body; }                                 \
        if (count > 1u) { const uint piece = 1u; body; }                 \
        if (count > 2u) { const uint piece = 2u; body; }                 \
        if (count > 3u) { const uint piece = 3u; body; }                 \
    } else {                                                             \
        [[dont_unroll]] for (uint piece = 0u; piece < count; ++piece) { body; } \
    }
#define FOR_STEPS(step, count, body)                                     \
    if (UNROLLED == 1u) {                                                \
        [[unroll]] for (uint step = 0u; step < count; ++step) { body; }  \
    } else {                                                             \
        [[dont_unroll]] for (uint step = 0u; step < count; ++step) { body; } \
    }

#define lane gl_LocalInvocationIndex
#include "../floats.glsl"
#include "state.glsl"
#include "item.glsl"
#include "words.glsl"
#include "storage.glsl"
#include "score_mod.glsl"
#include "matrix_memory.glsl"
#include "matrix_inputs.glsl"
#include "matrix_scores.glsl"
#include "matrix_values.glsl"

void main() {
    Item item = read_item();
    if (item.node_begin >= item.node_end) {
        return;
    }
    find_head_scales();
    load_q(item);
    bool keys = item.limit > 0u;  // else the item is for rows that see none, and their state is the empty one
    // The first leaf that some row sees, and the leaf behind the last.
    uint first = item.first - min((item.last_row - item.row) * item.row_step, item.first);
    uint begin = max(item.node_begin * LEAVES_PER_NODE, first / KEYS_PER_LEAF);
    uint end = keys ? min(item.node_end * LEAVES_PER_NODE, (item.limit - 1u) / KEYS_PER_LEAF + 1u) : begin + 1u;
    if (keys) {
        fetch_k(item, leaf_of(item, begin), 0u);
    } else {
        make_empty();
    }
    [[dont_unroll]] for (uint index = begin; index < end; ++index) {
        Leaf leaf = leaf_of(item, index), next = leaf_of(item, min(index + 1u, end - 1u));
        bool first_of_node = index == begin || index % LEAVES_PER_NODE == 0u;
        if (keys) {
            find_scores(item, leaf);
            find_weights(item, leaf, first_of_node);
            find_values(item, leaf, next, first_of_node);
        }
        if ((index + 1u) % LEAVES_PER_NODE == 0u || index + 1u == end) {
            uint node = index / LEAVES_PER_NODE;
            emit(item, Node(node, node == begin / LEAVES_PER_NODE, index + 1u == end));
        }
    }
}
