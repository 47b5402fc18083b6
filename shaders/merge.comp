// Pass 2: fold the partial states of each query row in the canonical order, then divide once.
//
// Grid: x = 64 head dimensions (two a lane), y = query head, z = query row.
// States that are leaves fold, ascending, into nodes at absolute multiples of 8 leaves; nodes fold, ascending,
// into the total.  States that are nodes fold into the total.  Who folded a node never shows.
#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require
#include "contract.glsl"

layout(local_size_x = 32) in;
layout(constant_id = MERGE_SPEC_HEAD_DIM) const uint HEAD_DIM = 128u;
const uint AHEAD = 8u;  // states in flight

layout(set = 0, binding = MERGE_BIND_WORK, std430) restrict readonly buffer Work { uint work[]; };
layout(set = 0, binding = MERGE_BIND_STATES, std430) readonly buffer States { vec2 states[]; };
layout(set = 0, binding = MERGE_BIND_OUT, std430) restrict writeonly buffer Out { float result[]; };
#include "state.glsl"

struct State {
    float m, l;
    vec2 o;
};

const State EMPTY = State(EMPTY_M, 0.0, vec2(0.0));

State merge(State a, State b) {
    vec2 w = merge_weights(a.m, b.m);
    return State(max(a.m, b.m), merge(a.l, w.x, b.l, w.y), merge(a.o, w.x, b.o, w.y));
}

void main() {
    uint row = gl_WorkGroupID.z, head = gl_WorkGroupID.y;
    uint dim = gl_WorkGroupID.x * MERGE_DIMS + 2u * gl_LocalInvocationID.x;
    uint record = work[HEADER_ROW_TABLE] + row * ROW_WORDS;
    uint first = work[record + ROW_STATE];
    uint count = work[record + ROW_COUNT];
    uint unit = work[record + ROW_UNIT];
    uint q_heads = work[HEADER_Q_HEADS];
    uint period = NODE / work[record + ROW_UNIT_LEAVES];
    uint ml_base = work[HEADER_STATE_STRIDE] * q_heads * (HEAD_DIM / 2u);
    uint pair = min(dim, HEAD_DIM - 2u) / 2u;  // lanes behind head_dim repeat the last pair and write nothing

    State total = EMPTY, node = EMPTY;
    [[dont_unroll]] for (uint i = 0u; i < count; i += AHEAD) {
        State s[AHEAD];
        for (uint j = 0u; j < AHEAD; ++j) {
            uint slot = (first + min(i + j, count - 1u)) * q_heads + head;
            vec2 ml = states[ml_base + slot];
            s[j] = State(ml.x, ml.y, states[slot * (HEAD_DIM / 2u) + pair]);
        }
        for (uint j = 0u; j < AHEAD; ++j) {
            bool there = i + j < count;
            node = merge(node, State(there ? s[j].m : EMPTY_M, there ? s[j].l : 0.0, there ? s[j].o : vec2(0.0)));
            bool full = there && ((unit + i + j + 1u) & (period - 1u)) == 0u;
            State sum = merge(total, node);
            total = State(full ? sum.m : total.m, full ? sum.l : total.l, full ? sum.o : total.o);
            node = State(full ? EMPTY_M : node.m, full ? 0.0 : node.l, full ? vec2(0.0) : node.o);
        }
    }
    total = merge(total, node);

    if (dim < HEAD_DIM) {
        vec2 x = normalised(total.o, total.l);
        uint slot = row * q_heads + head;
        result[slot * HEAD_DIM + dim] = x.x;
        result[slot * HEAD_DIM + dim + 1u] = x.y;
        if (dim == 0u) {
            result[work[HEADER_ROWS] * q_heads * HEAD_DIM + slot] = natural_lse(total.m, total.l);
        }
    }
}
