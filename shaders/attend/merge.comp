// Pass 2: fold the states (m, l, o) of each query row's nodes, ascending, then divide once.
//
// Grid: x = 64 head dimensions (two a lane), y = query head, z = query row.
//
// A wave takes 32 states, a batch, at a time.  A round is a batch for each wave:
//
//     load       o of 32 states               lane = two dimensions: 32 loads in flight
//                (m, l) of a state            lane = state
//     powers     of two, of all merges        lane = state
//     scale      o of each state              lane = two dimensions
//     total      states fold into the total   lane = two dimensions, one wave after the other
#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require
#include "../contract.glsl"

layout(local_size_x_id = MERGE_SPEC_WORKGROUP_SIZE, local_size_x = 32) in;  // 32 per wave
layout(constant_id = MERGE_SPEC_V_DIM) const uint V_DIM = 128u;
const uint BATCH = WAVE;
const uint ROUND = gl_WorkGroupSize.x;
const uint WAVES = ROUND / WAVE;

layout(set = 0, binding = MERGE_BIND_WORK, std430) restrict readonly buffer Work { uint work[]; };
layout(set = 0, binding = MERGE_BIND_STATES, std430) readonly buffer States { vec2 states[]; };
layout(set = 0, binding = MERGE_BIND_OUT, std430) restrict writeonly buffer Out { float result[]; };
#include "../floats.glsl"
#include "state.glsl"
#include "fold.glsl"

// The states of the workgroup's query row and head.
struct Row {
    uint first;  // number of the first one in the scratch tensor
    uint count;
};

Row read_row() {
    uint record = work[HEADER_ROW_TABLE] + gl_WorkGroupID.z * ROW_WORDS;
    return Row(work[record + ROW_STATE], work[record + ROW_COUNT]);
}

// To o: dimensions dim and dim + 1 of the wave's batch, states s ... s + 31 of the row.  Behind the last one it is
// repeated; its weight is 0.  Lanes behind V_DIM repeat the last pair and write nothing.
void load_o(Row row, uint s, uint dim) {
    uint pair = min(dim, V_DIM - 2u) / 2u, stride = work[HEADER_Q_HEADS] * (V_DIM / 2u);
    uint first = row.first * stride + gl_WorkGroupID.y * (V_DIM / 2u) + pair, last = first + (row.count - 1u) * stride;
    for (uint j = 0u; j < BATCH; ++j) {
        o[j] = states[min(first + (s + j) * stride, last)];
    }
}

// (m, l) of state s of the row; `there`: whether it has so many.
vec2 load_ml(Row row, uint s, out bool there) {
    uint q_heads = work[HEADER_Q_HEADS], base = work[HEADER_STATE_STRIDE] * q_heads * (V_DIM / 2u);
    there = s < row.count;
    return states[base + (row.first + (there ? s : 0u)) * q_heads + gl_WorkGroupID.y];
}

// The total, with the head's sink, becomes dimensions dim and dim + 1 of the output, and the log-sum-exp.
void write_result(uint dim) {
    uint q_heads = work[HEADER_Q_HEADS], head = gl_WorkGroupID.y, slot = gl_WorkGroupID.z * q_heads + head;
    float o_power = merge_sink(HEAD_WORD(head, HEAD_SINK), total_m, total_l);
    vec2 x = normalize(total_o, o_power, total_l);
    result[slot * V_DIM + dim] = x.x;
    result[slot * V_DIM + dim + 1u] = x.y;
    if (dim == 0u && work[HEADER_ROWS] != 0u) {
        result[work[HEADER_ROWS] * q_heads * V_DIM + slot] = natural_lse(total_m, total_l);
    }
}

void main() {
    find_wave();
    uint dim = gl_WorkGroupID.x * MERGE_DIMS + 2u * lane;
    Row row = read_row();
    [[dont_unroll]] for (uint begin = 0u; begin < row.count; begin += ROUND) {
        bool there;
        vec2 ml = load_ml(row, begin + lane_state, there);
        load_o(row, begin + batch, dim);
        find_powers(ml, there);
        scale_states();
        uint batches = min(WAVES, (row.count - begin + BATCH - 1u) / BATCH);
        [[dont_unroll]] for (uint turn = 0u; turn < batches; ++turn) {
            if (wave == turn) {
                fold_into_total(begin + turn == 0u);
            }
            barrier();
        }
    }
    if (wave == 0u && dim < V_DIM) {
        if (row.count > 0u) {
            take_total();
        }
        write_result(dim);
    }
}
