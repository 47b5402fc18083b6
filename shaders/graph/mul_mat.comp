// y = w x for many rows of x, as tiles.glsl says. An invocation has OWN_ROWS * OWN_COLUMNS outputs.
#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require
#extension GL_EXT_spirv_intrinsics : require
#include "contract.glsl"

MUL_MAT_CONSTANTS
#include "tiles.glsl"

const uint STEPS = X_BLOCK / 4u;  // words of a block
const uint LANES_ROWS = TILE_ROWS / OWN_ROWS, OWN = OWN_ROWS * OWN_COLUMNS;
shared uint tile_w[STEPS * TILE_ROWS], tile_x[STEPS * TILE_COLUMNS];  // (step, row)
shared vec4 w_scales[TILE_ROWS];
shared vec2 superblock_scales[TILE_ROWS];
shared vec3 x_scales[TILE_COLUMNS];

float total[OWN], inner[OWN], minima[OWN];
uvec2 lane;  // the lane's column and row in the grid of lanes, which says which outputs it has

// Row i of the rows of w that an invocation has in the tile: four neighbors, then the next four.
uint tile_row(uint i) {
    return (i / 4u * LANES_ROWS + lane.x) * 4u + i % 4u;
}

void keep_w(uint i, uvec4 low, uvec4 high, vec4 scales) {
    [[unroll]] for (uint k = 0u; k < 4u; ++k) {
        tile_w[k * TILE_ROWS + i] = low[k];
        tile_w[(k + 4u) * TILE_ROWS + i] = high[k];
    }
    w_scales[i] = scales;
}

void keep_superblock(uint i, vec2 scale) {
    superblock_scales[i] = scale;
}

void keep_x(uint i, uvec4 low, uvec4 high, vec3 scales) {
    [[unroll]] for (uint k = 0u; k < 4u; ++k) {
        tile_x[k * TILE_COLUMNS + i] = low[k];
        tile_x[(k + 4u) * TILE_COLUMNS + i] = high[k];
    }
    x_scales[i] = scales;
}

// Dot products of some steps for each output of an invocation.
void dots(uint begin, uint end, out int sum[OWN]) {
    [[unroll]] for (uint o = 0u; o < OWN; ++o) {
        sum[o] = 0;
    }
    for (uint step = begin; step < end; ++step) {
        uint x[OWN_COLUMNS];
        [[unroll]] for (uint n = 0u; n < OWN_COLUMNS; ++n) {
            x[n] = tile_x[step * TILE_COLUMNS + lane.y * OWN_COLUMNS + n];
        }
        [[unroll]] for (uint m = 0u; m < OWN_ROWS; ++m) {
            uint w = tile_w[step * TILE_ROWS + tile_row(m)];
            [[unroll]] for (uint n = 0u; n < OWN_COLUMNS; ++n) {
                sum[m * OWN_COLUMNS + n] = dot4(w, x[n], sum[m * OWN_COLUMNS + n]);
            }
        }
    }
}

void add_block() {
    int first[OWN], second[OWN];
    dots(0u, HALVES ? STEPS / 2u : STEPS, first);
    if (HALVES) {
        dots(STEPS / 2u, STEPS, second);
    }
    [[unroll]] for (uint o = 0u; o < OWN; ++o) {
        vec4 w = w_scales[tile_row(o / OWN_COLUMNS)];
        vec3 x = x_scales[lane.y * OWN_COLUMNS + o % OWN_COLUMNS];
        add_products(w, x, vec2(first[o], second[o]), IS_MXFP4, inner[o], minima[o]);
    }
}

void end_superblock() {
    [[unroll]] for (uint o = 0u; o < OWN; ++o) {
        total[o] = add(total[o], superblock_sum(superblock_scales[tile_row(o / OWN_COLUMNS)], inner[o], minima[o]));
        inner[o] = minima[o] = 0.0;
    }
}

void main() {
    lane = uvec2(gl_LocalInvocationIndex % LANES_ROWS, gl_LocalInvocationIndex / LANES_ROWS);
    [[unroll]] for (uint o = 0u; o < OWN; ++o) {
        total[o] = inner[o] = minima[o] = 0.0;
    }
    if (!add_blocks()) {
        return;
    }
    [[unroll]] for (uint o = 0u; o < OWN; ++o) {
        uint m = gl_WorkGroupID.x * TILE_ROWS + tile_row(o / OWN_COLUMNS);
        store(m, gl_WorkGroupID.y * TILE_COLUMNS + lane.y * OWN_COLUMNS + o % OWN_COLUMNS, total[o]);
    }
}
