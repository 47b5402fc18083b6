// Operations that move elements: each element of y is an element of x, with the same bits or converted to another type.
//
//   An invocation has the elements of a row that lie in a word of y, or a single element if y's elements are not
//   neighbors. It stores a whole word. Of a part of a word it changes only its bits, by atomics, because other
//   invocations may write the other bits at the same time.
#version 450
#extension GL_GOOGLE_include_directive : require
#include "contract.glsl"

layout(local_size_x = 256) in;
MOVE_CONSTANTS
layout(set = 0, binding = MOVE_BIND_PARAMS, std430) restrict readonly buffer Params { MoveParams p; };
layout(set = 0, binding = MOVE_BIND_X, std430) readonly buffer X { uint x[]; };
layout(set = 0, binding = MOVE_BIND_IDS, std430) readonly buffer Ids { uint ids[]; };
layout(set = 0, binding = MOVE_BIND_Y, std430) buffer Y { uint y[]; };
#include "tensor.glsl"
#include "numbers.glsl"
#include "float_types.glsl"
#include "rows.glsl"

const uint ALL = 0xFFFFFFFFu;  // the types of FLOAT_TYPES are the first of MOVE_TYPES

// The pieces of a block in ggml's order: float16 numbers, fifth bits, values.
const uint TYPE = SOURCE == MOVE_TYPE_Q8_0     ? WEIGHT_TYPE_Q8_0
                  : SOURCE == MOVE_TYPE_IQ4_NL ? WEIGHT_TYPE_IQ4_NL
                                               : SOURCE - MOVE_TYPE_Q4_0;  // in the order of WEIGHT_TYPES
uint block;  // half word where the block begins

uint small_half(uint i) {
    return x_bits(block + (TYPE == WEIGHT_TYPE_Q5_0 ? i + 1u : TYPE == WEIGHT_TYPE_Q5_1 ? i ^ 2u : i), 16u);
}

uint last_piece() {
    return x_bits(block, 16u);
}

uint byte_at(uint i) {
    bool minimum = TYPE == WEIGHT_TYPE_Q4_1 || TYPE == WEIGHT_TYPE_Q5_1;
    bool fifths = TYPE == WEIGHT_TYPE_Q5_0 || TYPE == WEIGHT_TYPE_Q5_1;
    return x_bits(2u * block + (minimum ? 4u : 2u) + (fifths ? 4u : 0u) + i, 8u);
}

#include "block_values.glsl"

// The bits that x's element `index` has in y.
uint converted(uvec4 index) {
    float value;
    if (SOURCE < MOVE_TYPE_Q8_0) {
        uint bits = x_bits(place(p.x, index), bits_of(SOURCE));
        if (SOURCE == TARGET) {
            return bits;
        }
        value = SOURCE == MOVE_TYPE_I32 ? float(int(bits)) : widened(bits, SOURCE, 0u);
    } else {
        block = place(p.x, uvec4(index.x / BLOCK, index.yzw));
        value = value_of_32(index.x % BLOCK);
    }
    if (TARGET == MOVE_TYPE_I32) {  // toward zero; a value that int32 does not have is -2**31
        return (floatBitsToUint(value) & MAGNITUDE) < 0x4F000000u ? uint(int(value)) : 0x80000000u;
    }
    return encoded(value, TARGET);
}

// The bits of y's element `index`. x_row: the row of x, for GET_ROWS and SET_ROWS.
uint moved(uvec4 index, uint x_row) {
    uvec4 shift = uvec4(p.shift[0], p.shift[1], p.shift[2], p.shift[3]), sizes = sizes_of(p.x);
    if (OP == MOVE_OP_LINEAR && sizes_of(p.y) == sizes) {
        return converted(index);
    }
    if (OP == MOVE_OP_LINEAR) {
        return converted(indices(p.x, index.x + p.y.n[0] * (index.y + p.y.n[1] * (index.z + p.y.n[2] * index.w))));
    }
    if (OP == MOVE_OP_WRAP) {
        return converted((index + shift) % sizes);
    }
    if (OP == MOVE_OP_PAD) {
        return all(lessThan(index + shift, sizes)) ? converted(index + shift) : 0u;
    }
    return x_row == ALL ? ALL >> (32u - bits_of(TARGET)) : converted(uvec4(index.x, x_row, index.zw));
}

void main() {
    uint size = bits_of(TARGET), per_word = 32u / size;
    bool dense = p.y.s[0] == 1u;
    uint columns = p.y.n[0], lanes = dense ? (columns + per_word - 2u) / per_word + 1u : columns;
    uint row = linear_id() / lanes, lane = linear_id() % lanes, x_row = 0u;
    uvec4 index = OP == MOVE_OP_SET_ROWS ? row_indices(p.x, row) : row_indices(p.y, row);
    if (index.w >= (OP == MOVE_OP_SET_ROWS ? p.x.n[3] : p.y.n[3])) {
        return;
    }
    if (OP == MOVE_OP_SET_ROWS) {
        x_row = index.y;
        index.y = named_row(index, p.y.n[1], p.id_words);
        if (index.y == ALL) {
            return;
        }
    }
    if (OP == MOVE_OP_GET_ROWS) {
        x_row = named_row(index, p.x.n[1], p.id_words);
    }
    uint begin = place(p.y, index), bits = 0u, mask = 0u;
    uint first = dense ? lane * per_word - begin % per_word : lane;  // element; numbers before the row wrap to the end
    for (uint k = 0u; k < (dense ? per_word : 1u); ++k) {
        index.x = first + k;
        if (index.x < columns) {
            uint shift = (begin + index.x * p.y.s[0]) % per_word * size;
            bits |= moved(index, x_row) << shift;
            mask |= ALL >> (32u - size) << shift;
        }
    }
    uint word = dense ? begin / per_word + lane : (begin + lane * p.y.s[0]) / per_word;
    if (mask == ALL) {
        y[word] = bits;
    } else if (mask != 0u) {
        atomicAnd(y[word], ~mask);
        atomicOr(y[word], bits);
    }
}
