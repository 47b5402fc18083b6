// Pass 1 of arithmetic "integer" with int8 matrix units: attend.comp's bits, by attend_matrix's blocks of vectors.
//
// q, which comes rounded, and weights are integers in two int8, 256 high + low. For a leaf's 64 keys:
//
//     scores    s[vector][key] = q's unit * (sum over blocks of K's scale * (a[vector] . k[key] in the block))
//     values    o[vector] = u's unit * (sum over keys of u[vector][key] * v[key]), u anew for each block of V
//
// The sums of the units are exact; the sum of the low int8 goes on from 256 times the sum of the high int8. All other
// work is on single elements, and scales are loaded as matrices with a stride of 0, so the code need not know which
// outputs an invocation's elements are.
#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require
#extension GL_EXT_spirv_intrinsics : require
#extension GL_EXT_shader_explicit_arithmetic_types_int8 : require
#extension GL_KHR_cooperative_matrix : require
#extension GL_KHR_memory_scope_semantics : require
#extension GL_KHR_shader_subgroup_basic : require
#extension GL_KHR_shader_subgroup_shuffle : require

#define MatrixA coopmat<int8_t, gl_ScopeSubgroup, MAT_M, MAT_K, gl_MatrixUseA>
#define MatrixB coopmat<int8_t, gl_ScopeSubgroup, MAT_K, MAT_N, gl_MatrixUseB>
#define MatrixI coopmat<int, gl_ScopeSubgroup, MAT_M, MAT_N, gl_MatrixUseAccumulator>
// Four lanes that share a vector are neighbors in a subgroup.
#define lane (gl_SubgroupID * gl_SubgroupSize + gl_SubgroupInvocationID)
const bool INTEGER = true;
#include "matrix_kernel.glsl"

const bool Q_HELD = UNROLLED == 1u && K_DIM <= MATRIX_HELD_DIMS;
// Rows in shared memory are padded by 16 bytes, so that neighboring rows lie in different banks.
const uint PITCH = (MATRIX_PIECE + 16u) / 4u;           // words of 64 int8
const uint Q_PITCH = (K_BLOCKS * BLOCK + 16u) / 4u;     // words
const uint PIECE_BLOCKS = MATRIX_PIECE / BLOCK, BLOCK_STEPS = BLOCK / MAT_K, KEY_STEPS = KEYS_PER_LEAF / MAT_K;
const uint FRAGMENTS = BLOCK / MAT_N;  // of a block of V
// Blocks of a piece of V of which a subgroup has fragments.
const uint OWN_BLOCKS = PIECE_FRAGMENTS > FRAGMENTS ? PIECE_FRAGMENTS / FRAGMENTS : 1u;
const uint BLOCK_FRAGMENTS = PIECE_FRAGMENTS / OWN_BLOCKS;          // and its fragments of each of these blocks
const uint V_LOADS = (KEYS_PER_LEAF * MATRIX_PIECE / 16u + LANES - 1u) / LANES;  // of 4 by 4 values, for a piece
const uint K_SCALE_LOADS = (KEYS_PER_LEAF * PIECE_BLOCKS + LANES - 1u) / LANES;
const uint V_SCALE_LOADS = (KEYS_PER_LEAF * V_BLOCKS + LANES - 1u) / LANES;  // for a leaf
const uint PLANE = VECTORS * PITCH;                     // words of s_rows for one int8 of u, or of a piece of q

shared uint q_rows[Q_HELD ? 4u : 2u * VECTORS * Q_PITCH];  // [high or low][vector][dimension]
// A piece of K, [row_of(key)][dimension], or of V, [dimension][row_of(key)].
shared uint kv_rows[KEYS_PER_LEAF * PITCH];
// K's scales, [block of the piece][row_of(key)]; then maxima and sums, [vector][key mod 4]; then the value of 1 in the
// weights' integers, [block of the piece][vector].
shared float reduced[VECTORS < 32u ? PIECE_BLOCKS * KEYS_PER_LEAF : VECTORS * WEIGHT_PARTIALS];
shared float v_scales[V_BLOCKS * KEYS_PER_LEAF];  // [block][row_of(key)]
shared float q_units[VECTORS];                    // the value of 1 in the integers of a row of q
// [vector][row_of(key)]: dot products; then u, [block of the piece][high or low][vector][row_of(key)]. At a node's end
// a piece of o, [vector][dimension].
shared uint s_rows[2u * PIECE_BLOCKS * PLANE];
MatrixA q_held[Q_HELD ? 2u * K_PIECES * PIECE_STEPS : 1u];       // [high or low][step]
uvec2 k_ahead[LOADS];  // the lane's words of the next piece, in flight
uvec4 v_ahead[V_LOADS];
float k_scales_ahead[K_SCALE_LOADS], v_scales_ahead[V_SCALE_LOADS];

#include "units_query.glsl"
#include "units_inputs.glsl"
#include "units_scores.glsl"
#include "matrix_weights.glsl"
#include "units_values.glsl"
#include "matrix_pieces.glsl"
#include "matrix_nodes.glsl"
