// y = x, with pairs of dimension 0 turned by their position times their fraction of a turn, and other elements copied.
//
// An invocation has a unit: a pair, or two copied elements. For float16 whose pairs are not neighbors a unit is two
// pairs, or two words of copied elements, so that an invocation owns the words that it writes.
#version 450
#extension GL_GOOGLE_include_directive : require
#include "contract.glsl"

layout(local_size_x = 256) in;
ROPE_CONSTANTS
layout(set = 0, binding = ROPE_BIND_PARAMS, std430) restrict readonly buffer Params { RopeParams p; };
layout(set = 0, binding = ROPE_BIND_X, std430) readonly buffer X { uint x[]; };
layout(set = 0, binding = ROPE_BIND_POSITIONS, std430) readonly buffer Positions { uint positions[]; };
layout(set = 0, binding = ROPE_BIND_TABLE, std430) readonly buffer Table { uint table[]; };
layout(set = 0, binding = ROPE_BIND_Y, std430) writeonly buffer Y { uint y[]; };
#include "tensor.glsl"
#include "numbers.glsl"
#include "rope.glsl"
#include "float_types.glsl"

uint element(uvec4 index, uint i) {
    return place(p.x, uvec4(i, index.yzw));
}

void main() {
    bool wide = TYPE == FLOAT_TYPE_F32, neighbors = p.step == 1u;
    uint size = wide || neighbors ? 1u : 2u;  // pairs of a unit
    uint units = (p.y.n[0] / 2u + size - 1u) / size, id = linear_id(), u = id % units;
    if (id / units >= p.y.n[1] * p.y.n[2] * p.y.n[3]) {
        return;
    }
    uvec4 index = uvec4(0u, indices(p.y, id / units * p.y.n[0]).yzw);
    uint row = place(p.y, index), turning = p.pairs / size;
    if (u >= turning) {
        for (uint i = 0u; i < size; ++i) {
            uint e = 2u * (size * (u - turning) + i);
            e += e < p.first ? 0u : 2u * p.pairs;
            if (e >= p.y.n[0]) {
                return;  // the last unit may have one word
            }
            if (wide) {
                y[row + e * p.y.s[0]] = settled(x[element(index, e)]);
                y[row + (e + 1u) * p.y.s[0]] = settled(x[element(index, e + 1u)]);
            } else {
                y[(row + e) >> 1] = encoded(LOAD(x, TYPE, element(index, e)), TYPE)
                    | encoded(LOAD(x, TYPE, element(index, e + 1u)), TYPE) << 16;
            }
        }
        return;
    }
    uint e = p.first + size * u * (neighbors ? 2u : 1u), words[2] = uint[](0u, 0u);
    for (uint i = 0u; i < size; ++i) {
        vec2 pair = vec2(LOAD(x, TYPE, element(index, e + i)), LOAD(x, TYPE, element(index, e + i + p.step)));
        pair = turned(vec2(flush(pair.x), flush(pair.y)), size * u + i, index.z);
        words[0] |= encoded(pair.x, TYPE) << (16u * i);
        words[1] |= encoded(pair.y, TYPE) << (16u * i);
    }
    if (wide) {
        y[row + e * p.y.s[0]] = settled(words[0]);
        y[row + (e + p.step) * p.y.s[0]] = settled(words[1]);
    } else if (neighbors) {
        y[(row + e) >> 1] = words[0] | words[1] << 16;
    } else {
        y[(row + e) >> 1] = words[0];
        y[(row + e + p.step) >> 1] = words[1];
    }
}
