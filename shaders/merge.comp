// Pass 2: fold the partial states (m, l, o) of each query row in the canonical order, then divide once.
//
// Grid: x = 64 head dimensions (two a lane), y = query head, z = query row.
//
// States that are leaves fold, ascending, into nodes at absolute multiples of 8 leaves; nodes fold, ascending, into the
// total.  States that are nodes fold into the total.  Who folded a node never shows.
//
// A wave takes 32 states, a batch, at a time.  A round is a batch for each wave:
//
//     load       o of 32 states               lane = two dimensions: 32 loads in flight
//                (m, l) of a state            lane = state
//     powers     of two, of all merges        lane = state
//     scale      o of each state              lane = two dimensions
//     nodes      leaves fold into four nodes  lane = two dimensions
//     total      nodes fold into the total    lane = two dimensions, one wave after the other
#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require
#include "contract.glsl"

layout(local_size_x_id = MERGE_SPEC_WORKGROUP_SIZE, local_size_x = 32) in;  // 32 per wave
layout(constant_id = MERGE_SPEC_V_DIM) const uint V_DIM = 128u;
const uint BATCH = WAVE;
const uint ROUND = gl_WorkGroupSize.x;
const uint WAVES = ROUND / WAVE;

layout(set = 0, binding = MERGE_BIND_WORK, std430) restrict readonly buffer Work { uint work[]; };
layout(set = 0, binding = MERGE_BIND_STATES, std430) readonly buffer States { vec2 states[]; };
layout(set = 0, binding = MERGE_BIND_OUT, std430) restrict writeonly buffer Out { float result[]; };
const bool CPU = false;  // for all devices alike
#include "state.glsl"
#include "fold.glsl"

// The states of the workgroup's query row and head.  Place p is the row's state p - skip, where skip = its first unit
// mod 32: places below skip are absent, and batches begin at multiples of 32 units, which are whole
// nodes.  A row of leaves 40 ... 69 has skip 8 and end 38: places 8 ... 37, of batches 0 ... 31 and 32 ... 63.
struct Row {
    uint first;   // number of the first state in the scratch tensor
    uint count;
    uint skip;
    uint end;     // place behind the last state
    bool leaves;  // a state is a leaf's; else a node's
};

Row read_row() {
    uint record = work[HEADER_ROW_TABLE] + gl_WorkGroupID.z * ROW_WORDS;
    uint count = work[record + ROW_COUNT], unit = work[record + ROW_UNIT], skip = unit % BATCH;
    return Row(work[record + ROW_STATE], count, skip, count > 0u ? skip + count : 0u,
               work[record + ROW_LEAVES_PER_STATE] == 1u);
}

// To o: dimensions dim and dim + 1 of the wave's batch, whose first state is at place p.  Absent states repeat one that
// is there; their weight is 0.  Lanes behind V_DIM repeat the last pair and write nothing.
void load_o(Row row, uint p, uint dim) {
    uint pair = min(dim, V_DIM - 2u) / 2u, stride = work[HEADER_Q_HEADS] * (V_DIM / 2u);
    int first = int(row.first * stride + gl_WorkGroupID.y * (V_DIM / 2u) + pair);
    int last = first + int((row.count - 1u) * stride), next = first + (int(p) - int(row.skip)) * int(stride);
    for (uint j = 0u; j < BATCH; ++j) {
        o[j] = states[clamp(next + int(j * stride), first, last)];
    }
}

// (m, l) of the state at place p; `there`: whether it is one of the row's.
vec2 load_ml(Row row, uint p, out bool there) {
    uint q_heads = work[HEADER_Q_HEADS], state = p - row.skip;
    there = p >= row.skip && state < row.count;
    uint base = work[HEADER_STATE_STRIDE] * q_heads * (V_DIM / 2u);
    return states[base + (row.first + (there ? state : 0u)) * q_heads + gl_WorkGroupID.y];
}

// The total, with the head's sink, becomes dimensions dim and dim + 1 of the output, and the log-sum-exp.
void write_result(uint dim) {
    uint q_heads = work[HEADER_Q_HEADS], head = gl_WorkGroupID.y, slot = gl_WorkGroupID.z * q_heads + head;
    float o_power = 1.0;
    if (work[HEADER_SINK_TABLE] != 0u) {
        o_power = merge_sink(uintBitsToFloat(work[work[HEADER_SINK_TABLE] + head]), total_m, total_l);
    }
    vec2 x = normalize(total_o, o_power, total_l);
    result[slot * V_DIM + dim] = x.x;
    result[slot * V_DIM + dim + 1u] = x.y;
    if (dim == 0u) {
        result[work[HEADER_ROWS] * q_heads * V_DIM + slot] = natural_lse(total_m, total_l);
    }
}

void main() {
    find_place();
    uint dim = gl_WorkGroupID.x * MERGE_DIMS + 2u * lane;
    Row row = read_row();
    [[dont_unroll]] for (uint at = 0u; at < row.end; at += ROUND) {
        bool there;
        vec2 ml = load_ml(row, at + place, there);
        load_o(row, at + batch_place, dim);
        find_powers(ml, there, row.leaves);
        scale_states();
        if (row.leaves) {
            fold_leaves();
        }
        uint batches = min(WAVES, (row.end - at + BATCH - 1u) / BATCH);
        [[dont_unroll]] for (uint turn = 0u; turn < batches; ++turn) {
            if (wave == turn) {
                fold_into_total(row.leaves, at + turn == 0u);
            }
            barrier();
        }
    }
    if (wave == 0u && dim < V_DIM) {
        if (row.end > 0u) {
            take_total();
        }
        write_result(dim);
    }
}
