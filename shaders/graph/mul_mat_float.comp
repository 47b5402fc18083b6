// y = w x for float32, float16 or bfloat16, in tiles, with any steps between elements: products.multiply_floats of
// zinc_attn/graph.
//
// A workgroup has TILE_ROWS rows of w and TILE_COLUMNS rows of x. It walks along a row 32 products at a time, and
// brings their factors to shared memory. An invocation has OWN_ROWS * OWN_COLUMNS outputs. Eight products form a chain,
// 32 of these sums form a superblock, and superblocks form the result, all in ascending order.
#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require
#include "contract.glsl"

MUL_MAT_FLOAT_CONSTANTS
const bool TILED = true;
#include "float_products.glsl"

const uint STEPS = 32u;  // products of a row that are in shared memory
const uint LANES_ROWS = TILE_ROWS / OWN_ROWS, OWN = OWN_ROWS * OWN_COLUMNS;
shared float tile_w[STEPS * (TILE_ROWS + 1u)], tile_x[STEPS * (TILE_COLUMNS + 1u)];  // (product, row)
shared uint columns[TILE_COLUMNS];  // where the tile's columns begin in x

void load_tiles(uvec4 w_index, uint k) {
    for (uint i = gl_LocalInvocationIndex; i < STEPS * TILE_ROWS; i += gl_WorkGroupSize.x) {
        uint step = i % STEPS, m = gl_WorkGroupID.x * TILE_ROWS + i / STEPS;
        uint index = place(p.w, w_index + uvec4(k + step, m, 0u, 0u));
        bool real = k + step < p.w.n[0] && m < p.w.n[1];
        uint word = real ? w[W_TYPE == FLOAT_TYPE_F32 ? index : index / 2u] : 0u;
        tile_w[step * (TILE_ROWS + 1u) + i / STEPS] = element(W_TYPE, word, index);
    }
    for (uint i = gl_LocalInvocationIndex; i < STEPS * TILE_COLUMNS; i += gl_WorkGroupSize.x) {
        uint step = i % STEPS, index = columns[i / STEPS] + (k + step) * p.x.s[0];
        uint word = k + step < p.x.n[0] ? x[X_TYPE == FLOAT_TYPE_F32 ? index : index / 2u] : 0u;
        tile_x[step * (TILE_COLUMNS + 1u) + i / STEPS] = element(X_TYPE, word, index);
    }
}

// To sums: they gain eight products from `begin` on.
void add_chunk(uvec2 lane, uint begin, inout float sums[OWN]) {
    float chunk[OWN];
    [[unroll]] for (uint o = 0u; o < OWN; ++o) {
        chunk[o] = 0.0;
    }
    [[dont_unroll]] for (uint step = begin; step < begin + FLOAT_CHUNK; ++step) {
        float x_values[OWN_COLUMNS];
        [[unroll]] for (uint n = 0u; n < OWN_COLUMNS; ++n) {
            x_values[n] = tile_x[step * (TILE_COLUMNS + 1u) + lane.y * OWN_COLUMNS + n];
        }
        [[unroll]] for (uint m = 0u; m < OWN_ROWS; ++m) {
            float w_value = tile_w[step * (TILE_ROWS + 1u) + m * LANES_ROWS + lane.x];
            [[unroll]] for (uint n = 0u; n < OWN_COLUMNS; ++n) {
                chunk[m * OWN_COLUMNS + n] = add(chunk[m * OWN_COLUMNS + n], multiply(w_value, x_values[n]));
            }
        }
    }
    [[unroll]] for (uint o = 0u; o < OWN; ++o) {
        sums[o] = add(sums[o], chunk[o]);
    }
}

void main() {
    uvec2 lane = uvec2(gl_LocalInvocationIndex % LANES_ROWS, gl_LocalInvocationIndex / LANES_ROWS);
    if (!find_matrix()) {
        return;
    }
    for (uint i = gl_LocalInvocationIndex; i < TILE_COLUMNS; i += gl_WorkGroupSize.x) {
        columns[i] = place(p.x, column_of_x(gl_WorkGroupID.y * TILE_COLUMNS + i));
    }
    barrier();
    uvec4 w_index = matrix_of_w();
    float total[OWN], inner[OWN];
    [[unroll]] for (uint o = 0u; o < OWN; ++o) {
        total[o] = inner[o] = 0.0;
    }
    for (uint k = 0u; k < p.w.n[0]; k += STEPS) {
        load_tiles(w_index, k);
        barrier();
        [[dont_unroll]] for (uint step = 0u; step < STEPS; step += FLOAT_CHUNK) {
            add_chunk(lane, step, inner);
        }
        if (k % SUPERBLOCK == SUPERBLOCK - STEPS || k + STEPS >= p.w.n[0]) {
            [[unroll]] for (uint o = 0u; o < OWN; ++o) {
                total[o] = add(total[o], inner[o]);
                inner[o] = 0.0;
            }
        }
        barrier();
    }
    [[unroll]] for (uint o = 0u; o < OWN; ++o) {
        uint m = gl_WorkGroupID.x * TILE_ROWS + o / OWN_COLUMNS * LANES_ROWS + lane.x;
        store(m, gl_WorkGroupID.y * TILE_COLUMNS + lane.y * OWN_COLUMNS + o % OWN_COLUMNS, total[o]);
    }
}
