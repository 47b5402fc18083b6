// y = w x for few rows of x, of float32, float16 or bfloat16: products.multiply_floats of zinc_attn/graph, by the waves
// of waves.glsl.
//
// Elements of a row of w and of x are neighbors, in whole words. K is a multiple of 8, and with AHEAD of 64. With RMS
// x is the RMS_NORM of the single row that is bound, float32, times `added`, so the product need not wait for a norm.
#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require
#extension GL_KHR_shader_subgroup_basic : require
#include "contract.glsl"

MUL_MAT_FLOAT_VEC_CONSTANTS
const bool TILED = false;
const uint GLU = 0u;
#include "float_products.glsl"
uint superblock;  // the superblock in use, a number along a row
#include "waves.glsl"
#include "norm_scale.glsl"

const uint W_WORDS = W_TYPE == FLOAT_TYPE_F32 ? FLOAT_CHUNK : FLOAT_CHUNK / 2u;  // of a chunk
const uint X_WORDS = X_TYPE == FLOAT_TYPE_F32 ? FLOAT_CHUNK : FLOAT_CHUNK / 2u;
const uint GROUP = AHEAD == 1u ? 8u : 1u;  // chunks of w that are loaded before the first is used
uint words[GROUP * W_WORDS];
shared float squares[RMS == 0u ? 1u : SUM_LANES];  // sums of a row of x
float rms_scale;
uint row_word, column_word;  // where the lane's row begins, and the first column

// The sum of norm.glsl, by workgroups of any size.
void measure() {
    uint n = p.x.n[0];
    for (uint r = gl_LocalInvocationID.x; r < SUM_LANES; r += gl_WorkGroupSize.x) {
        float sum = 0.0;
        for (uint j = r; j < n; j += SUM_LANES) {
            float v = flush(uintBitsToFloat(x[column_word + j]));
            sum = add(sum, flush(multiply(v, v)));
        }
        squares[r] = sum;
    }
    for (uint apart = SUM_LANES / 2u; apart > 0u; apart /= 2u) {
        barrier();
        for (uint r = gl_LocalInvocationID.x; r < apart; r += gl_WorkGroupSize.x) {
            squares[r] = add(squares[r], squares[r + apart]);
        }
    }
    barrier();
    rms_scale = norm_scale(NORM_OP_RMS, squares[0], quotient(1.0, float(n)), uintBitsToFloat(RMS));
}

// The bits of element j of the norm, from element j of x.
uint normed(uint x_j, uint j) {
    float v = flush(multiply(flush(uintBitsToFloat(x_j)), rms_scale));
    return floatBitsToUint(flush(multiply(v, flush(added[p.added.offset + j * p.added.s[0]]))));
}

// To sum: each column gains chunk `chunk` of the row, which is number c of the loaded chunks. A hint to unroll the
// inner loop is too much for SwiftShader's compiler; other compilers need none.
void add_chunk(uint chunk, uint c, inout float sum[COLUMNS]) {
    [[unroll]] for (uint n = 0u; n < COLUMNS; ++n) {
        uint x_word = column_word + n * p.x.s[1] / (FLOAT_CHUNK / X_WORDS) + chunk * X_WORDS;
        float total = 0.0;
        for (uint i = 0u; i < FLOAT_CHUNK; ++i) {
            float w_value = element(W_TYPE, words[c * W_WORDS + i * W_WORDS / FLOAT_CHUNK], i);
            uint x_value = x[x_word + i * X_WORDS / FLOAT_CHUNK];
            x_value = RMS == 0u ? x_value : normed(x_value, chunk * FLOAT_CHUNK + i);
            total = add(total, multiply(w_value, element(X_TYPE, x_value, i)));
        }
        sum[n] = add(sum[n], total);
    }
}

void load_superblock(uint n) {}  // add_superblock loads its chunks itself

void add_superblock(uint, out float sum[COLUMNS]) {
    uint chunks = SUPERBLOCK / FLOAT_CHUNK, end = min((superblock + 1u) * chunks, p.w.n[0] / FLOAT_CHUNK);
    [[unroll]] for (uint n = 0u; n < COLUMNS; ++n) {
        sum[n] = 0.0;
    }
    [[dont_unroll]] for (uint chunk = superblock * chunks; chunk < end; chunk += GROUP) {
        [[unroll]] for (uint i = 0u; i < GROUP * W_WORDS; ++i) {
            words[i] = w[row_word + chunk * W_WORDS + i];
        }
        [[unroll]] for (uint c = 0u; c < GROUP; ++c) {
            add_chunk(chunk + c, c, sum);
        }
    }
}

void main() {
    if (!find_matrix()) {
        return;
    }
    find_wave();
    uvec4 x_index = column_of_x(gl_WorkGroupID.y * COLUMNS);
    uint row = min(gl_WorkGroupID.x * 32u + lane, p.w.n[1] - 1u);
    uvec4 w_index = matrix_of_w() + uvec4(0u, row, 0u, 0u);
    row_word = place(p.w, w_index) / (FLOAT_CHUNK / W_WORDS);
    column_word = place(p.x, x_index) / (FLOAT_CHUNK / X_WORDS);
    if (RMS != 0u) {
        measure();
    }
    float total[COLUMNS];
    add_superblocks((p.w.n[0] + SUPERBLOCK - 1u) / SUPERBLOCK, total);
    store_columns(total);
}
