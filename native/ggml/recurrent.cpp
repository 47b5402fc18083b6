// Recurrent layers: convolutions over tokens, gated delta nets and selective scans.
#include "operations.h"

#include <cmath>

namespace zinc {

constexpr int64_t MOST_SIZE = 256;  // elements of a state's row
constexpr uint32_t RUN = 4;         // tokens of an invocation of a convolution over several tokens

// --- convolutions ----------------------------------------------------------------------------------------------------

static bool record_conv(Recording &r, ggml_tensor *op) {
    const Conv c = conv_with(r, op);
    r.take(c.y);
    Bound in[4];
    for (int i = 0; i < 4; ++i) in[i] = bound(*r.device, c.reads[i]);
    const Bound y = bound(*r.device, c.y);
    Bound normed[2] = {y, y};
    ssm_conv_params params{in[0].view, in[1].view, in[2].view, in[3].view, y.view, op->ne[1] > 1 ? RUN : 1};
    for (int i = 0; i < 2 && c.norms[i]; ++i) {
        const ggml_tensor *rows = c.norms[i]->src[0];
        params.size = uint32_t(rows->ne[0]);
        params.begins[i] = uint32_t(rows->view_offs / sizeof(float));
        params.ends[i] = params.begins[i] + uint32_t(rows->ne[0] * rows->ne[1]);
        params.scales[i] = c.results[i] == c.norms[i] ? 1 : number_of(c.results[i], 0);
        params.eps = number_of(c.norms[i], 0);
        params.factor = 1.0f / float(rows->ne[0]);
        normed[i] = bound(*r.device, c.results[i]);
        params.offsets[i] = normed[i].view.offset;
        r.take(c.results[i]);
    }
    return r.dispatch(GRAPH_SSM_CONV, c.constants, params,
                      {in[0].place, in[1].place, in[2].place, in[3].place, y.place, normed[0].place, normed[1].place});
}

// --- states ----------------------------------------------------------------------------------------------------------

// Where an operation writes its outputs, and its states: after the outputs, or where the next node copies the states.
struct StatesTarget {
    uint32_t outputs, states, steps[2], slots;
    za_place outputs_place, states_place;
};

static StatesTarget states_target(Recording &r, ggml_tensor *op, uint64_t outputs, uint64_t of_sequence,
                                  uint64_t sequences, bool apart, const ggml_tensor *rows) {
    const Bound y = bound(*r.device, op);
    StatesTarget target{y.view.offset, uint32_t(y.view.offset + outputs),
                        {uint32_t(of_sequence), uint32_t(of_sequence * sequences)}, uint32_t(op->op_params[0]),
                        y.place, y.place};
    ggml_tensor *copy = r.copy_of_states(op, outputs, of_sequence, sequences, apart, rows);
    if (!copy) return target;
    const bool one_row = uint64_t(copy->ne[0]) == of_sequence * sequences;  // all sequences follow each other in a row
    const Bound cache = bound(*r.device, copy);
    target.states = cache.view.offset;
    target.steps[0] = one_row ? uint32_t(of_sequence) : cache.view.s[1];
    target.steps[1] = cache.view.s[2];
    target.slots = cache.view.n[2];
    target.states_place = cache.place;
    r.take(copy);
    return target;
}

// Rows of a lane. A prompt is limited by arithmetic, of which a lane's rows share some. A single token is limited by
// memory, so it has as many waves as possible.
static uint32_t rows_of_lane(const Device &device, int64_t size, int64_t tokens) {
    return tokens == 1 || device.on_cpu || device.lanes < WAVE ? 1 : size > 128 ? 2 : 4;
}

static const char *states_refused(const ggml_tensor *op, int tensors) {
    for (int i = 0; i < tensors; ++i)
        if (!is_f32(op->src[i])) return "type";
    for (int i = 0; i < tensors; ++i)
        if (op->src[i]->nb[0] != sizeof(float)) return "strides";
    return is_f32(op) ? nullptr : "type";
}

static const char *delta_net_refused(const Device &, const ggml_tensor *op) {
    const ggml_tensor *q = op->src[0], *v = op->src[2];
    if (q->ne[0] != v->ne[0] || v->ne[0] > MOST_SIZE || v->ne[1] > MOST_GROUPS || v->ne[3] > MOST_GROUPS) return "size";
    return states_refused(op, 6);
}

static bool record_delta_net(Recording &r, ggml_tensor *op) {
    Bound in[6];
    for (int i = 0; i < 6; ++i) in[i] = bound(*r.device, op->src[i]);
    const ggml_tensor *v = op->src[2], *state = op->src[5];
    const uint64_t of_sequence = uint64_t(state->ne[0] * state->ne[1] * state->ne[2]), sequences = uint64_t(v->ne[3]);
    delta_net_constants constants{uint32_t(v->ne[0]), rows_of_lane(*r.device, v->ne[0], v->ne[2]),
                                  op->src[3]->ne[0] > 1, 0};
    Bound ids = in[5];
    const ggml_tensor *gathered = r.gathered(state);
    if (gathered) {
        const Bound all = bound(*r.device, gathered->src[0]);
        constants.named = 1;
        ids = bound(*r.device, gathered->src[1]);
        in[5].place = all.place;
        in[5].view.offset = all.view.offset;
        in[5].view.s[3] = all.view.s[1];
    }
    const StatesTarget target = states_target(r, op, uint64_t(ggml_nelements(v)), of_sequence, sequences, true,
                                              gathered ? gathered->src[0] : nullptr);
    const delta_net_params params{in[0].view, in[1].view, in[2].view, in[3].view, in[4].view, in[5].view,
                                  ids.view.offset, target.outputs, target.states, {target.steps[0], target.steps[1]},
                                  target.slots, 1.0f / std::sqrt(float(v->ne[0]))};
    return r.dispatch(GRAPH_DELTA_NET, constants, params,
                      {in[0].place, in[1].place, in[2].place, in[3].place, in[4].place, in[5].place, ids.place,
                       target.outputs_place, target.states_place});
}

static const char *scan_refused(const Device &, const ggml_tensor *op) {
    const ggml_tensor *state = op->src[0], *x = op->src[1], *ids = op->src[6];
    if (state->ne[0] > MOST_SIZE || op->src[4]->ne[1] > MOST_GROUPS || x->ne[3] > MOST_GROUPS) return "size";
    if (ids->type != GGML_TYPE_I32 || ids->nb[0] != sizeof(int32_t)) return "type";
    return states_refused(op, 6);
}

static bool record_scan(Recording &r, ggml_tensor *op) {
    Bound in[7];
    for (int i = 0; i < 7; ++i) in[i] = bound(*r.device, op->src[i]);
    const ggml_tensor *state = op->src[0], *x = op->src[1];
    const uint64_t rows = uint64_t(x->ne[0] * x->ne[1]), sequences = uint64_t(x->ne[3]);
    const bool by_element = op->src[3]->ne[0] > 1;
    uint32_t lane_rows = rows_of_lane(*r.device, state->ne[0], x->ne[2]);
    while (!by_element && x->ne[0] % lane_rows) lane_rows /= 2;  // all rows of a lane belong to the same head
    const ssm_scan_constants constants{uint32_t(state->ne[0]), lane_rows, by_element};
    const StatesTarget target = states_target(r, op, uint64_t(ggml_nelements(x)), rows * uint64_t(state->ne[0]),
                                              sequences, sequences == 1, state);
    const ssm_scan_params params{in[0].view, in[1].view, in[2].view, in[4].view, in[5].view, in[3].view.offset,
                                 in[6].view.offset, target.outputs, target.states,
                                 {target.steps[0], target.steps[1]}, target.slots};
    return r.dispatch(GRAPH_SSM_SCAN, constants, params,
                      {in[0].place, in[1].place, in[2].place, in[3].place, in[4].place, in[5].place, in[6].place,
                       target.outputs_place, target.states_place});
}

const std::vector<Served> RECURRENT = {
    {GGML_OP_SSM_CONV, f32_refused, record_conv},
    {GGML_OP_GATED_DELTA_NET, delta_net_refused, record_delta_net},
    {GGML_OP_SSM_SCAN, scan_refused, record_scan},
};

}  // namespace zinc
