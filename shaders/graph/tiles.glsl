// Quantized weights times many rows of x, in tiles, with the sums that zinc_attn/graph/products.py defines.
//
// A workgroup has TILE_ROWS rows of w and TILE_COLUMNS rows of x. It walks along a row block by block, ascending: it
// decodes a block of its rows of w and x to shared memory, and then adds that block to the sums of its outputs. The
// including kernel has the constants TYPE, TILE_ROWS, TILE_COLUMNS, ADD and EXPERTS, and these functions:
void keep_w(uint i, uvec4 low, uvec4 high, vec4 scales);       // row i of w: its integers, and block_scales
void keep_superblock(uint i, vec2 scale);                      // row i of w: its superblock_scale
void keep_x(uint i, uvec4 low, uvec4 high, vec3 scales);       // row i of x: its integers, scales_of_x
void add_block();
void end_superblock();

const bool TILED = true, HALVES = TYPE == WEIGHT_TYPE_Q6_K;
const bool SCALED = TYPE == WEIGHT_TYPE_Q2_K || TYPE == WEIGHT_TYPE_Q3_K;
const uint AHEAD = 0u, GLU = 0u;
#include "products.glsl"

// Words of decoded values as the weights' integers. No byte borrows from its neighbor.
uvec4 as_signed(uvec4 w) {
    return OFFSET == 0 ? w : ((w | 0x80808080u) - uint(OFFSET) * 0x01010101u) ^ 0x80808080u;
}

// The weights' integers times their scale, if the products fit in bytes: q2_K's are 0 ... 45, q3_K's, with the sign
// changed, -128 ... 124.
uvec4 scaled(uvec4 w, float scale) {
    if (!SCALED) {
        return as_signed(w);
    }
    int s = int(TYPE == WEIGHT_TYPE_Q3_K ? -scale : scale);
    uint more = uint(128 - OFFSET * s) * 0x00010001u;  // so that 16 bits for each byte are no less than 0
    uvec4 even = (w & 0x00FF00FFu) * uint(s) + more, odd = (w >> 8 & 0x00FF00FFu) * uint(s) + more;
    return (even | odd << 8) ^ 0x80808080u;
}

shared uint numbers[TILE_COLUMNS];  // of columns in x

// Block j of the superblock goes to shared memory, for all rows of the tile.
void load_tiles(uint j) {
    for (uint i = gl_LocalInvocationIndex; i < TILE_ROWS; i += gl_WorkGroupSize.x) {
        uint m = min(gl_WorkGroupID.x * TILE_ROWS + i, p.y.n[0] - 1u);
        row = find_row(m / WEIGHT_GROUP, m % WEIGHT_GROUP);
        uvec4 low, high;
        decode(j, low, high);
        vec4 four_scales = block_scales(j);
        keep_w(i, scaled(low, four_scales.x), scaled(high, four_scales.y), four_scales);
        if (IS_256 && j == 0u) {
            keep_superblock(i, TYPE == WEIGHT_TYPE_Q3_K ? -superblock_scale() : superblock_scale());
        }
    }
    uint other = (gl_LocalInvocationIndex + gl_WorkGroupSize.x - TILE_ROWS % gl_WorkGroupSize.x) % gl_WorkGroupSize.x;
    for (uint i = other; i < TILE_COLUMNS; i += gl_WorkGroupSize.x) {  // lanes without a row of w come first
        uint x_block = (superblock * 8u + j) * rows_of_x() + numbers[i];
        keep_x(i, q[2u * x_block], q[2u * x_block + 1u], scales_of_x(scales[x_block]));
    }
}

// Add all blocks of a row. False where the workgroup has no matrix.
bool add_blocks() {
    if (!find_matrix()) {
        return false;
    }
    for (uint i = gl_LocalInvocationIndex; i < TILE_COLUMNS; i += gl_WorkGroupSize.x) {
        numbers[i] = number_in_x(gl_WorkGroupID.y * TILE_COLUMNS + i);
    }
    barrier();
    fill_table();
    for (uint b = 0u; b < p.blocks; ++b) {
        superblock = b / 8u;
        load_tiles(b % 8u);
        barrier();
        add_block();
        if (b % 8u == 7u || b + 1u == p.blocks) {
            end_superblock();
        }
        barrier();
    }
    return true;
}
