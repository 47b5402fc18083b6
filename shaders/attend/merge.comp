// Pass 2: it folds the states (m, l, o) of each query row's nodes in ascending order, and divides once.
//
// Grid: x = 64 head dimensions (two a lane), y = query head, z = query row. One state after the other, the fold is
//
//     total = (EMPTY_M, 0, 0)
//     for each state (m, l, o):
//         top = max(total_m, m)
//         total_l = flush(total_l * 2**(total_m - top) + l * 2**(m - top)), and o likewise
//         total_m = top
//     out = total_o / total_l
//
// The powers 2**(...) depend on maxima alone, and total_m is the maximum of all states before. So the kernel makes the
// powers of many merges at once, a lane for each state, and only the sums run one after another. A batch is 32 states
// of one wave; a round has a batch for each wave. A state is a node's, however keys were split. The steps of a round:
//
//     load_ml          (m, l) of a state                lane = state
//     load_o           o of the wave's 32 states        lane = two dimensions: 32 loads in flight
//     find_powers      the powers of all merges         lane = state
//     scale_states     o times its power                lane = two dimensions
//     fold_into_total  the batch joins the total        lane = two dimensions, one wave after another
#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require
#include "../contract.glsl"

layout(local_size_x_id = MERGE_SPEC_WORKGROUP_SIZE, local_size_x = 32) in;  // 32 per wave
layout(constant_id = MERGE_SPEC_V_DIM) const uint V_DIM = 128u;
const uint BATCH = WAVE;              // states of a wave in a round
const uint ROUND = gl_WorkGroupSize.x;  // states of a round
const uint WAVES = ROUND / WAVE;

layout(set = 0, binding = MERGE_BIND_WORK, std430) restrict readonly buffer Work { uint work[]; };
layout(set = 0, binding = MERGE_BIND_STATES, std430) readonly buffer States { vec2 states[]; };
layout(set = 0, binding = MERGE_BIND_OUT, std430) restrict writeonly buffer Out { float result[]; };
#include "../floats.glsl"
#include "state.glsl"

uint lane, wave;  // the invocation's number in its wave, and its wave's number
uint lane_state;  // number of the lane's state in the round
uint batch;       // number of the first state of the wave's batch in the round
vec2 o[BATCH];    // two dimensions of the batch's states, and later the same times their powers
float total_m = EMPTY_M, total_l = 0.0;  // the total; after find_powers total_m is that of the whole round
vec2 total_o = vec2(0.0);

shared float total_power[ROUND];  // [state]: 2**(...) of the total that the state joins
#define state_m total_power       // in the same words, before the powers are made: m of each state
shared float state_power[ROUND];  // [state]: 2**(...) of the state
shared float state_l[ROUND];      // [state]: l times that power
shared float wave_m[WAVES];       // the largest m of each wave's batch
shared vec4 passed[WAVE];         // [lane]: the total, which wave hands to wave: (o, o, l, unused)

// The states of the workgroup's query row and head.
struct Row {
    uint first;  // number of the first state in the scratch tensor
    uint count;
};

Row read_row() {
    uint record = work[HEADER_ROW_TABLE] + gl_WorkGroupID.z * ROW_WORDS;
    return Row(work[record + ROW_STATE], work[record + ROW_COUNT]);
}

// (m, l) of state s of the row. `exists`: whether the row has so many states.
vec2 load_ml(Row row, uint s, out bool exists) {
    uint q_heads = work[HEADER_Q_HEADS], base = work[HEADER_STATE_STRIDE] * q_heads * (V_DIM / 2u);
    exists = s < row.count;
    return states[base + (row.first + (exists ? s : 0u)) * q_heads + gl_WorkGroupID.y];
}

// To o: dimensions dim and dim + 1 of the wave's batch, states s ... s + 31 of the row. After the last state, the last
// state is loaded again, with a power of 0. Lanes after V_DIM load the last pair of dimensions again and write nothing.
void load_o(Row row, uint s, uint dim) {
    uint pair = min(dim, V_DIM - 2u) / 2u, stride = work[HEADER_Q_HEADS] * (V_DIM / 2u);
    uint first = row.first * stride + gl_WorkGroupID.y * (V_DIM / 2u) + pair, last = first + (row.count - 1u) * stride;
    for (uint j = 0u; j < BATCH; ++j) {
        o[j] = states[min(first + (s + j) * stride, last)];
    }
}

// To total_power, state_power, state_l and total_m, from (m, l) of the lane's state.
void find_powers(vec2 ml, bool exists) {
    float m = exists ? ml.x : EMPTY_M;
    state_m[lane_state] = m;
    barrier();
    float before = total_m, batch_m = EMPTY_M;  // maxima: of all states before the lane's, and of the batch
    for (uint t = 0u; t < BATCH; ++t) {
        float other = state_m[batch + t];
        before = max(before, t < lane ? other : EMPTY_M);
        batch_m = max(batch_m, other);
    }
    wave_m[wave] = batch_m;
    barrier();
    for (uint w = 0u; w < WAVES; ++w) {
        float other = wave_m[w];
        before = max(before, w < wave ? other : EMPTY_M);
        total_m = max(total_m, other);
    }
    vec2 powers = merge_powers(before, m);
    precise float scaled_l = ml.y * powers.y;
    total_power[lane_state] = exists ? powers.x : 1.0;
    state_power[lane_state] = exists ? powers.y : 0.0;
    state_l[lane_state] = exists ? scaled_l : 0.0;
    barrier();
}

void scale_states() {
    for (uint j = 0u; j < BATCH; ++j) {
        precise vec2 scaled = o[j] * state_power[batch + j];
        o[j] = scaled;
    }
}

// To total_o and total_l: the total that the wave before, or the last wave of the round before, has passed on.
void take_total() {
    total_o = passed[lane].xy;
    total_l = passed[lane].z;
}

// The wave's turn: its batch joins the total. `first`: there is no total yet. A lone wave keeps the total in registers.
void fold_into_total(bool first) {
    if (WAVES > 1u && !first) {
        take_total();
    }
    for (uint t = 0u; t < BATCH; ++t) {
        total_l = merge_scaled(total_l, total_power[batch + t], state_l[batch + t]);
        total_o = merge_scaled(total_o, total_power[batch + t], o[t]);
    }
    passed[lane] = vec4(total_o, total_l, 0.0);
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
    lane_state = gl_LocalInvocationID.x;
    lane = lane_state % WAVE;
    wave = lane_state / WAVE;
    batch = wave * BATCH;
    uint dim = gl_WorkGroupID.x * MERGE_DIMS + 2u * lane;
    Row row = read_row();
    [[dont_unroll]] for (uint begin = 0u; begin < row.count; begin += ROUND) {
        bool exists;
        vec2 ml = load_ml(row, begin + lane_state, exists);
        load_o(row, begin + batch, dim);
        find_powers(ml, exists);
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
