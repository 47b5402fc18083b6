// y = w x for many rows of x, as tiles.glsl says, by int8 matrix units: mul_mat.comp's bits.
//
// A subgroup has OWN_ROWS * OWN_COLUMNS matrices of MAT_M * MAT_N outputs.  The units make the exact dot products.  All
// else is of an element alone, so elements of matrices of one type are joined, and no code knows which outputs they
// are: scales are loaded as matrices with a stride of 0, whose columns, or rows, are equal.
#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require
#extension GL_EXT_spirv_intrinsics : require
#extension GL_EXT_shader_explicit_arithmetic_types_int8 : require
#extension GL_KHR_cooperative_matrix : require
#extension GL_KHR_memory_scope_semantics : require
#extension GL_KHR_shader_subgroup_basic : require
#include "contract.glsl"

layout(local_size_x_id = MUL_MAT_UNITS_SPEC_WORKGROUP_SIZE, local_size_x = 64) in;
layout(constant_id = MUL_MAT_UNITS_SPEC_TYPE) const uint TYPE = 0u;
layout(constant_id = MUL_MAT_UNITS_SPEC_TILE_ROWS) const uint TILE_ROWS = 32u;
layout(constant_id = MUL_MAT_UNITS_SPEC_TILE_COLUMNS) const uint TILE_COLUMNS = 32u;
layout(constant_id = MUL_MAT_UNITS_SPEC_OWN_ROWS) const uint OWN_ROWS = 1u;
layout(constant_id = MUL_MAT_UNITS_SPEC_OWN_COLUMNS) const uint OWN_COLUMNS = 1u;
layout(constant_id = MUL_MAT_UNITS_SPEC_ADD) const uint ADD = 0u;
layout(constant_id = MUL_MAT_UNITS_SPEC_EXPERTS) const uint EXPERTS = 0u;
layout(constant_id = MUL_MAT_UNITS_SPEC_MAT_M) const uint MAT_M = 16u;
layout(constant_id = MUL_MAT_UNITS_SPEC_MAT_N) const uint MAT_N = 16u;
layout(constant_id = MUL_MAT_UNITS_SPEC_MAT_K) const uint MAT_K = 16u;  // divides 32; 16 for types of halves
#include "tiles.glsl"

const uint STEPS = X_BLOCK / MAT_K, OWN = OWN_ROWS * OWN_COLUMNS;
const uint LANES_ROWS = TILE_ROWS / MAT_M / OWN_ROWS;  // subgroups side by side
// Rows in shared memory are 16 bytes longer than they need be, so that neighboring rows lie in different banks.
const uint PITCH = X_BLOCK / 4u + 4u, OUTPUTS = MAT_M * MAT_N, X_BEGIN = TILE_ROWS * PITCH;  // words

#define MatrixW coopmat<int8_t, gl_ScopeSubgroup, MAT_M, MAT_K, gl_MatrixUseA>
#define MatrixX coopmat<int8_t, gl_ScopeSubgroup, MAT_K, MAT_N, gl_MatrixUseB>
#define MatrixI coopmat<int, gl_ScopeSubgroup, MAT_M, MAT_N, gl_MatrixUseAccumulator>
#define MatrixF coopmat<float, gl_ScopeSubgroup, MAT_M, MAT_N, gl_MatrixUseAccumulator>

// Integers of both tiles, [row][word]; at the end results, [subgroup][column][row] of a matrix each.
shared uint tiles[X_BEGIN + TILE_COLUMNS * PITCH];
shared float of_w[4u * TILE_ROWS], of_superblock[2u * TILE_ROWS], of_x[3u * TILE_COLUMNS];  // [scale][row]

MatrixF total[OWN], inner[OWN], lower[OWN];
uvec2 own;  // the subgroup's first row and column of the tile

void keep(uint at, uvec4 low, uvec4 high) {
    [[unroll]] for (uint k = 0u; k < 4u; ++k) {
        tiles[at + k] = low[k];
        tiles[at + k + 4u] = high[k];
    }
}

void keep_w(uint i, uvec4 low, uvec4 high, vec4 scales) {
    keep(i * PITCH, low, high);
    [[unroll]] for (uint k = 0u; k < 4u; ++k) {
        of_w[k * TILE_ROWS + i] = scales[k];
    }
}

void keep_superblock(uint i, vec2 scale) {
    of_superblock[i] = scale.x;
    of_superblock[TILE_ROWS + i] = scale.y;
}

void keep_x(uint i, uvec4 low, uvec4 high, vec3 scales) {
    keep(X_BEGIN + i * PITCH, low, high);
    of_x[i] = scales.x;
    of_x[TILE_COLUMNS + i] = HAS_HALVES ? scales.y : scales.y + scales.z;
    of_x[2u * TILE_COLUMNS + i] = HAS_HALVES ? scales.z : 0.0;
}

