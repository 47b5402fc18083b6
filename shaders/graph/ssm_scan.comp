// A selective scan.  Of each head, token after token, with step = softplus(dt), and x_j and y_j of row s_j of the state:
//     s_j = s_j * exp(step * a) + b * (x_j * step)
//     y_j = s_j . c
// Grid: x = rows of all heads in pieces of ROWS, y = sequences.
#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require
#include "contract.glsl"

layout(local_size_x = 32) in;
layout(constant_id = SSM_SCAN_SPEC_SIZE) const uint SIZE = 128u;
layout(constant_id = SSM_SCAN_SPEC_OWN) const uint OWN = 1u;
layout(constant_id = SSM_SCAN_SPEC_BY_ELEMENT) const uint BY_ELEMENT = 0u;
layout(set = 0, binding = SSM_SCAN_BIND_PARAMS, std430) restrict readonly buffer Params { SsmScanParams p; };
layout(set = 0, binding = SSM_SCAN_BIND_STATE, std430) readonly buffer State { float state[]; };
layout(set = 0, binding = SSM_SCAN_BIND_X, std430) readonly buffer X { float x[]; };
layout(set = 0, binding = SSM_SCAN_BIND_DT, std430) readonly buffer Dt { float dt[]; };
layout(set = 0, binding = SSM_SCAN_BIND_A, std430) readonly buffer A { float a[]; };
layout(set = 0, binding = SSM_SCAN_BIND_B, std430) readonly buffer B { float b[]; };
layout(set = 0, binding = SSM_SCAN_BIND_C, std430) readonly buffer C { float c[]; };
layout(set = 0, binding = SSM_SCAN_BIND_IDS, std430) readonly buffer Ids { uint ids[]; };
layout(set = 0, binding = SSM_SCAN_BIND_SCORES, std430) writeonly buffer Scores { float scores[]; };
layout(set = 0, binding = SSM_SCAN_BIND_KEPT, std430) writeonly buffer Kept { float kept[]; };
#include "tensor.glsl"
#include "numbers.glsl"
#include "states.glsl"

float decay(float step, uint at) {
    precise float exponent = step * flush(a[at]);
    return above(exponential(flush(exponent)), DECAY_MIN);
}

// Rows s of head: those that the lane has of b * added join them, behind their decay.
void advance(inout vec4 s[VECTORS], vec4 b[VECTORS], uint head, float step, float added) {
    float one = BY_ELEMENT == 0u ? decay(step, p.a + head) : 0.0;
    [[unroll]] for (uint m = 0u; m < VECTORS; ++m) {
        vec4 decays = vec4(one);
        [[unroll]] for (uint i = 0u; i < 4u; ++i) {
            if (BY_ELEMENT != 0u && (WHOLE || element(m) + i < SIZE)) {
                decays[i] = decay(step, p.a + head * SIZE + element(m) + i);
            }
        }
        s[m] = above(add(multiply(s[m], decays), multiply(b[m], vec4(added))), STATE_MIN);
    }
}

void main() {
    uint sequence = gl_WorkGroupID.y, of_head = p.x.n[0], heads = p.x.n[1], tokens = p.x.n[2], rows = of_head * heads;
    uint head[OWN], row[OWN];
    vec4 s[OWN][VECTORS], of[VECTORS];
    [[unroll]] for (uint own = 0u; own < OWN; ++own) {
        row[own] = min(gl_WorkGroupID.x * ROWS + row_of(own), rows - 1u);
        head[own] = row[own] / of_head;
        uint from = place(p.state, uvec4(0u, row[own] - head[own] * of_head, head[own], ids[p.ids + sequence]));
        LOAD_ROW(s[own], state, from)
        [[unroll]] for (uint m = 0u; m < VECTORS; ++m) {
            s[own][m] = above(s[own][m], STATE_MIN);
        }
    }
    for (uint t = 0u; t < tokens; ++t) {
        float sum[OWN];
        uvec4 at = uvec4(0u, 0u, t, sequence);
        [[unroll]] for (uint own = 0u; own < OWN; ++own) {
            uint group = head[own] / (heads / p.b.n[1]);
            float step = flush(softplus(flush(dt[place(p.dt, uvec4(head[own], t, sequence, 0u))])));
            precise float added = flush(x[place(p.x, at) + row[own]]) * step;
            LOAD_ROW(of, b, place(p.b, at) + group * SIZE)
            [[unroll]] for (uint m = 0u; m < VECTORS; ++m) {
                of[m] = above(of[m], STATE_MIN);
            }
            advance(s[own], of, head[own], step, above(added, FACTOR_MIN));
            LOAD_ROW(of, c, place(p.c, at) + group * SIZE)
            [[unroll]] for (uint m = 0u; m < VECTORS; ++m) {
                of[m] = above(of[m], STATE_MIN);
            }
            sum[own] = dot_of(s[own], of);
        }
        add_parts(sum);
        uint slot = tokens - 1u - t;
        [[unroll]] for (uint own = 0u; own < OWN; ++own) {
            bool there = gl_WorkGroupID.x * ROWS + row_of(own) < rows;
            if (there && part == 0u) {
                scores[p.scores + (sequence * tokens + t) * rows + row[own]] = flush(sum[own]);
            }
            if (there && slot < p.slots) {
                STORE_ROW(s[own], kept, p.kept + slot * p.steps[1] + sequence * p.steps[0] + row[own] * SIZE)
            }
        }
    }
}
