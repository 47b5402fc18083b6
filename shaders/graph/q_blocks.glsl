// Quantized weights in layout R32 (zinc_attn/graph/pieces.py): where pieces lie, and a decoder for each type.
//
// Who includes this has the constant TYPE, the parameters p, and the binding W as uvec4 w16[] and as uint w4[].
// Pieces are numbered in a superblock of 256 values: of a type of 256 values those of its block, of a type of 32 those of
// blocks 0 ... 7, one behind the other.  Who includes this has these functions, too, which give pieces of 16, 4 and 2 or
// 1 bytes of the superblock `superblock` of the row `row`, as load_16, load_4 and load_small find them:
uvec4 piece16(uint i);
uint piece4(uint i);
uint small_piece(uint j);

const uint PIECES_16 = WEIGHT_PIECES_16(TYPE), PIECES_4 = WEIGHT_PIECES_4(TYPE);
const uint BLOCKS = SUPERBLOCK / WEIGHT_VALUES(TYPE);  // of ggml's in a superblock
const bool IS_256 = BLOCKS == 1u;
const bool HAS_SMALL = WEIGHT_SIZE(TYPE) % 4u != 0u;  // a piece of 2 bytes or 1
const bool HAS_TABLE = TYPE == WEIGHT_TYPE_IQ4_NL || TYPE == WEIGHT_TYPE_IQ4_XS || TYPE == WEIGHT_TYPE_MXFP4;
const bool HAS_MINIMUM = TYPE == WEIGHT_TYPE_Q4_1 || TYPE == WEIGHT_TYPE_Q5_1 || TYPE == WEIGHT_TYPE_Q2_K ||
                         TYPE == WEIGHT_TYPE_Q4_K || TYPE == WEIGHT_TYPE_Q5_K;
// Scales of 16 values; other types of 256 values have scales of 32.
const bool HAS_HALVES = TYPE == WEIGHT_TYPE_Q2_K || TYPE == WEIGHT_TYPE_Q3_K || TYPE == WEIGHT_TYPE_Q6_K;
// Decoded bytes are so much larger than the weights' integers.
const int OFFSET = TYPE == WEIGHT_TYPE_Q4_0   ? 8
                   : TYPE == WEIGHT_TYPE_Q5_0 ? 16
                   : TYPE == WEIGHT_TYPE_Q6_K ? 32
                   : TYPE == WEIGHT_TYPE_Q3_K ? 4
                                              : 0;

// --- places -----------------------------------------------------------------------------------------------------------

// A row in its group of 32: pieces of 16 bytes begin at `begin` in units of 16 bytes.
struct Row {
    uint begin;
    uint width;   // rows of the group
    uint lane;    // the row's number in it
    uint blocks;  // ggml's, of a row
};

// Where the workgroup's matrix begins.
uint matrix_begin() {
    uint plane = gl_WorkGroupID.z % p.y.n[2] / p.repeats[0], block = gl_WorkGroupID.z / p.y.n[2] / p.repeats[1];
    return p.w_begin + plane * p.w_steps[0] + block * p.w_steps[1];
}

// Row `lane` of a group of the workgroup's matrix; a row that the matrix does not have is the group's last.
Row find_row(uint group, uint lane) {
    uint width = min(WEIGHT_GROUP, p.y.n[0] - group * WEIGHT_GROUP), blocks = p.blocks * X_BLOCK / WEIGHT_VALUES(TYPE);
    uint units = WEIGHT_GROUP / 16u * WEIGHT_SIZE(TYPE) * blocks;
    return Row(matrix_begin() + group * units, width, min(lane, width - 1u), blocks);
}

Row row;          // whose pieces are loaded
uint superblock;  // and of which superblock

// Where piece i of the superblock lies, which has `each` a block, when those of its size begin at `begin`.  Of a block
// that the row does not have, its last one's.
uint place_of_piece(uint begin, uint each, uint i) {
    uint b = min(superblock * BLOCKS + i / each, row.blocks - 1u);
    return begin + (i % each * row.blocks + b) * row.width + row.lane;
}

