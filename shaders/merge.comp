// Pass 2: fold the partial states of each query row in the canonical order, then divide once.
//
// Grid: x = 64 head dimensions (two a lane), y = query head, z = query row.
// States that are leaves fold, ascending, into nodes at absolute multiples of 8 leaves; nodes fold, ascending,
// into the total.  States that are nodes fold into the total.  Who folded a node never shows.
//
// A fold's weights depend on the maxima alone, so a batch of 32 states goes in two steps: lane = state finds the
// running maxima and the weights; lane = dimensions does the multiplies and adds, in order.
#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require
#include "contract.glsl"

layout(local_size_x = 32) in;
layout(constant_id = MERGE_SPEC_HEAD_DIM) const uint HEAD_DIM = 128u;
const uint BATCH = WAVE;

layout(set = 0, binding = MERGE_BIND_WORK, std430) restrict readonly buffer Work { uint work[]; };
layout(set = 0, binding = MERGE_BIND_STATES, std430) readonly buffer States { vec2 states[]; };
layout(set = 0, binding = MERGE_BIND_OUT, std430) restrict writeonly buffer Out { float result[]; };
#include "state.glsl"

shared float maxima[BATCH];       // m of each state
shared float node_maxima[BATCH];  // of the node that each state belongs to
shared vec4 into_node[BATCH];     // weights of (node so far, this state), l, unused
shared vec2 into_total[BATCH];    // weights of (total so far, this node); of each node's last state

// One state's or node's components join an accumulator: l and two dimensions of o.
void fold(inout float l, inout vec2 o, float more_l, vec2 more_o, vec2 w) {
    l = merge(l, w.x, more_l, w.y);
    o = merge(o, w.x, more_o, w.y);
}

void main() {
    uint lane = gl_LocalInvocationID.x;
    uint row = gl_WorkGroupID.z, head = gl_WorkGroupID.y;
    uint dim = gl_WorkGroupID.x * MERGE_DIMS + 2u * lane;
    uint record = work[HEADER_ROW_TABLE] + row * ROW_WORDS;
    uint first = work[record + ROW_STATE], count = work[record + ROW_COUNT], unit = work[record + ROW_UNIT];
    bool leaves = work[record + ROW_UNIT_LEAVES] == 1u;
    uint q_heads = work[HEADER_Q_HEADS];
    uint ml_base = work[HEADER_STATE_STRIDE] * q_heads * (HEAD_DIM / 2u);
    uint pair = min(dim, HEAD_DIM - 2u) / 2u;  // lanes behind head_dim repeat the last pair and write nothing
    uint skip = unit % BATCH;                  // batches lie at absolute multiples of 32 states: whole nodes

    uint o_stride = q_heads * (HEAD_DIM / 2u), o_base = first * o_stride + head * (HEAD_DIM / 2u) + pair;

    float total_m = EMPTY_M, total_l = 0.0;
    vec2 total_o = vec2(0.0);
    [[dont_unroll]] for (uint at = 0u; at < (count > 0u ? skip + count : 0u); at += BATCH) {
        uint state = at + lane - skip;
        bool there = at + lane >= skip && state < count;
        vec2 ml = states[ml_base + (first + (there ? state : 0u)) * q_heads + head];
        float m = there ? ml.x : EMPTY_M;
        vec2 o[BATCH];
        for (uint j = 0u; j < BATCH; ++j) {  // absent states repeat one that is there; their weight is 0
            uint other = min(at + j - min(at + j, skip), count - 1u);
            o[j] = states[o_base + other * o_stride];
        }
        maxima[lane] = m;
        barrier();
        uint in_node = lane & (NODE - 1u), node_first = lane - in_node;
        float node_before = EMPTY_M, batch_before = total_m, batch_m = total_m;
        if (leaves) {
            float node_m = EMPTY_M;
            for (uint t = 0u; t < NODE; ++t) {
                float other = maxima[node_first + t];
                node_before = max(node_before, t < in_node ? other : EMPTY_M);
                node_m = max(node_m, other);
            }
            node_maxima[lane] = node_m;
            barrier();
            for (uint t = 0u; t < BATCH; t += NODE) {
                float other = node_maxima[t];
                batch_before = max(batch_before, t < node_first ? other : EMPTY_M);
                batch_m = max(batch_m, other);
            }
        } else {
            for (uint t = 0u; t < BATCH; ++t) {
                float other = maxima[t];
                batch_before = max(batch_before, t < lane ? other : EMPTY_M);
                batch_m = max(batch_m, other);
            }
        }
        vec2 node_w = merge_weights(node_before, m);
        vec2 total_w = merge_weights(batch_before, max(node_before, m));
        const vec2 unchanged = vec2(1.0, 0.0);
        into_node[lane] = vec4(there ? node_w : unchanged, there ? ml.y : 0.0, 0.0);
        into_total[lane] = there || leaves ? total_w : unchanged;
        barrier();
        if (leaves) {
            float node_l[BATCH / NODE];
            vec2 node_o[BATCH / NODE];
            for (uint n = 0u; n < BATCH / NODE; ++n) {
                node_l[n] = 0.0;
                node_o[n] = vec2(0.0);
            }
            for (uint t = 0u; t < NODE; ++t) {
                for (uint n = 0u; n < BATCH / NODE; ++n) {
                    vec4 w = into_node[n * NODE + t];
                    fold(node_l[n], node_o[n], w.z, o[n * NODE + t], w.xy);
                }
            }
            for (uint n = 0u; n < BATCH / NODE; ++n) {
                fold(total_l, total_o, node_l[n], node_o[n], into_total[n * NODE + NODE - 1u]);
            }
        } else {
            for (uint t = 0u; t < BATCH; ++t) {
                fold(total_l, total_o, into_node[t].z, o[t], into_total[t]);
            }
        }
        total_m = batch_m;
        barrier();
    }

    float keep = 1.0;
    if (work[HEADER_SINK_TABLE] != 0u) {
        keep = join_sink(uintBitsToFloat(work[work[HEADER_SINK_TABLE] + head]), total_m, total_l);
    }
    if (dim < HEAD_DIM) {
        vec2 x = normalised(total_o, keep, total_l);
        uint slot = row * q_heads + head;
        result[slot * HEAD_DIM + dim] = x.x;
        result[slot * HEAD_DIM + dim + 1u] = x.y;
        if (dim == 0u) {
            result[work[HEADER_ROWS] * q_heads * HEAD_DIM + slot] = natural_lse(total_m, total_l);
        }
    }
}
