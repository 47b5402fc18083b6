// A gated delta net.  Of each head, token after token, with S as rows s_j = S[:, j] and j's elements of v, delta, y:
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
layout(set = 0, binding = DELTA_NET_BIND_SCORES, std430) writeonly buffer Scores { float scores[]; };
layout(set = 0, binding = DELTA_NET_BIND_KEPT, std430) writeonly buffer Kept { float kept[]; };
#include "tensor.glsl"
#include "numbers.glsl"
#include "states.glsl"

float decay(uint at) {
    return above(exponential(flush(gate[at])), DECAY_MIN);
}

// The lane's decays of a row.
void load_decays(out vec4 decays[VECTORS], uint at) {
    float one = BY_CHANNEL == 0u ? decay(at) : 0.0;
    [[unroll]] for (uint m = 0u; m < VECTORS; ++m) {
        decays[m] = vec4(one);
        [[unroll]] for (uint i = 0u; i < 4u; ++i) {
            if (BY_CHANNEL != 0u && (WHOLE || element(m) + i < SIZE)) {
                decays[m][i] = decay(at + element(m) + i);
            }
        }
    }
}

void main() {
    uint head = gl_WorkGroupID.y, sequence = gl_WorkGroupID.z, rows = p.state.n[1], tokens = p.v.n[2];
    uint first = gl_WorkGroupID.x * ROWS;
    uint of_q = place(p.q, uvec4(0u, head % p.q.n[1], 0u, sequence / (p.v.n[3] / p.q.n[3])));
    uint of_k = place(p.k, uvec4(0u, head % p.k.n[1], 0u, sequence / (p.v.n[3] / p.k.n[3])));
    uint of_v = place(p.v, uvec4(0u, head, 0u, sequence)), of_gate = place(p.gate, uvec4(0u, head, 0u, sequence));
    uint of_beta = place(p.beta, uvec4(0u, head, 0u, sequence));
    uint of_scores = p.scores + (sequence * tokens * p.v.n[1] + head) * rows;
    uint named = NAMED != 0u ? ids[p.ids + sequence] : sequence;
    vec4 s[OWN][VECTORS], of[VECTORS];
    [[unroll]] for (uint own = 0u; own < OWN; ++own) {
        uint row = min(first + row_of(own), rows - 1u);
        LOAD_ROW(s[own], state, place(p.state, uvec4(0u, row, head, named)))
        flush_row(s[own]);
    }
    for (uint t = 0u; t < tokens; ++t) {
        float sum[OWN], weight = flush(beta[of_beta + t * p.beta.s[2]]);
        load_decays(of, of_gate + t * p.gate.s[2]);
        [[unroll]] for (uint own = 0u; own < OWN; ++own) {
            [[unroll]] for (uint m = 0u; m < VECTORS; ++m) {
                s[own][m] = multiply(s[own][m], of[m]);
            }
        }
        LOAD_ROW(of, k, of_k + t * p.k.s[2])
        flush_row(of);
        [[unroll]] for (uint own = 0u; own < OWN; ++own) {
            sum[own] = dot_of(s[own], of);
        }
        add_parts(sum);
        [[unroll]] for (uint own = 0u; own < OWN; ++own) {
            uint row = min(first + row_of(own), rows - 1u);
            precise float delta = flush(v[of_v + t * p.v.s[2] + row]) - sum[own];
            delta = delta * weight;
            delta = above(delta, FACTOR_MIN);
            [[unroll]] for (uint m = 0u; m < VECTORS; ++m) {
                s[own][m] = add(s[own][m], multiply(of[m], vec4(delta)));
            }
            flush_row(s[own]);
        }
        LOAD_ROW(of, q, of_q + t * p.q.s[2])
        flush_row(of);
        [[unroll]] for (uint own = 0u; own < OWN; ++own) {
            sum[own] = dot_of(s[own], of);
        }
        add_parts(sum);
        uint slot = tokens - 1u - t;
        [[unroll]] for (uint own = 0u; own < OWN; ++own) {
            uint row = first + row_of(own), at = p.kept + slot * p.steps[1] + sequence * p.steps[0];
            if (row < rows && part == 0u) {
                precise float score = sum[own] * p.scale;
                scores[of_scores + t * p.v.n[1] * rows + row] = flush(score);
            }
            if (row < rows && slot < p.slots) {
                STORE_ROW(s[own], kept, at + (head * rows + row) * SIZE)
            }
        }
    }
}