uvec4 load_16(uint i) {
    return w16[place_of_piece(row.begin, PIECES_16, i)];
}

// Where pieces of 4 bytes begin, in words.
uint begin_4() {
    return 4u * (row.begin + PIECES_16 * row.blocks * row.width);
}

uint load_4(uint i) {
    return w4[place_of_piece(begin_4(), PIECES_4, i)];
}

// The 16 bits of the scale of block j, or mxfp4's exponent of 8 bits.
uint load_small(uint j) {
    uint bits = TYPE == WEIGHT_TYPE_MXFP4 ? 8u : 16u, begin = begin_4() + PIECES_4 * row.blocks * row.width;
    uint at = place_of_piece(32u / bits * begin, 1u, j);
    return bitfieldExtract(w4[at / (32u / bits)], int(at % (32u / bits) * bits), int(bits));
}

// --- values -----------------------------------------------------------------------------------------------------------

// The bits of every byte from `from` on that `mask` has from bit `to` on.
uvec4 bits(uvec4 w, uint from, uint to, uint mask) {
    return (from >= to ? w >> (from - to) : w << (to - from)) & mask;
}

// Bits 0 ... 3 become bits 4 of four bytes.
uint spread(uint bits) {
    return ((bits & 15u) * 0x00204081u & 0x01010101u) << 4;
}

uvec4 spread_16(uint bits) {
    return uvec4(spread(bits), spread(bits >> 4), spread(bits >> 8), spread(bits >> 12));
}

const uint NIBBLES = 0x0F0F0F0Fu;
const uvec4 TABLE = TYPE == WEIGHT_TYPE_MXFP4 ? MXFP4 : IQ4_NL;

#ifdef DOT_PRODUCT
shared uint table[256];  // entries of the low half and the high half of a byte, in bytes 0 and 2

uint table_entry(uint q) {
    return bitfieldExtract(TABLE[q >> 2], int(8u * (q & 3u)), 8);
}

void fill_table() {
    if (HAS_TABLE) {
        for (uint i = gl_LocalInvocationIndex; i < 256u; i += gl_WorkGroupSize.x) {
            table[i] = table_entry(i & 15u) | table_entry(i >> 4) << 16;
        }
        barrier();
    }
}

void look_up(uint w, out uint low, out uint high) {
    uint even = table[w & 255u] | table[bitfieldExtract(w, 8, 8)] << 8;
    uint odd = table[bitfieldExtract(w, 16, 8)] | table[w >> 24] << 8;
    low = (even & 0xFFFFu) | odd << 16;
    high = even >> 16 | (odd & 0xFFFF0000u);
}
#else
void fill_table() {}

uint looked_up(uint nibbles) {
    uint found = 0u;
    for (int i = 0; i < 32; i += 8) {
        uint q = bitfieldExtract(nibbles, i, 4);
        found |= bitfieldExtract(TABLE[q >> 2], int(8u * (q & 3u)), 8) << i;
    }
    return found;
}

void look_up(uint w, out uint low, out uint high) {
    low = looked_up(w & NIBBLES);
    high = looked_up(w >> 4 & NIBBLES);
}
#endif

