// Float rows become ggml's blocks of 32 values, with the bits of cache/blocks.py: rows of quantized caches.
//
//   A lane has a block.
//   load       the workgroup's 32 blocks go to shared memory; neighboring lanes read neighboring values
//   measure    the block's float16 numbers, and the factors of its stored numbers
//   number     each value's number, in the value's place
//   write      the block's words; of a word that a neighbor shares, only the block's half changes
//
// Magnitudes below 2**-40 count as 0. A block gets NaN for its float16 numbers, and 0 for its stored numbers, if it has
// a NaN, or a magnitude whose scale or minimum no float16 holds. So its values read as NaN.
#version 450
#extension GL_GOOGLE_include_directive : require
#include "contract.glsl"

layout(local_size_x = 32) in;
TO_BLOCKS_CONSTANTS
layout(set = 0, binding = TO_BLOCKS_BIND_PARAMS, std430) restrict readonly buffer Params { ToBlocksParams p; };
layout(set = 0, binding = TO_BLOCKS_BIND_X, std430) readonly buffer X { uint x[]; };
layout(set = 0, binding = TO_BLOCKS_BIND_IDS, std430) readonly buffer Ids { uint ids[]; };
layout(set = 0, binding = TO_BLOCKS_BIND_Y, std430) buffer Y { uint y[]; };
#include "tensor.glsl"
#include "numbers.glsl"
#include "float_types.glsl"
#include "rows.glsl"

const uint STORAGE = TARGET == MOVE_TYPE_Q8_0   ? STORAGE_Q8_0
                     : TARGET == MOVE_TYPE_Q4_0 ? STORAGE_Q4_0
                     : TARGET == MOVE_TYPE_Q4_1 ? STORAGE_Q4_1
                     : TARGET == MOVE_TYPE_Q5_0 ? STORAGE_Q5_0
                     : TARGET == MOVE_TYPE_Q5_1 ? STORAGE_Q5_1
                                                : STORAGE_IQ4_NL;

bool is(uint storage) {
    return STORAGE == storage;
}

#include "../quantize.glsl"

const uint HALVES = STORAGE == STORAGE_Q4_1 || STORAGE == STORAGE_Q5_1 ? 2u : 1u;
const uint FIFTHS = STORAGE == STORAGE_Q5_0 || STORAGE == STORAGE_Q5_1 ? 2u : 0u;  // half words
const uint BLOCK_HALVES = HALVES + FIFTHS + (STORAGE == STORAGE_Q8_0 ? 16u : 8u);
const float STEPS = STORAGE == STORAGE_Q8_0     ? 127.0
                    : STORAGE == STORAGE_IQ4_NL ? 100.0
                    : STORAGE == STORAGE_Q5_0   ? 16.0
                    : STORAGE == STORAGE_Q4_0   ? 8.0
                                                : 1.0;

void load(uint first, uint blocks) {
    uint lane = gl_LocalInvocationID.x;
    for (uint i = 0u; i < WAVE; ++i) {
        uint bits = 0u;
        if (first + i < blocks) {
            bits = floatBitsToUint(LOAD(x, SOURCE, place(p.x, indices(p.x, (first + i) * BLOCK + lane))));
        }
        staged[staged_at(i, lane)] = (bits & MAGNITUDE) < 0x2B800000u ? 0u : bits;  // 2**-40
    }
}

// Byte i of a block's values.
uint value_byte(uint lane, uint i) {
    uint low = staged[staged_at(lane, i)];
    return STORAGE == STORAGE_Q8_0 ? low : (low & 15u) | (staged[staged_at(lane, i + 16u)] & 15u) << 4u;
}

// Half word i of a block.
uint block_half(uint lane, uint i, uint halves, uint fifths) {
    uint value = 2u * (i - HALVES - FIFTHS);
    uint shared_part = i < HALVES ? halves >> (16u * i) : fifths >> (16u * (i - HALVES));
    return i < HALVES + FIFTHS ? shared_part & 0xFFFFu : value_byte(lane, value) | value_byte(lane, value + 1u) << 8u;
}

void write(uint lane, uint begin, uint halves, uint fifths) {
    for (uint word = begin / 2u; word <= (begin + BLOCK_HALVES - 1u) / 2u; ++word) {
        uint low = 2u * word - begin, high = low + 1u;  // the half before the block wraps to the end
        uint bits = 0u, mask = 0u;
        if (low < BLOCK_HALVES) {
            bits = block_half(lane, low, halves, fifths);
            mask = 0xFFFFu;
        }
        if (high < BLOCK_HALVES) {
            bits |= block_half(lane, high, halves, fifths) << 16u;
            mask |= 0xFFFF0000u;
        }
        if (mask == 0xFFFFFFFFu) {
            y[word] = bits;
        } else {
            atomicAnd(y[word], ~mask);
            atomicOr(y[word], bits);
        }
    }
}

void main() {
    uint lane = gl_LocalInvocationID.x, blocks = elements(p.x) / BLOCK;
    uint first = (gl_WorkGroupID.y * gl_NumWorkGroups.x + gl_WorkGroupID.x) * WAVE, block = first + lane;
    load(first, blocks);
    barrier();
    if (block >= blocks) {
        return;
    }
    uvec4 index = indices(p.y, block);
    if (OP == MOVE_OP_SET_ROWS) {
        index = row_indices(p.x, block / p.y.n[0]);
        index.xy = uvec2(block % p.y.n[0], named_row(index, p.y.n[1], p.id_words));
        if (index.y == 0xFFFFFFFFu) {
            return;
        }
    }
    uint largest = 0u, fifths = 0u;
    for (uint i = 0u; i < BLOCK; ++i) {
        largest = max(largest, staged[staged_at(lane, i)] & MAGNITUDE);
    }
    bool fits = largest <= floatBitsToUint(65504.0 * STEPS);
    Measures by = measure(lane);
    for (uint i = 0u; i < BLOCK; ++i) {
        uint number = fits ? block_number(staged[staged_at(lane, i)], by) & 0xFFu : 0u;
        fifths |= (number >> 4u & 1u) << i;
        staged[staged_at(lane, i)] = number;
    }
    write(lane, place(p.y, index), fits ? block_halves(by) : 0x7E007E00u, fifths);
}
