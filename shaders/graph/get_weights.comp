// Rows of quantized weights in layout R32 (zinc_attn/graph/pieces.py) as float32: the values of ggml's blocks.
//
//   value = (d * scale) * q - minimum, each operation rounded. d * scale is exact; types of 32 values have scale 1.
#version 450
#extension GL_GOOGLE_include_directive : require
#include "contract.glsl"

layout(local_size_x = 256) in;
GET_WEIGHTS_CONSTANTS
layout(set = 0, binding = GET_WEIGHTS_BIND_PARAMS, std430) restrict readonly buffer Params { GetWeightsParams p; };
layout(set = 0, binding = GET_WEIGHTS_BIND_W, std430) readonly buffer W { uint x[]; };
layout(set = 0, binding = GET_WEIGHTS_BIND_IDS, std430) readonly buffer Ids { uint ids[]; };
layout(set = 0, binding = GET_WEIGHTS_BIND_Y, std430) writeonly buffer Y { uint y[]; };
#include "tensor.glsl"
#include "numbers.glsl"
#include "float_types.glsl"
#include "rows.glsl"

const uint values = WEIGHT_VALUES(TYPE);
const uint large = 16u * WEIGHT_PIECES_16(TYPE), small = 4u * WEIGHT_PIECES_4(TYPE);  // bytes of a block
const uint last = WEIGHT_SIZE(TYPE) - large - small;
// The element's block: where its group begins; pieces of a plane; its number among them.
uint group, pieces, unit;

// Byte i of the pieces of 16 bytes.
uint byte_at(uint i) {
    return x_bits(group + (i / 16u * pieces + unit) * 16u + i % 16u, 8u);
}

// Half word i of the pieces of 4 bytes.
uint small_half(uint i) {
    return x_bits((group + pieces * large + (i / 2u * pieces + unit) * 4u) / 2u + i % 2u, 16u);
}

// The piece of less than 4 bytes.
uint last_piece() {
    uint byte = group + pieces * (large + small) + unit * last;
    return last == 1u ? x_bits(byte, 8u) : x_bits(byte / 2u, 16u);
}

#include "block_values.glsl"

// Value i of q4_K and q5_K: float16 d and m, 8 scales and minima of 6 bits in 12 bytes, fifth bits, then nibbles.
float value_of_4_or_5(uint i) {
    const bool FIFTH = TYPE == WEIGHT_TYPE_Q5_K;
    uint j = i / 32u, low = 4u + j % 4u, scale = byte_at(low), minimum = byte_at(low + 4u), both = byte_at(low + 8u);
    scale = j < 4u ? scale & 63u : (both & 15u) | scale >> 6u << 4u;
    minimum = j < 4u ? minimum & 63u : both >> 4u | minimum >> 6u << 4u;
    uint q = nibble((FIFTH ? 48u : 16u) + i / 64u * 32u + i % 32u, j % 2u);
    if (FIFTH) {
        q |= (byte_at(16u + i % 32u) >> j & 1u) << 4u;
    }
    float d = half_float(byte_at(0u) | byte_at(1u) << 8u), m = half_float(byte_at(2u) | byte_at(3u) << 8u);
    return value_of(d, scale, int(q), m, minimum);
}

// Value i of a block of 256, which is value i mod 16 of group j.
float value_of_256(uint i) {
    uint j = i / 16u, part = i / 32u % 4u, byte = i / 128u * 32u + i % 32u;
    if (TYPE == WEIGHT_TYPE_Q2_K) {
        uint q = byte_at(16u + byte) >> (2u * part) & 3u, scales = byte_at(j);
        return value_of(half_float(small_half(0u)), scales & 15u, int(q), half_float(small_half(1u)), scales >> 4u);
    }
    if (TYPE == WEIGHT_TYPE_Q3_K) {
        uint q = byte_at(32u + byte) >> (2u * part) & 3u, high = byte_at(i % 32u) >> (i / 32u) & 1u;
        uint low = small_half(j % 8u / 2u) >> (8u * (j % 2u) + j / 8u * 4u) & 15u;
        uint scale = low | (small_half(4u + j % 4u / 2u) >> (8u * (j % 2u) + j / 4u * 2u) & 3u) << 4u;
        return value_of(half_float(last_piece()), scale - 32u, int(q | high << 2u) - 4, 0.0, 0u);
    }
    if (TYPE == WEIGHT_TYPE_Q6_K) {
        uint low = nibble(i / 128u * 64u + i % 64u, part / 2u), high = byte_at(128u + byte) >> (2u * part) & 3u;
        uint scale = uint(bitfieldExtract(int(byte_at(192u + j)), 0, 8));
        return value_of(half_float(last_piece()), scale, int(low | high << 4u) - 32, 0.0, 0u);
    }
    if (TYPE == WEIGHT_TYPE_IQ4_XS) {
        uint low = small_half(2u + j / 8u) >> (j / 2u % 4u * 4u) & 15u, high = small_half(1u) >> (j / 2u * 2u) & 3u;
        uint q = nibble(j / 2u * 16u + i % 16u, j % 2u);
        return value_of(half_float(small_half(0u)), (low | high << 4u) - 32u, iq4(q), 0.0, 0u);
    }
    return value_of_4_or_5(i);
}

void main() {
    uint i = linear_id();
    if (i >= elements(p.y)) {
        return;
    }
    uvec4 index = indices(p.y, i);
    uint row = named_row(index, p.rows - p.first, 1u), value = 0xFFFFFFFFu;
    if (row != 0xFFFFFFFFu) {
        row += p.first;
        uint blocks = p.y.n[0] / values, width = min(32u, p.rows - row / 32u * 32u);
        group = p.offset + index.z * p.steps[0] + index.w * p.steps[1] + row / 32u * 32u * blocks * WEIGHT_SIZE(TYPE);
        pieces = blocks * width;
        unit = index.x / values * width + row % 32u;
        value = floatBitsToUint(values == 32u ? value_of_32(index.x % values) : value_of_256(index.x % values));
    }
    y[place(p.y, index)] = value;
}