// Values of block j of 32 of a superblock, as bytes: the first 16, and the others.
void decode(uint j, out uvec4 low, out uvec4 high) {
    if (TYPE == WEIGHT_TYPE_Q8_0) {
        low = piece16(2u * j);
        high = piece16(2u * j + 1u);
    } else if (TYPE == WEIGHT_TYPE_Q2_K || TYPE == WEIGHT_TYPE_Q3_K) {
        uint first = TYPE == WEIGHT_TYPE_Q2_K ? 1u : 2u, at = first + 2u * (j / 4u), shift = 2u * (j % 4u);
        low = bits(piece16(at), shift, 0u, 0x03030303u);
        high = bits(piece16(at + 1u), shift, 0u, 0x03030303u);
        if (TYPE == WEIGHT_TYPE_Q3_K) {
            low |= bits(piece16(0u), j, 2u, 0x04040404u);
            high |= bits(piece16(1u), j, 2u, 0x04040404u);
        }
    } else if (TYPE == WEIGHT_TYPE_Q4_K || TYPE == WEIGHT_TYPE_Q5_K) {
        uint at = (TYPE == WEIGHT_TYPE_Q4_K ? 1u : 3u) + 2u * (j / 2u), shift = 4u * (j % 2u);
        low = bits(piece16(at), shift, 0u, NIBBLES);
        high = bits(piece16(at + 1u), shift, 0u, NIBBLES);
        if (TYPE == WEIGHT_TYPE_Q5_K) {
            low |= bits(piece16(1u), j, 4u, 0x10101010u);
            high |= bits(piece16(2u), j, 4u, 0x10101010u);
        }
    } else if (TYPE == WEIGHT_TYPE_Q6_K) {
        uint at = 4u * (j / 4u) + 2u * (j % 2u), more = 8u + 2u * (j / 4u), shift = 4u * (j % 4u / 2u);
        low = bits(piece16(at), shift, 0u, NIBBLES) | bits(piece16(more), 2u * (j % 4u), 4u, 0x30303030u);
        high = bits(piece16(at + 1u), shift, 0u, NIBBLES) | bits(piece16(more + 1u), 2u * (j % 4u), 4u, 0x30303030u);
    } else {
        uvec4 w = piece16(j);
        if (HAS_TABLE) {
            look_up(w.x, low.x, high.x);
            look_up(w.y, low.y, high.y);
            look_up(w.z, low.z, high.z);
            look_up(w.w, low.w, high.w);
            return;
        }
        low = w & NIBBLES;
        high = w >> 4 & NIBBLES;
        if (PIECES_4 > 0u && TYPE != WEIGHT_TYPE_Q4_1) {
            uint fifth = piece4(TYPE == WEIGHT_TYPE_Q5_1 ? 2u * j : j);
            low |= spread_16(fifth);
            high |= spread_16(fifth >> 16);
        }
    }
}

// --- scales -----------------------------------------------------------------------------------------------------------

// What a type of 32 values multiplies block j by, and its minimum.
vec2 scale_32(uint j) {
    if (TYPE == WEIGHT_TYPE_Q4_1 || TYPE == WEIGHT_TYPE_Q5_1) {
        return unpackHalf2x16(piece4(TYPE == WEIGHT_TYPE_Q4_1 ? j : 2u * j + 1u));
    }
    if (TYPE == WEIGHT_TYPE_MXFP4) {
        uint exponent = small_piece(j);  // 2**(exponent - 128)
        return vec2(exponent < 2u ? 0.0 : uintBitsToFloat((exponent - 1u) << 23), 0.0);
    }
    return vec2(unpackHalf2x16(small_piece(j)).x, 0.0);
}

// Of a type of 256 values: d and the factor of its minima.
vec2 superblock_scale() {
    if (TYPE == WEIGHT_TYPE_Q3_K || TYPE == WEIGHT_TYPE_Q6_K) {
        return vec2(unpackHalf2x16(small_piece(0u)).x, 0.0);
    }
    return unpackHalf2x16(TYPE == WEIGHT_TYPE_Q2_K || TYPE == WEIGHT_TYPE_IQ4_XS ? piece4(0u) : piece16(0u).x);
}

float byte_of(uint w, uint i) {
    return float(bitfieldExtract(w, int(8u * i), 8));
}

float signed_byte(uint w, uint i) {
    return float(bitfieldExtract(int(w), int(8u * i), 8));
}

