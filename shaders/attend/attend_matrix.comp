// Pass 1 with matrix units (arithmetic "matrix"): the states (m, l, o) of a range of nodes, for a block of vectors.
//
// Grid: x = block of VECTORS vectors, y = work item (query rows of one sequence and range of nodes), z = KV head. A
// vector is a query row of one head: vector t of an item is row t / group and head t % group of the KV head's.
//
// The arithmetic is attend.comp's except for two products, which VK_KHR_cooperative_matrix makes of float16 factors
// with float32 sums. For a leaf's 64 keys:
//
//     scores    s[vector][key] = scale * (q[vector] . k[key])        MAT_K dimensions a step, ascending
//     values    o[vector] = sum over keys of p[vector][key] * v[key]   MAT_K keys a step, in the order of row_of
//
// q, k, v and p are rounded to float16. A device sums the products of a step in an order of its own. Everything else
// has the canonical bits: maxima, weights, l, the fold of leaves into nodes and the rest.
//
// A strip of MAT_M vectors belongs to STRIP_WAVES subgroups, which share its fragments. K and V go through shared
// memory 64 dimensions (a piece) at a time, and the next piece is in flight while this piece is multiplied.
#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require
#extension GL_EXT_spirv_intrinsics : require
#extension GL_EXT_shader_explicit_arithmetic_types_float16 : require
#extension GL_KHR_cooperative_matrix : require
#extension GL_KHR_memory_scope_semantics : require
#extension GL_KHR_shader_subgroup_basic : require

#define MatrixA coopmat<float16_t, gl_ScopeSubgroup, MAT_M, MAT_K, gl_MatrixUseA>
#define MatrixB coopmat<float16_t, gl_ScopeSubgroup, MAT_K, MAT_N, gl_MatrixUseB>
#define lane gl_LocalInvocationIndex
const bool INTEGER = false;
#include "matrix_kernel.glsl"

// Subgroups hold their strip's q in registers where registers have room; else q lies in shared memory.
const bool Q_HELD = UNROLLED == 1u && K_DIM <= MATRIX_HELD_DIMS;
// Rows in shared memory are padded by 16 bytes, so that neighboring rows lie in different banks.
const uint PITCH = (MATRIX_PIECE + 8u) / 2u;  // words of 64 halves
const uint Q_PITCH = (K_DIM + 8u) / 2u;       // words

shared uint q_rows[Q_HELD ? 4u : VECTORS * Q_PITCH];  // pairs of halves, [vector][dimension]
// A piece of K, [row_of(key)][dimension], or of V, [dimension][row_of(key)].
shared uint kv_rows[KEYS_PER_LEAF * PITCH];
// [vector][row_of(key)]: scores as float32, then weights as halves. At a node's end a piece of o, [vector][dimension].
shared uint s_rows[VECTORS * S_PITCH];
shared float reduced[VECTORS * WEIGHT_PARTIALS];  // [vector][key mod 4]: maxima, then sums
MatrixA q_held[Q_HELD ? K_PIECES * PIECE_STEPS : 1u];
uvec4 ahead[LOADS];                    // the lane's words of the next piece, in flight, as halves

#include "matrix_inputs.glsl"
#include "matrix_scores.glsl"
#include "matrix_weights.glsl"
#include "matrix_values.glsl"
#include "matrix_pieces.glsl"
#include "matrix_nodes.glsl"
