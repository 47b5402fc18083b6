// Pass 2: fold the partial states of each query row in the canonical order, then divide once.
//
// Grid: x = 64 head dimensions (two a lane), y = query head, z = query row.
// States that are leaves fold, ascending, into nodes at absolute multiples of 8 leaves; nodes fold, ascending,
// into the total.  States that are nodes fold into the total.  Who folded a node never shows.
//
// A fold's weights depend on the maxima alone, so 32 states, one batch of a wave, go in three steps: lane = state finds
// the running maxima and the weights; lane = dimensions multiplies, and folds leaves into nodes; the waves take turns
// to fold what they have into the total, in order.  A round is a batch per wave, all of them in flight at once.
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

shared float before_w[ROUND];             // the weight of the sum that each state is merged into
#define state_m before_w                  // before that, in the same words: m of each state
shared float state_w[ROUND];              // the weight of the state itself
shared float state_l[ROUND];              // the state's l, so weighted
shared vec2 into_total[ROUND / LEAVES_PER_NODE];     // states that are leaves: weights of (total so far, this node)
shared float wave_m[WAVES];               // the largest m of each wave's batch
shared vec4 passed[WAVE];                 // the total between turns: two dimensions of o, l, unused

void main() {
    uint lane = gl_LocalInvocationID.x % WAVE, wave = gl_LocalInvocationID.x / WAVE;
    uint row = gl_WorkGroupID.z, head = gl_WorkGroupID.y;
    uint dim = gl_WorkGroupID.x * MERGE_DIMS + 2u * lane;
    uint record = work[HEADER_ROW_TABLE] + row * ROW_WORDS;
    uint first = work[record + ROW_STATE], count = work[record + ROW_COUNT], unit = work[record + ROW_UNIT];
    bool leaves = work[record + ROW_LEAVES_PER_STATE] == 1u;
    uint q_heads = work[HEADER_Q_HEADS];
    uint ml_base = work[HEADER_STATE_STRIDE] * q_heads * (V_DIM / 2u);
    uint pair = min(dim, V_DIM - 2u) / 2u;  // lanes behind V_DIM repeat the last pair and write nothing
    uint skip = unit % BATCH;                  // batches lie at absolute multiples of 32 states: whole nodes
    uint end = count > 0u ? skip + count : 0u;
    uint own = gl_LocalInvocationID.x, batch = wave * BATCH;

    uint o_stride = q_heads * (V_DIM / 2u);
    int o_base = int(first * o_stride + head * (V_DIM / 2u) + pair), o_last = o_base + int((count - 1u) * o_stride);

    float total_m = EMPTY_M, total_l = 0.0;
    vec2 total_o = vec2(0.0);
    [[dont_unroll]] for (uint at = 0u; at < end; at += ROUND) {
        uint state = at + own - skip;
        bool there = at + own >= skip && state < count;
        vec2 ml = states[ml_base + (first + (there ? state : 0u)) * q_heads + head];
        float m = there ? ml.x : EMPTY_M;
        vec2 o[BATCH];
        int o_next = o_base + (int(at + batch) - int(skip)) * int(o_stride);
        for (uint j = 0u; j < BATCH; ++j) {  // absent states repeat one that is there; their weight is 0
            o[j] = states[clamp(o_next + int(j * o_stride), o_base, o_last)];
        }
        state_m[own] = m;
        barrier();
        uint in_node = lane & (LEAVES_PER_NODE - 1u);
        // The total holds the states before this one, or before its node.
        uint before_end = leaves ? lane - in_node : lane;
        float node_before = EMPTY_M, before = total_m, top = EMPTY_M;
        for (uint t = 0u; t < BATCH; ++t) {
            float other = state_m[batch + t];
            before = max(before, t < before_end ? other : EMPTY_M);
            top = max(top, other);
        }
        for (uint t = 0u; t < LEAVES_PER_NODE; ++t) {
            float other = state_m[own - in_node + t];
            node_before = max(node_before, leaves && t < in_node ? other : EMPTY_M);
        }
        wave_m[wave] = top;
        barrier();
        for (uint w = 0u; w < WAVES; ++w) {
            float other = wave_m[w];
            before = max(before, w < wave ? other : EMPTY_M);
            total_m = max(total_m, other);
        }
        vec2 total_w = merge_weights(before, max(node_before, m));
        vec2 w = leaves ? merge_weights(node_before, m) : total_w;
        precise float weighted_l = ml.y * w.y;
        before_w[own] = there ? w.x : 1.0;
        state_w[own] = there ? w.y : 0.0;
        state_l[own] = there ? weighted_l : 0.0;
        if (in_node == LEAVES_PER_NODE - 1u) {
            into_total[own / LEAVES_PER_NODE] = total_w;
        }
        barrier();
        for (uint j = 0u; j < BATCH; ++j) {
            precise vec2 weighted = o[j] * state_w[batch + j];
            o[j] = weighted;
        }
        float node_l[BATCH / LEAVES_PER_NODE];
        if (leaves) {
            vec2 node_o[BATCH / LEAVES_PER_NODE];
            for (uint n = 0u; n < BATCH / LEAVES_PER_NODE; ++n) {
                node_l[n] = 0.0;
                node_o[n] = vec2(0.0);
            }
            for (uint t = 0u; t < LEAVES_PER_NODE; ++t) {
                for (uint n = 0u; n < BATCH / LEAVES_PER_NODE; ++n) {
                    uint j = n * LEAVES_PER_NODE + t;
                    node_l[n] = merge_weighted(node_l[n], before_w[batch + j], state_l[batch + j]);
                    node_o[n] = merge_weighted(node_o[n], before_w[batch + j], o[j]);
                }
            }
            for (uint n = 0u; n < BATCH / LEAVES_PER_NODE; ++n) {
                float node_w = into_total[batch / LEAVES_PER_NODE + n].y;
                precise vec2 node_weighted = node_o[n] * node_w;
                weighted_l = node_l[n] * node_w;
                o[n] = node_weighted;
                node_l[n] = weighted_l;
            }
        }
        [[dont_unroll]] for (uint turn = 0u; turn < min(WAVES, (end - at + BATCH - 1u) / BATCH); ++turn) {
            if (wave == turn) {
                if (WAVES > 1u && at + turn > 0u) {
                    total_o = passed[lane].xy;
                    total_l = passed[lane].z;
                }
                if (leaves) {
                    for (uint n = 0u; n < BATCH / LEAVES_PER_NODE; ++n) {
                        total_l = merge_weighted(total_l, into_total[batch / LEAVES_PER_NODE + n].x, node_l[n]);
                        total_o = merge_weighted(total_o, into_total[batch / LEAVES_PER_NODE + n].x, o[n]);
                    }
                } else {
                    for (uint t = 0u; t < BATCH; ++t) {
                        total_l = merge_weighted(total_l, before_w[batch + t], state_l[batch + t]);
                        total_o = merge_weighted(total_o, before_w[batch + t], o[t]);
                    }
                }
                passed[lane] = vec4(total_o, total_l, 0.0);
            }
            barrier();
        }
    }

    if (wave == 0u && dim < V_DIM) {
        if (end > 0u) {
            total_o = passed[lane].xy;
            total_l = passed[lane].z;
        }
        float keep = 1.0;
        if (work[HEADER_SINK_TABLE] != 0u) {
            keep = merge_sink(uintBitsToFloat(work[work[HEADER_SINK_TABLE] + head]), total_m, total_l);
        }
        vec2 x = normalize(total_o, keep, total_l);
        uint slot = row * q_heads + head;
        result[slot * V_DIM + dim] = x.x;
        result[slot * V_DIM + dim + 1u] = x.y;
        if (dim == 0u) {
            result[work[HEADER_ROWS] * q_heads * V_DIM + slot] = natural_lse(total_m, total_l);
        }
    }
}