// Scale k of the rows of w that matrix i has, in every column.
MatrixF scale_of_w(uint k, uint i) {
    MatrixF made;
    coopMatLoad(made, of_w, k * TILE_ROWS + own.x + i * MAT_M, 0u, gl_CooperativeMatrixLayoutColumnMajor);
    return made;
}

MatrixF scale_of_superblock(uint k, uint i) {
    MatrixF made;
    coopMatLoad(made, of_superblock, k * TILE_ROWS + own.x + i * MAT_M, 0u, gl_CooperativeMatrixLayoutColumnMajor);
    return made;
}

// Scale k of the rows of x that matrix i has, in every row.
MatrixF scale_of_x(uint k, uint i) {
    MatrixF made;
    coopMatLoad(made, of_x, k * TILE_COLUMNS + own.y + i * MAT_N, 0u, gl_CooperativeMatrixLayoutRowMajor);
    return made;
}

void add_block() {
    MatrixW w[OWN_ROWS * STEPS];
    MatrixF w0[OWN_ROWS], w1[OWN_ROWS], w2[OWN_ROWS], w3[OWN_ROWS];
    [[unroll]] for (uint m = 0u; m < OWN_ROWS; ++m) {
        [[unroll]] for (uint k = 0u; k < STEPS; ++k) {
            uint at = (own.x + m * MAT_M) * PITCH + k * MAT_K / 4u;
            coopMatLoad(w[m * STEPS + k], tiles, at, PITCH, gl_CooperativeMatrixLayoutRowMajor);
        }
        w0[m] = scale_of_w(0u, m);
        w1[m] = scale_of_w(1u, m);
        w2[m] = scale_of_w(2u, m);
        w3[m] = scale_of_w(3u, m);
    }
    [[unroll]] for (uint n = 0u; n < OWN_COLUMNS; ++n) {
        MatrixX x[STEPS];
        [[unroll]] for (uint k = 0u; k < STEPS; ++k) {
            uint at = X_BEGIN + (own.y + n * MAT_N) * PITCH + k * MAT_K / 4u;
            coopMatLoad(x[k], tiles, at, PITCH, gl_CooperativeMatrixLayoutColumnMajor);
        }
        MatrixF x0 = scale_of_x(0u, n), x1 = scale_of_x(1u, n), x2 = scale_of_x(2u, n);
        [[unroll]] for (uint m = 0u; m < OWN_ROWS; ++m) {
            MatrixI first = MatrixI(0), second = MatrixI(0);
            [[unroll]] for (uint k = 0u; k < STEPS; ++k) {
                if (HAS_HALVES && k >= STEPS / 2u) {
                    second = coopMatMulAdd(w[m * STEPS + k], x[k], second);
                } else {
                    first = coopMatMulAdd(w[m * STEPS + k], x[k], first);
                }
            }
            MatrixF f = MatrixF(first), g = MatrixF(second);
            uint o = n * OWN_ROWS + m;
            for (int e = 0; e < f.length(); ++e) {
                float sum = inner[o][e], low = lower[o][e];
                join(vec4(w0[m][e], w1[m][e], w2[m][e], w3[m][e]), vec3(x0[e], x1[e], x2[e]), vec2(f[e], g[e]), sum, low);
                inner[o][e] = sum;
                lower[o][e] = low;
            }
        }
    }
}

void end_superblock() {
    [[unroll]] for (uint m = 0u; m < OWN_ROWS; ++m) {
        MatrixF s0 = scale_of_superblock(0u, m), s1 = scale_of_superblock(1u, m);
        [[unroll]] for (uint o = m; o < OWN; o += OWN_ROWS) {
            for (int e = 0; e < s0.length(); ++e) {
                total[o][e] = add(total[o][e], joined(vec2(s0[e], s1[e]), inner[o][e], lower[o][e]));
            }
            inner[o] = lower[o] = MatrixF(0.0);
        }
    }
}

void main() {
    own = uvec2(gl_SubgroupID % LANES_ROWS, gl_SubgroupID / LANES_ROWS) * uvec2(OWN_ROWS * MAT_M, OWN_COLUMNS * MAT_N);
    [[unroll]] for (uint o = 0u; o < OWN; ++o) {
        total[o] = inner[o] = lower[o] = MatrixF(0.0);
    }
    if (!add_blocks()) {
        return;
    }
    uint begin = gl_SubgroupID * OUTPUTS;
    [[unroll]] for (uint o = 0u; o < OWN; ++o) {
        coopMatStore(total[o], tiles, begin, MAT_M, gl_CooperativeMatrixLayoutColumnMajor);
        barrier();
        uvec2 at = uvec2(gl_WorkGroupID.x * TILE_ROWS, gl_WorkGroupID.y * TILE_COLUMNS) + own;
        at += uvec2(o % OWN_ROWS * MAT_M, o / OWN_ROWS * MAT_N);
        for (uint i = gl_SubgroupInvocationID; i < OUTPUTS; i += gl_SubgroupSize) {
            store(at.x + i % MAT_M, at.y + i / MAT_M, uintBitsToFloat(tiles[begin + i]));
        }
        barrier();
    }
}
