// Quantized weights in layout R32 (zinc_attn/graph/pieces.py): where the pieces of a superblock of 256 values lie.
//
// A piece is 16, 4, 2 or 1 bytes. Pieces are numbered in a superblock: for a type of 256 values the pieces of its
// block, for a type of 32 values the pieces of blocks 0 ... 7 one after another. A decoder calls piece16, piece4 and
// small_piece, of products.glsl, for the superblock `superblock` of the row `row`.
const uint PIECES_16 = WEIGHT_PIECES_16(TYPE), PIECES_4 = WEIGHT_PIECES_4(TYPE);
const uint BLOCKS = SUPERBLOCK / WEIGHT_VALUES(TYPE);  // ggml's blocks in a superblock
const bool IS_256 = BLOCKS == 1u;
const bool HAS_SMALL = WEIGHT_SIZE(TYPE) % 4u != 0u;  // a piece of 2 bytes or 1
const bool IS_MXFP4 = TYPE == WEIGHT_TYPE_MXFP4;
const bool HAS_TABLE = TYPE == WEIGHT_TYPE_IQ4_NL || TYPE == WEIGHT_TYPE_IQ4_XS || IS_MXFP4;
const bool HAS_MINIMUM = WEIGHT_MINIMUM(TYPE) == 1u;
const bool HAS_HALVES = WEIGHT_HALVES(TYPE) == 1u;  // scales of 16 values
// The number by which decoded bytes are larger than the weights' integers.
const int OFFSET = TYPE == WEIGHT_TYPE_Q4_0   ? 8
                   : TYPE == WEIGHT_TYPE_Q5_0 ? 16
                   : TYPE == WEIGHT_TYPE_Q6_K ? 32
                   : TYPE == WEIGHT_TYPE_Q3_K ? 4
                                              : 0;

// --- places ----------------------------------------------------------------------------------------------------------

// A row in its group of 32: pieces of 16 bytes begin at `begin` in units of 16 bytes.
struct Row {
    uint begin;
    uint width;   // rows of the group
    uint lane;    // the row's number in it
    uint blocks;  // ggml's blocks of a row
};

// Where the workgroup's matrix begins.
uint matrix_begin() {
    if (EXPERTS != 0u) {
        return p.w_begin + matrix * p.w_steps[0];
    }
    uint plane = gl_WorkGroupID.z % p.y.n[2] / p.repeats[0], block = gl_WorkGroupID.z / p.y.n[2] / p.repeats[1];
    return p.w_begin + plane * p.w_steps[0] + block * p.w_steps[1];
}

// Row `lane` of a group of the workgroup's matrix. After the matrix's last row this row repeats.
Row find_row(uint group, uint lane) {
    uint width = min(WEIGHT_GROUP, p.y.n[0] - group * WEIGHT_GROUP), blocks = p.blocks * X_BLOCK / WEIGHT_VALUES(TYPE);
    uint units = WEIGHT_GROUP / 16u * WEIGHT_SIZE(TYPE) * blocks;
    return Row(matrix_begin() + group * units, width, min(lane, width - 1u), blocks);
}

Row row;  // the row whose pieces are loaded

// Where piece i of the superblock lies. A block has `each` pieces of this size, from `begin` on. After the row's last
// block this block repeats.
uint place_of_piece(uint begin, uint each, uint i) {
    uint b = min(superblock * BLOCKS + i / each, row.blocks - 1u);
    return begin + row.lane + (i % each * row.blocks + b) * row.width;
}

// up: of the matrix that a GLU multiplies by, in place of its gate.
uvec4 load_16(bool up, uint i) {
    uint index = place_of_piece(row.begin, PIECES_16, i);
    if (GLU > 0u && up) {
        return up16[index];
    }
    return w16[index];
}

// Where pieces of 4 bytes begin, in words.
uint begin_4() {
    return 4u * (row.begin + PIECES_16 * row.blocks * row.width);
}

uint word_of(bool up, uint index) {
    if (GLU > 0u && up) {
        return up4[index];
    }
    return w4[index];
}

uint load_4(bool up, uint i) {
    return word_of(up, place_of_piece(begin_4(), PIECES_4, i));
}

// The 16 bits of the scale of block j, or mxfp4's exponent of 8 bits.
uint load_small(bool up, uint j) {
    uint bits = TYPE == WEIGHT_TYPE_MXFP4 ? 8u : 16u, begin = begin_4() + PIECES_4 * row.blocks * row.width;
    uint index = place_of_piece(32u / bits * begin, 1u, j);
    return bitfieldExtract(word_of(up, index / (32u / bits)), int(index * bits & 31u), int(bits));
}
