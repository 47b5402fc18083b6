// Decode attention, plainly: the canonical reduction of attend.comp and merge.comp, without pages, lanes or waves.
//
// Only the tests dispatch this kernel, and hold it to the bits of the fast kernels. Grid: x = query head. An invocation
// has SLICE dimensions of the head's output, and makes the scores of every key on its own.
//
//     keys form leaves of 64, at multiples of 64, and eight leaves form a node
//     the state (m, l, o) of a leaf:  m = roundEven(largest score),  weights p = 2**(score - m),
//                                     l = sum of p,  o = sum of p * v
//     states fold in ascending order: leaves into nodes, nodes into the total;  out = o / l
//
// state.glsl has merge, which rounds in its one sum alone, because every m is a whole number.
#version 450
#extension GL_GOOGLE_include_directive : require
#include "../contract.glsl"

const uint SLICE = 8u;
layout(local_size_x_id = PLAIN_SPEC_SLICES, local_size_x = 8) in;  // slices of V
layout(constant_id = PLAIN_SPEC_K_DIM) const uint K_DIM = 64u;     // a multiple of 8
layout(constant_id = PLAIN_SPEC_GROUP) const uint GROUP = 1u;      // query heads that share a KV head
layout(constant_id = PLAIN_SPEC_KEYS) const uint KEYS = 1u;
layout(constant_id = PLAIN_SPEC_SCALE) const uint SCALE = 0u;      // of the scores, float32: scale * log2(e)
const uint V_DIM = SLICE * gl_WorkGroupSize.x;

layout(set = 0, binding = PLAIN_BIND_Q, std430) restrict readonly buffer Q { float q[]; };  // (heads, K_DIM)
layout(set = 0, binding = PLAIN_BIND_K, std430) restrict readonly buffer K { float k[]; };  // (KV heads, KEYS, K_DIM)
layout(set = 0, binding = PLAIN_BIND_V, std430) restrict readonly buffer V { float v[]; };  // (KV heads, KEYS, V_DIM)
layout(set = 0, binding = PLAIN_BIND_OUT, std430) restrict writeonly buffer Out { float result[]; };  // out, then lse
#include "../floats.glsl"
#include "state.glsl"

struct State {
    float m;
    float l;
    float o[SLICE];
};

State empty_state() {
    State s;
    s.m = EMPTY_M;
    s.l = 0.0;
    for (uint d = 0u; d < SLICE; ++d) {
        s.o[d] = 0.0;
    }
    return s;
}

State merge_states(State a, State b) {
    vec2 powers = merge_powers(a.m, b.m);
    a.m = max(a.m, b.m);
    a.l = merge(a.l, powers.x, b.l, powers.y);
    for (uint d = 0u; d < SLICE; ++d) {
        a.o[d] = merge(a.o[d], powers.x, b.o[d], powers.y);
    }
    return a;
}

// The dot product, times the scale. The products of a chunk of eight dimensions are summed on their own.
float score(uint row) {
    precise float dot = 0.0;
    for (uint c = 0u; c < K_DIM; c += CHUNK) {
        precise float sum = 0.0;
        for (uint d = c; d < c + CHUNK; ++d) {
            precise float product = q[gl_WorkGroupID.x * K_DIM + d] * k[row * K_DIM + d];
            sum = sum + product;
        }
        dot = dot + sum;
    }
    precise float scaled = dot * uintBitsToFloat(SCALE);
    return scaled;
}

// The state of the leaf whose `count` keys are rows row, row + 1, ... of K and V.
State leaf_state(uint row, uint count) {
    float scores[KEYS_PER_LEAF], top = EMPTY_M;
    for (uint t = 0u; t < count; ++t) {
        scores[t] = score(row + t);
        top = max(top, scores[t]);
    }
    State leaf = empty_state();
    leaf.m = roundEven(top);
    precise vec4 quarters = vec4(0.0);  // sums of weights of the keys with the same remainder mod 4
    for (uint t = 0u; t < count; ++t) {
        float p = weight(scores[t], leaf.m);
        precise float quarter = quarters[t % WEIGHT_PARTIALS] + p;
        quarters[t % WEIGHT_PARTIALS] = quarter;
        for (uint d = 0u; d < SLICE; ++d) {
            precise float product = p * v[(row + t) * V_DIM + gl_LocalInvocationID.x * SLICE + d];
            precise float sum = leaf.o[d] + product;
            leaf.o[d] = sum;
        }
    }
    precise float c01 = quarters.x + quarters.y, c23 = quarters.z + quarters.w, l = c01 + c23;
    leaf.l = l;
    for (uint d = 0u; d < SLICE; ++d) {
        leaf.o[d] = flush(leaf.o[d]);
    }
    return leaf;
}

void main() {
    uint head = gl_WorkGroupID.x, first_row = head / GROUP * KEYS;
    State total = empty_state();
    for (uint node_begin = 0u; node_begin < KEYS; node_begin += LEAVES_PER_NODE * KEYS_PER_LEAF) {
        State node = empty_state();
        uint node_end = min(node_begin + LEAVES_PER_NODE * KEYS_PER_LEAF, KEYS);
        for (uint begin = node_begin; begin < node_end; begin += KEYS_PER_LEAF) {
            node = merge_states(node, leaf_state(first_row + begin, min(node_end - begin, KEYS_PER_LEAF)));
        }
        total = merge_states(total, node);
    }
    for (uint d = 0u; d < SLICE; ++d) {
        result[head * V_DIM + gl_LocalInvocationID.x * SLICE + d] = normalize(vec2(total.o[d]), 1.0, total.l).x;
    }
    if (gl_LocalInvocationID.x == 0u) {
        result[gl_NumWorkGroups.x * V_DIM + head] = natural_lse(total.m, total.l);
    }
}
