// Indices of a row's elements in the order of (value, index), NaN last, by a bitonic network of compare-exchanges.
//
//   A merge of pieces of n into pieces of 2 n compares places with the same distance from the middle (mirror), then
//   places that are n / 2, n / 4, ... 1 apart. The lower place always gets the element that comes first. So a place
//   after the row's end counts as last, and never takes part: rows may have any length.
//   sort, sort_ids, merge   in shared memory, SORT_PIECE places a workgroup, of several rows where they are short
//   exchange                in y, an invocation has a pair
#version 450
#extension GL_GOOGLE_include_directive : require
#include "contract.glsl"

layout(local_size_x = 256) in;
SORT_CONSTANTS
layout(set = 0, binding = SORT_BIND_PARAMS, std430) restrict readonly buffer Params { SortParams p; };
layout(set = 0, binding = SORT_BIND_X, std430) readonly buffer X { uint x[]; };
layout(set = 0, binding = SORT_BIND_IDS, std430) readonly buffer Ids { uint ids[]; };
layout(set = 0, binding = SORT_BIND_Y, std430) buffer Y { uint y[]; };
#include "tensor.glsl"
#include "sort_key.glsl"

const uint HELD = OP == SORT_OP_EXCHANGE ? 1u : SORT_PIECE;
shared uvec2 held[HELD];  // (key, index)

// The place of element i of row `row`.
uint row_place(Tensor t, uint row, uint i) {
    uint plane = row / p.x.n[1];
    return place(t, uvec4(i, row % p.x.n[1], plane % p.x.n[2], plane / p.x.n[2]));
}

uvec2 keyed(uint row, uint index) {
    return uvec2(key_of(x[row_place(p.x, row, index)], DESCENDING == 1u), index);
}

bool before(uvec2 a, uvec2 b) {
    return a.x < b.x || a.x == b.x && a.y < b.y;
}

// The places of pair i.
uvec2 pair(uint i, uint distance, bool mirror) {
    uint low = i / distance * 2u * distance + i % distance;
    return uvec2(low, mirror ? low + 2u * (distance - i % distance) - 1u : low + distance);
}

void exchange() {
    uint pairs = (p.count + 2u * p.distance - 1u) / (2u * p.distance) * p.distance, row = linear_id() / pairs;
    uvec2 places = pair(linear_id() % pairs, p.distance, p.mirror == 1u);
    if (row >= p.x.n[1] * p.x.n[2] * p.x.n[3] || places.y >= p.count) {
        return;
    }
    uint low = row_place(p.y, row, places.x), high = row_place(p.y, row, places.y), a = y[low], b = y[high];
    if (before(keyed(row, b), keyed(row, a))) {
        y[low] = b;
        y[high] = a;
    }
}

void step_in_shared(uint distance, bool mirror) {
    for (uint i = gl_LocalInvocationID.x; i < SORT_PIECE / 2u; i += gl_WorkGroupSize.x) {
        uvec2 places = pair(i, distance, mirror), a = held[places.x], b = held[places.y];
        if (before(b, a)) {
            held[places.x] = b;
            held[places.y] = a;
        }
    }
    barrier();
}

void steps_in_shared(uint distance) {
    for (; distance > 0u; distance /= 2u) {
        step_in_shared(distance, false);
    }
}

void main() {
    if (OP == SORT_OP_EXCHANGE) {
        exchange();
        return;
    }
    uint rows = p.x.n[1] * p.x.n[2] * p.x.n[3], pieces = (p.count + COLUMNS - 1u) / COLUMNS;  // of a row
    uint first = (gl_WorkGroupID.y * gl_NumWorkGroups.x + gl_WorkGroupID.x) * (SORT_PIECE / COLUMNS);
    for (uint i = gl_LocalInvocationID.x; i < SORT_PIECE; i += gl_WorkGroupSize.x) {
        uint piece = first + i / COLUMNS, row = piece / pieces, column = piece % pieces * COLUMNS + i % COLUMNS;
        uint index = NONE;
        if (row < rows && column < p.count) {
            index = OP == SORT_OP_SORT    ? column
                    : OP == SORT_OP_MERGE ? y[row_place(p.y, row, column)]
                                          : ids[row_place(p.ids, row, column)];
        }
        held[i] = index == NONE ? uvec2(NONE) : keyed(row, index);
    }
    barrier();
    if (OP == SORT_OP_MERGE) {
        steps_in_shared(SORT_PIECE / 2u);
    } else {
        for (uint size = 1u; size < COLUMNS; size *= 2u) {
            step_in_shared(size, true);
            steps_in_shared(size / 2u);
        }
    }
    for (uint i = gl_LocalInvocationID.x; i < SORT_PIECE; i += gl_WorkGroupSize.x) {
        uint piece = first + i / COLUMNS, row = piece / pieces, column = i % COLUMNS;
        if (row < rows && column < p.keep && piece % pieces * COLUMNS + column < p.count) {
            y[row_place(p.y, row, piece % pieces * p.keep + column)] = held[i].y;
        }
    }
}
