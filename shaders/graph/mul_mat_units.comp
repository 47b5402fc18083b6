// y = w x for many rows of x, as tiles.glsl says, by int8 matrix units: mul_mat.comp's bits.
//
// A subgroup has OWN_ROWS * OWN_COLUMNS matrices of MAT_M * MAT_N outputs. The units make the exact dot products. All
// other work combines the same element of matrices of one type, whichever output it is: see unit_tiles.glsl.
#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require
#extension GL_EXT_spirv_intrinsics : require
#extension GL_EXT_shader_explicit_arithmetic_types_int8 : require
#extension GL_KHR_cooperative_matrix : require
#extension GL_KHR_memory_scope_semantics : require
#extension GL_KHR_shader_subgroup_basic : require
#extension GL_KHR_shader_subgroup_vote : require
#include "contract.glsl"

MUL_MAT_UNITS_CONSTANTS
#include "tiles.glsl"
#include "unit_tiles.glsl"

const uint STEPS = X_BLOCK / MAT_K, OWN = OWN_ROWS * OWN_COLUMNS;
const uint LANES_ROWS = TILE_ROWS / MAT_M / OWN_ROWS;  // subgroups side by side

// Sums of products begin as the bits of 1.5 * 2**23, so that they end as the bits of this number plus the sum. A
// difference then takes the place of a conversion, and two differences issue in a cycle. Sums are below 2**22.
const int WHOLE_BITS = 0x4B400000;

float whole(int sum) {
    return add(intBitsToFloat(sum), -intBitsToFloat(WHOLE_BITS));
}

MatrixF total[OWN], inner[OWN], minima[OWN];

// least: whether mxfp4 may flush a product of scales, see add_products.
void add_block(bool least) {
    MatrixW w[OWN_ROWS * STEPS];
    MatrixF w0[OWN_ROWS], w1[OWN_ROWS], w2[OWN_ROWS], w3[OWN_ROWS];
    [[unroll]] for (uint m = 0u; m < OWN_ROWS; ++m) {
        [[unroll]] for (uint k = 0u; k < STEPS; ++k) {
            uint word = (corner.x + m * MAT_M) * PITCH + k * MAT_K / 4u;
            coopMatLoad(w[m * STEPS + k], tiles, word, PITCH, gl_CooperativeMatrixLayoutRowMajor);
        }
        w0[m] = scale_of_w(0u, m);
        w1[m] = scale_of_w(1u, m);
        w2[m] = scale_of_w(2u, m);
        w3[m] = scale_of_w(3u, m);
    }
    [[unroll]] for (uint n = 0u; n < OWN_COLUMNS; ++n) {
        MatrixX x[STEPS];
        [[unroll]] for (uint k = 0u; k < STEPS; ++k) {
            uint word = X_BEGIN + (corner.y + n * MAT_N) * PITCH + k * MAT_K / 4u;
            coopMatLoad(x[k], tiles, word, PITCH, gl_CooperativeMatrixLayoutColumnMajor);
        }
        MatrixF x0 = scale_of_x(0u, n), x1 = scale_of_x(1u, n), x2 = scale_of_x(2u, n);
        [[unroll]] for (uint m = 0u; m < OWN_ROWS; ++m) {
            MatrixI first = MatrixI(WHOLE_BITS), second = MatrixI(WHOLE_BITS);
            [[unroll]] for (uint k = 0u; k < STEPS; ++k) {
                if (HALVES && k >= STEPS / 2u) {
                    second = coopMatMulAdd(w[m * STEPS + k], x[k], second);
                } else {
                    first = coopMatMulAdd(w[m * STEPS + k], x[k], first);
                }
            }
            uint o = n * OWN_ROWS + m;
            for (int e = 0; e < first.length(); ++e) {
                float sum = inner[o][e], minimum = minima[o][e];
                vec2 dots = vec2(whole(first[e]), whole(second[e]));
                vec4 w_scale = vec4(w0[m][e], w1[m][e], w2[m][e], w3[m][e]);
                add_products(w_scale, vec3(x0[e], x1[e], x2[e]), dots, least, sum, minimum);
                inner[o][e] = sum;
                minima[o][e] = minimum;
            }
        }
    }
}

// Whether mxfp4 may flush a product of the least scales of w and of x that the invocation's outputs have.
bool is_small() {
    MatrixF w = scale_of_w(0u, 0u), x = scale_of_x(0u, 0u);
    float least_w = w[0], least_x = x[0];
    [[unroll]] for (uint i = 0u; i < max(OWN_ROWS, OWN_COLUMNS); ++i) {
        w = scale_of_w(0u, min(i, OWN_ROWS - 1u));
        x = scale_of_x(0u, min(i, OWN_COLUMNS - 1u));
        for (int e = 0; e < w.length(); ++e) {
            least_w = min(least_w, w[e]);
            least_x = min(least_x, x[e]);
        }
    }
    return !(least_scale(least_x) < least_w);
}

void add_block() {
    if (IS_MXFP4 && subgroupAny(is_small())) {
        add_block(true);
    } else {
        add_block(false);
    }
}

void end_superblock() {
    [[unroll]] for (uint m = 0u; m < OWN_ROWS; ++m) {
        MatrixF s0 = scale_of_w(4u, m), s1 = scale_of_w(5u, m);
        [[unroll]] for (uint o = m; o < OWN; o += OWN_ROWS) {
            for (int e = 0; e < s0.length(); ++e) {
                total[o][e] = add(total[o][e], superblock_sum(vec2(s0[e], s1[e]), inner[o][e], minima[o][e]));
            }
            inner[o] = minima[o] = MatrixF(0.0);
        }
    }
}

void main() {
    corner = uvec2(gl_SubgroupID % LANES_ROWS, gl_SubgroupID / LANES_ROWS);
    corner *= uvec2(OWN_ROWS * MAT_M, OWN_COLUMNS * MAT_N);
    [[unroll]] for (uint o = 0u; o < OWN; ++o) {
        total[o] = inner[o] = minima[o] = MatrixF(0.0);
    }
    if (!add_blocks()) {
        return;
    }
    uint begin = gl_SubgroupID * OUTPUTS;
    [[unroll]] for (uint o = 0u; o < OWN; ++o) {
        coopMatStore(total[o], tiles, begin, MAT_M, gl_CooperativeMatrixLayoutColumnMajor);
        barrier();
        uvec2 first = uvec2(gl_WorkGroupID.x * TILE_ROWS, gl_WorkGroupID.y * TILE_COLUMNS) + corner;
        first += uvec2(o % OWN_ROWS * MAT_M, o / OWN_ROWS * MAT_N);
        for (uint i = gl_SubgroupInvocationID; i < OUTPUTS; i += gl_SubgroupSize) {
            store(first.x + i % MAT_M, first.y + i / MAT_M, uintBitsToFloat(tiles[begin + i]));
        }
        barrier();
    }
}
