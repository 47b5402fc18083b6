// A selective scan. For each head, token after token, with step = softplus(dt), and element j of x and y for row s_j of
// the state:
//     s_j = s_j * exp(step * a) + b * (x_j * step)
//     y_j = s_j . c
#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require
#include "contract.glsl"

layout(local_size_x = 32) in;
SSM_SCAN_CONSTANTS
layout(set = 0, binding = SSM_SCAN_BIND_PARAMS, std430) restrict readonly buffer Params { SsmScanParams p; };
layout(set = 0, binding = SSM_SCAN_BIND_STATE, std430) readonly buffer State { float state[]; };
layout(set = 0, binding = SSM_SCAN_BIND_X, std430) readonly buffer X { float x[]; };
layout(set = 0, binding = SSM_SCAN_BIND_DT, std430) readonly buffer Dt { float dt[]; };
layout(set = 0, binding = SSM_SCAN_BIND_A, std430) readonly buffer A { float a[]; };
layout(set = 0, binding = SSM_SCAN_BIND_B, std430) readonly buffer B { float b[]; };
layout(set = 0, binding = SSM_SCAN_BIND_C, std430) readonly buffer C { float c[]; };
layout(set = 0, binding = SSM_SCAN_BIND_IDS, std430) readonly buffer Ids { uint ids[]; };
layout(set = 0, binding = SSM_SCAN_BIND_OUTPUTS, std430) writeonly buffer Outputs { float outputs[]; };
layout(set = 0, binding = SSM_SCAN_BIND_KEPT, std430) writeonly buffer Kept { float kept[]; };
#include "tensor.glsl"
#include "numbers.glsl"
#include "states.glsl"

float decay(float step, uint index) {
    precise float exponent = step * flush(a[index]);
    return above(exponential(flush(exponent)), DECAY_MIN);
}

// The lane's decays of the rows of `head`.
void load_decays(out vec4 decays[VECTORS], uint head, float step) {
    float head_decay = BY_ELEMENT == 0u ? decay(step, p.a + head) : 0.0;
    [[unroll]] for (uint m = 0u; m < VECTORS; ++m) {
        decays[m] = vec4(head_decay);
        [[unroll]] for (uint i = 0u; i < 4u; ++i) {
            if (BY_ELEMENT != 0u && (WHOLE || element(m) + i < SIZE)) {
                decays[m][i] = decay(step, p.a + head * SIZE + element(m) + i);
            }
        }
    }
}

void main() {
    uint group = gl_WorkGroupID.y, sequence = gl_WorkGroupID.z, head_rows = p.x.n[0], tokens = p.x.n[2];
    uint rows = head_rows * p.x.n[1], group_rows = rows / p.b.n[1], end = (group + 1u) * group_rows;
    uint first = group * group_rows + gl_WorkGroupID.x * ROWS;
    vec4 s[OWN][VECTORS], b_row[VECTORS], c_row[VECTORS], decays[VECTORS];
    [[unroll]] for (uint lane_row = 0u; lane_row < OWN; ++lane_row) {
        uint row = min(first + row_of(lane_row), end - 1u), head = row / head_rows;
        LOAD_ROW(s[lane_row], state, place(p.state, uvec4(0u, row - head * head_rows, head, ids[p.ids + sequence])))
        flush_row(s[lane_row]);
    }
    for (uint t = 0u; t < tokens; ++t) {
        float sum[OWN], step;
        uvec4 index = uvec4(0u, 0u, t, sequence);
        LOAD_ROW(b_row, b, place(p.b, index) + group * SIZE)
        LOAD_ROW(c_row, c, place(p.c, index) + group * SIZE)
        flush_row(b_row);
        flush_row(c_row);
        [[unroll]] for (uint lane_row = 0u; lane_row < OWN; ++lane_row) {
            uint row = min(first + row_of(lane_row), end - 1u), head = row / head_rows;
            if (lane_row == 0u || BY_ELEMENT != 0u) {  // else all rows of a lane are of the same head
                step = flush(softplus(flush(dt[place(p.dt, uvec4(head, t, sequence, 0u))])));
                load_decays(decays, head, step);
            }
            precise float added = flush(x[place(p.x, index) + row]) * step;
            added = above(added, FACTOR_MIN);
            [[unroll]] for (uint m = 0u; m < VECTORS; ++m) {
                s[lane_row][m] = add(multiply(s[lane_row][m], decays[m]), multiply(b_row[m], vec4(added)));
            }
            flush_row(s[lane_row]);
            sum[lane_row] = dot_of(s[lane_row], c_row);
        }
        add_parts(sum);
        uint slot = tokens - 1u - t;
        [[unroll]] for (uint lane_row = 0u; lane_row < OWN; ++lane_row) {
            uint row = first + row_of(lane_row);
            if (row < end && part == 0u) {
                outputs[p.outputs + (sequence * tokens + t) * rows + row] = flush(sum[lane_row]);
            }
            if (row < end && slot < p.slots) {
                STORE_ROW(s[lane_row], kept, p.kept + slot * p.steps[1] + sequence * p.steps[0] + row * SIZE)
            }
        }
    }
}
