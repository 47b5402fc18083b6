// The pairs of a slot and a token, slot + slots * token, sorted by the expert that `ids` names, in tiles of columns.
//
// Experts come in ascending order, and so do an expert's pairs. A tile has pairs of one expert. An id that is none of
// the experts counts as an expert after the last. An invocation counts and places the pairs of expert e mod 256, and
// reads all pairs. A compiler that unrolls a loop over shared memory here takes the array's size for its length, and
// spills.
#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require
#include "contract.glsl"

layout(local_size_x = 256) in;
layout(set = 0, binding = BY_EXPERT_BIND_PARAMS, std430) restrict readonly buffer Params { ByExpertParams p; };
layout(set = 0, binding = BY_EXPERT_BIND_IDS, std430) readonly buffer Ids { uint ids[]; };
layout(set = 0, binding = BY_EXPERT_BIND_LIST, std430) writeonly buffer List { uint list[]; };
#include "tensor.glsl"

const uint ROUND = 256u, NO_COLUMN = 0xFFFFFFFFu;
shared uint seen[ROUND];                 // experts of the pairs of a round
shared uint count[EXPERTS_MOST + 1u];   // an expert's pairs
shared uint next[EXPERTS_MOST + 1u];    // where the expert's next pair goes in the list

// To `seen`: the experts of pairs from `first` on. The result is the number of these pairs.
uint read_experts(uint first) {
    uint pairs = p.ids.n[0] * p.ids.n[1], i = first + gl_LocalInvocationIndex;
    barrier();
    if (i < pairs) {
        uint id = ids[place(p.ids, uvec4(i % p.ids.n[0], i / p.ids.n[0], 0u, 0u))];
        seen[gl_LocalInvocationIndex] = min(id, p.experts);
    }
    barrier();
    return min(ROUND, pairs - first);
}

uint tiles_of(uint expert) {
    return (count[expert] + p.columns - 1u) / p.columns;
}

// To `list`: the tiles of an expert, and NO_COLUMN for the columns that its last tile lacks; after the last expert,
// NO_COLUMN for the other tiles.
void write_tiles(uint expert) {
    uint tile = 0u;
    [[dont_unroll]] for (uint e = 0u; e < expert; ++e) {
        tile += tiles_of(e);
    }
    uint end = tile + tiles_of(expert);
    next[expert] = p.tiles + tile * p.columns;
    [[dont_unroll]] for (uint i = next[expert] + count[expert]; i < p.tiles + end * p.columns; ++i) {
        list[i] = NO_COLUMN;
    }
    [[dont_unroll]] for (; tile < end; ++tile) {
        list[tile] = expert;
    }
    [[dont_unroll]] for (; expert == p.experts && tile < p.tiles; ++tile) {
        list[tile] = NO_COLUMN;
    }
}

void main() {
    uint invocation = gl_LocalInvocationIndex, pairs = p.ids.n[0] * p.ids.n[1];
    [[dont_unroll]] for (uint e = invocation; e <= p.experts; e += ROUND) {
        count[e] = 0u;
    }
    [[dont_unroll]] for (uint first = 0u; first < pairs; first += ROUND) {
        uint end = read_experts(first);
        [[dont_unroll]] for (uint e = invocation; e <= p.experts; e += ROUND) {
            uint matches = 0u;
            [[dont_unroll]] for (uint i = 0u; i < end; ++i) {
                matches += uint(seen[i] == e);
            }
            count[e] += matches;
        }
    }
    barrier();
    [[dont_unroll]] for (uint e = invocation; e <= p.experts; e += ROUND) {
        write_tiles(e);
    }
    [[dont_unroll]] for (uint first = 0u; first < pairs; first += ROUND) {
        uint end = read_experts(first);
        [[dont_unroll]] for (uint e = invocation; e <= p.experts; e += ROUND) {
            uint slot = next[e];
            [[dont_unroll]] for (uint i = 0u; i < end; ++i) {
                if (seen[i] == e) {
                    list[slot++] = first + i;
                }
            }
            next[e] = slot;
        }
    }
}