// The scale and the minimum of block j; of a type of 256 values the scales of both halves, and their minima.
vec4 block_scales(uint j) {
    if (!IS_256) {
        return vec4(scale_32(j), 0.0, 0.0);
    }
    if (TYPE == WEIGHT_TYPE_Q2_K) {
        uint both = bitfieldExtract(piece16(0u)[j / 2u], int(16u * (j % 2u)), 16);
        return vec4(both & 15u, bitfieldExtract(both, 8, 4), bitfieldExtract(both, 4, 4), both >> 12);
    }
    if (TYPE == WEIGHT_TYPE_Q3_K) {  // 6 bits: low ones in words 0 and 1, the others in word 2
        uint low = piece4(j / 2u % 2u) >> 4u * (j / 4u) & NIBBLES, high = piece4(2u) >> 2u * (j / 2u);
        uint four = low | (high & 0x03030303u) << 4, i = 2u * (j % 2u);
        return vec4(byte_of(four, i) - 32.0, byte_of(four, i + 1u) - 32.0, 0.0, 0.0);
    }
    if (TYPE == WEIGHT_TYPE_Q6_K) {
        uint four = piece16(12u)[j / 2u], i = 2u * (j % 2u);
        return vec4(signed_byte(four, i), signed_byte(four, i + 1u), 0.0, 0.0);
    }
    if (TYPE == WEIGHT_TYPE_IQ4_XS) {
        uint low = bitfieldExtract(piece4(1u), int(4u * j), 4), high = bitfieldExtract(piece4(0u), int(16u + 2u * j), 2);
        return vec4(float(low | high << 4) - 32.0, 0.0, 0.0, 0.0);
    }
    uvec4 h = piece16(0u);  // q4_K and q5_K: 6 bits, the low 4 of the last four scales and minima in word w
    uint scales = j < 4u ? h.y & 0x3F3F3F3Fu : (h.w & NIBBLES) | (h.y >> 2 & 0x30303030u);
    uint minima = j < 4u ? h.z & 0x3F3F3F3Fu : (h.w >> 4 & NIBBLES) | (h.z >> 2 & 0x30303030u);
    return vec4(byte_of(scales, j % 4u), 0.0, byte_of(minima, j % 4u), 0.0);
}

// --- sums -------------------------------------------------------------------------------------------------------------

// Of a block of x: the sums of both halves; its scale and these.
ivec2 sums_of_x(uvec2 words) {
    return ivec2(bitfieldExtract(int(words.y), 0, 16), int(words.y) >> 16);
}

vec3 scales_of_x(uvec2 words) {
    return vec3(uintBitsToFloat(words.x), sums_of_x(words));
}

// A block joins the sums of its superblock: of weights, and of minima of a type of 256 values.  w: its
// block_scales; x: the scale of its block, and the sums of both halves; dots: dot products of both halves, or their sum.
void join(vec4 w, vec3 x, vec2 dots, inout float sum, inout float low) {
    if (IS_256) {
        sum = add(sum, multiply(x.x, HAS_HALVES ? w.x * dots.x + w.y * dots.y : w.x * dots.x));  // whole numbers
        if (HAS_MINIMUM) {
            low = add(low, multiply(x.x, HAS_HALVES ? w.z * x.y + w.w * x.z : w.z * (x.y + x.z)));
        }
    } else {
        float both = multiply(w.x, x.x);
        sum = add(sum, multiply(TYPE == WEIGHT_TYPE_MXFP4 ? flush(both) : both, dots.x));
        if (HAS_MINIMUM) {
            sum = add(sum, multiply(multiply(w.y, x.x), x.y + x.z));
        }
    }
}

// The superblock's sum. scale: superblock_scale.
float joined(vec2 scale, float sum, float low) {
    float scaled = IS_256 ? flush(multiply(scale.x, sum)) : sum;
    return IS_256 && HAS_MINIMUM ? add(scaled, -flush(multiply(scale.y, low))) : scaled;
}
