// A block of the rows of w and x of a workgroup with matrix units, in shared memory: the block that tiles.glsl decodes.
// Its scales are loaded as matrices with a stride of 0, so that their columns, or rows, are equal.

// Rows in shared memory are padded by 16 bytes, so that neighboring rows lie in different banks.
const uint PITCH = X_BLOCK / 4u + 4u, OUTPUTS = MAT_M * MAT_N, X_BEGIN = TILE_ROWS * PITCH;  // words

#define MatrixW coopmat<int8_t, gl_ScopeSubgroup, MAT_M, MAT_K, gl_MatrixUseA>
#define MatrixX coopmat<int8_t, gl_ScopeSubgroup, MAT_K, MAT_N, gl_MatrixUseB>
#define MatrixI coopmat<int, gl_ScopeSubgroup, MAT_M, MAT_N, gl_MatrixUseAccumulator>
#define MatrixF coopmat<float, gl_ScopeSubgroup, MAT_M, MAT_N, gl_MatrixUseAccumulator>

// Integers of both tiles, [row][word]; at the end results, [subgroup][column][row] of one matrix each.
shared uint tiles[X_BEGIN + TILE_COLUMNS * PITCH];
shared float w_scales[6u * TILE_ROWS], x_scales[3u * TILE_COLUMNS];  // [scale][row]; w's last two: a superblock's

uvec2 corner;  // the subgroup's first row and column of the tile

void keep(uint word, uvec4 low, uvec4 high) {
    [[unroll]] for (uint k = 0u; k < 4u; ++k) {
        tiles[word + k] = low[k];
        tiles[word + k + 4u] = high[k];
    }
}

void keep_w(uint i, uvec4 low, uvec4 high, vec4 scales) {
    keep(i * PITCH, low, high);
    [[unroll]] for (uint k = 0u; k < 4u; ++k) {
        w_scales[k * TILE_ROWS + i] = scales[k];
    }
}

void keep_superblock(uint i, vec2 scale) {
    w_scales[4u * TILE_ROWS + i] = scale.x;
    w_scales[5u * TILE_ROWS + i] = scale.y;
}

void keep_x(uint i, uvec4 low, uvec4 high, vec3 scales) {
    keep(X_BEGIN + i * PITCH, low, high);
    x_scales[i] = scales.x;
    x_scales[TILE_COLUMNS + i] = HAS_HALVES ? scales.y : scales.y + scales.z;
    x_scales[2u * TILE_COLUMNS + i] = HAS_HALVES ? scales.z : 0.0;
}

// Scale k of the rows of w in matrix i, in every column.
MatrixF scale_of_w(uint k, uint i) {
    MatrixF scale;
    coopMatLoad(scale, w_scales, k * TILE_ROWS + corner.x + i * MAT_M, 0u, gl_CooperativeMatrixLayoutColumnMajor);
    return scale;
}

// Scale k of the rows of x in matrix i, in every row.
MatrixF scale_of_x(uint k, uint i) {
    MatrixF scale;
    coopMatLoad(scale, x_scales, k * TILE_COLUMNS + corner.y + i * MAT_N, 0u, gl_CooperativeMatrixLayoutRowMajor);
    return scale;
}
