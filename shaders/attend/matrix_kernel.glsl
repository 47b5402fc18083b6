// The common part of the kernels with matrix units, attend_matrix and attend_units: constants, buffers, sizes, memory.
// Before it they define the factors of a product (MatrixA, MatrixB) and a lane's number.
#include "../contract.glsl"

layout(local_size_x_id = MATRIX_SPEC_WORKGROUP_SIZE, local_size_x = 128) in;
layout(constant_id = MATRIX_SPEC_K_DIM) const uint K_DIM = 128u;  // of q and K, a multiple of 16
layout(constant_id = MATRIX_SPEC_V_DIM) const uint V_DIM = 128u;  // of V and the output, a multiple of 8
layout(constant_id = MATRIX_SPEC_LATENT) const uint LATENT = 0u;  // 1: V is the first V_DIM dimensions of K
layout(constant_id = MATRIX_SPEC_VECTORS) const uint VECTORS = 64u;  // of a workgroup, whole strips
layout(constant_id = MATRIX_SPEC_MAT_M) const uint MAT_M = 16u;  // a fragment: MAT_M vectors ...
layout(constant_id = MATRIX_SPEC_MAT_N) const uint MAT_N = 16u;  // ... by MAT_N keys or dimensions, ...
layout(constant_id = MATRIX_SPEC_MAT_K) const uint MAT_K = 16u;  // ... MAT_K products at a time; 8 or 16 each
layout(constant_id = MATRIX_SPEC_UNROLLED) const uint UNROLLED = 0u;  // 1 on GPUs: pieces one after another, no loop
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
const uint ROWS_AHEAD = 4u, PASS_SUMS = 2048u;  // of pass 1
const bool FOLDS = false;  // storage.glsl: no conversion meets a float product here
const uint ROWS = 1u;  // for item.glsl's vector_of; the kernels here call vector_at of matrix_vectors.glsl
const uint LANES = gl_WorkGroupSize.x;
#include "attend_sizes.glsl"

layout(set = 0, binding = ATTEND_BIND_WORK, std430) restrict readonly buffer Work { uint work[]; };
layout(set = 0, binding = ATTEND_BIND_Q, std430) restrict readonly buffer Q { vec4 q[]; };
layout(set = 0, binding = ATTEND_BIND_STATES, std430) restrict buffer States { float states[]; };
layout(set = 0, binding = ATTEND_BIND_OUT, std430) restrict writeonly buffer Out { float result[]; };

const uint STRIPS = VECTORS / MAT_M;
const uint STRIP_WAVES = LANES / WAVE / STRIPS;                    // subgroups of a strip
const uint PIECE_FRAGMENTS = MATRIX_PIECE / MAT_N / STRIP_WAVES;  // fragments of a piece that a subgroup has
const uint SCORE_FRAGMENTS = KEYS_PER_LEAF / MAT_N / STRIP_WAVES;  // fragments of scores that a subgroup has
const uint PIECE_STEPS = MATRIX_PIECE / MAT_K;         // steps of products over a piece's dimensions
const uint K_PIECES = (K_DIM + MATRIX_PIECE - 1u) / MATRIX_PIECE;
const uint V_PIECES = (V_DIM + MATRIX_PIECE - 1u) / MATRIX_PIECE;
const uint LOADS = KEYS_PER_LEAF * MATRIX_PIECE / CHUNK / LANES;  // of 8 values, by a lane for a piece
const uint PARTIAL_KEYS = KEYS_PER_LEAF / WEIGHT_PARTIALS;  // keys of a leaf with the same remainder mod 4
const uint WEIGHT_ROUNDS = (VECTORS * WEIGHT_PARTIALS + LANES - 1u) / LANES;  // pairs [vector][key mod 4] of a lane
const uint S_PITCH = KEYS_PER_LEAF + 4u;  // words of a row of scores

#define MatrixC coopmat<float, gl_ScopeSubgroup, MAT_M, MAT_N, gl_MatrixUseAccumulator>
shared float node_weight[VECTORS];                    // the factor of the node so far, and below of the leaf
shared float leaf_weight[VECTORS];
shared vec2 node_ml[VECTORS];
shared vec2 total_ml[VECTORS];                        // the total of the item's nodes before this node
MatrixC score_sums[SCORE_FRAGMENTS];  // the subgroup's fragments of its strip's scores
MatrixC node_o[V_PIECES * PIECE_FRAGMENTS];  // the subgroup's part of its strip's o, of the node so far

// `body` for every piece. Compilers keep matrices in memory where a loop around barriers indexes them, even a loop of
// one trip. So with `unrolled` up to four pieces stand one after another.
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

#include "../floats.glsl"
#include "state.glsl"
#include "item.glsl"
#include "words.glsl"
#include "storage.glsl"
#include "score_mod.glsl"
#include "matrix_memory.glsl"
#include "matrix_vectors.glsl"
