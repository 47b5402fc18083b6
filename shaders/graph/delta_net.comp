// A gated delta net. For each head, token after token, with the state S as rows s_j = S[:, j], and element j of v,
// delta, y:
//     s_j = s_j * exp(gate)
//     delta_j = (v_j - s_j . k) * beta
//     s_j = s_j + k * delta_j
//     y_j = (s_j . q) * scale
#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require
#include "contract.glsl"

layout(local_size_x = 32) in;
DELTA_NET_CONSTANTS
layout(set = 0, binding = DELTA_NET_BIND_PARAMS, std430) restrict readonly buffer Params { DeltaNetParams p; };
layout(set = 0, binding = DELTA_NET_BIND_Q, std430) readonly buffer Q { float q[]; };
layout(set = 0, binding = DELTA_NET_BIND_K, std430) readonly buffer K { float k[]; };
layout(set = 0, binding = DELTA_NET_BIND_V, std430) readonly buffer V { float v[]; };
layout(set = 0, binding = DELTA_NET_BIND_GATE, std430) readonly buffer Gate { float gate[]; };
layout(set = 0, binding = DELTA_NET_BIND_BETA, std430) readonly buffer Beta { float beta[]; };
layout(set = 0, binding = DELTA_NET_BIND_STATE, std430) readonly buffer State { float state[]; };
layout(set = 0, binding = DELTA_NET_BIND_IDS, std430) readonly buffer Ids { uint ids[]; };
layout(set = 0, binding = DELTA_NET_BIND_OUTPUTS, std430) writeonly buffer Outputs { float outputs[]; };
layout(set = 0, binding = DELTA_NET_BIND_KEPT, std430) writeonly buffer Kept { float kept[]; };
#include "tensor.glsl"
#include "numbers.glsl"
#include "states.glsl"

float decay(uint index) {
    return above(exponential(flush(gate[index])), DECAY_MIN);
}

// The lane's decays of a row.
void load_decays(out vec4 decays[VECTORS], uint begin) {
    float head_decay = BY_CHANNEL == 0u ? decay(begin) : 0.0;
    [[unroll]] for (uint m = 0u; m < VECTORS; ++m) {
        decays[m] = vec4(head_decay);
        [[unroll]] for (uint i = 0u; i < 4u; ++i) {
            if (BY_CHANNEL != 0u && (WHOLE || element(m) + i < SIZE)) {
                decays[m][i] = decay(begin + element(m) + i);
            }
        }
    }
}

void main() {
    uint head = gl_WorkGroupID.y, sequence = gl_WorkGroupID.z, rows = p.state.n[1], tokens = p.v.n[2];
    uint first = gl_WorkGroupID.x * ROWS;
    uint q_begin = place(p.q, uvec4(0u, head % p.q.n[1], 0u, sequence / (p.v.n[3] / p.q.n[3])));
    uint k_begin = place(p.k, uvec4(0u, head % p.k.n[1], 0u, sequence / (p.v.n[3] / p.k.n[3])));
    uint v_begin = place(p.v, uvec4(0u, head, 0u, sequence)), gate_begin = place(p.gate, uvec4(0u, head, 0u, sequence));
    uint beta_begin = place(p.beta, uvec4(0u, head, 0u, sequence));
    uint output_begin = p.outputs + (sequence * tokens * p.v.n[1] + head) * rows;
    uint named = NAMED != 0u ? ids[p.ids + sequence] : sequence;
    vec4 s[OWN][VECTORS], decays[VECTORS], key[VECTORS], query[VECTORS];
    [[unroll]] for (uint lane_row = 0u; lane_row < OWN; ++lane_row) {
        uint row = min(first + row_of(lane_row), rows - 1u);
        LOAD_ROW(s[lane_row], state, place(p.state, uvec4(0u, row, head, named)))
        flush_row(s[lane_row]);
    }
    for (uint t = 0u; t < tokens; ++t) {
        float sum[OWN], beta_t = flush(beta[beta_begin + t * p.beta.s[2]]);
        load_decays(decays, gate_begin + t * p.gate.s[2]);
        [[unroll]] for (uint lane_row = 0u; lane_row < OWN; ++lane_row) {
            [[unroll]] for (uint m = 0u; m < VECTORS; ++m) {
                s[lane_row][m] = multiply(s[lane_row][m], decays[m]);
            }
        }
        LOAD_ROW(key, k, k_begin + t * p.k.s[2])
        flush_row(key);
        [[unroll]] for (uint lane_row = 0u; lane_row < OWN; ++lane_row) {
            sum[lane_row] = dot_of(s[lane_row], key);
        }
        add_parts(sum);
        [[unroll]] for (uint lane_row = 0u; lane_row < OWN; ++lane_row) {
            uint row = min(first + row_of(lane_row), rows - 1u);
            precise float delta = flush(v[v_begin + t * p.v.s[2] + row]) - sum[lane_row];
            delta = delta * beta_t;
            delta = above(delta, FACTOR_MIN);
            [[unroll]] for (uint m = 0u; m < VECTORS; ++m) {
                s[lane_row][m] = add(s[lane_row][m], multiply(key[m], vec4(delta)));
            }
            flush_row(s[lane_row]);
        }
        LOAD_ROW(query, q, q_begin + t * p.q.s[2])
        flush_row(query);
        [[unroll]] for (uint lane_row = 0u; lane_row < OWN; ++lane_row) {
            sum[lane_row] = dot_of(s[lane_row], query);
        }
        add_parts(sum);
        uint slot = tokens - 1u - t;
        [[unroll]] for (uint lane_row = 0u; lane_row < OWN; ++lane_row) {
            uint row = first + row_of(lane_row), kept_begin = p.kept + slot * p.steps[1] + sequence * p.steps[0];
            if (row < rows && part == 0u) {
                precise float output_j = sum[lane_row] * p.scale;
                outputs[output_begin + t * p.v.n[1] * rows + row] = flush(output_j);
            }
            if (row < rows && slot < p.slots) {
                STORE_ROW(s[lane_row], kept, kept_begin + (head * rows + row) * SIZE)
            }
        }
    }
}
