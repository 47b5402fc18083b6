// Recurrent layers: convolutions over tokens, gated delta nets and selective scans.
#include "operations.h"

#include <cmath>

namespace zinc {

constexpr int64_t MOST_SIZE = 256;  // elements of a state's row
constexpr uint32_t RUN = 4;         // tokens that an invocation of a convolution has, if there are several

// --- convolutions ----------------------------------------------------------------------------------------------------

static bool record_conv(Recording &r, ggml_tensor *op) {
    const Conv c = conv_with(r, op);
    r.take(c.y);
    Bound of[4];
    for (int i = 0; i < 4; ++i) of[i] = bound(*r.device, c.reads[i]);
    const Bound y = bound(*r.device, c.y);
    Bound normed[2] = {y, y};
    ssm_conv_params params{of[0].at, of[1].at, of[2].at, of[3].at, y.at, op->ne[1] > 1 ? RUN : 1};
    for (int i = 0; i < 2 && c.norms[i]; ++i) {
        const ggml_tensor *rows = c.norms[i]->src[0];
        params.size = uint32_t(rows->ne[0]);
        params.begins[i] = uint32_t(rows->view_offs / sizeof(float));
        params.ends[i] = params.begins[i] + uint32_t(rows->ne[0] * rows->ne[1]);
        params.scales[i] = c.results[i] == c.norms[i] ? 1 : number_of(c.results[i], 0);
        params.eps = number_of(c.norms[i], 0);
        params.factor = 1.0f / float(rows->ne[0]);
        normed[i] = bound(*r.device, c.results[i]);
        params.offsets[i] = normed[i].at.offset;
        r.take(c.results[i]);
    }
    return r.dispatch(GRAPH_SSM_CONV, c.constants, params,
                      {of[0].place, of[1].place, of[2].place, of[3].place, y.place, normed[0].place, normed[1].place});
}

// --- states ----------------------------------------------------------------------------------------------------------

// Where an operation writes its states: behind its scores, or to where the next node copies them.
struct Written {
    uint32_t scores, kept, steps[2], slots;
    za_place of_scores, of_kept;
};

static Written written(Recording &r, ggml_tensor *op, uint64_t scores, uint64_t of_sequence, uint64_t sequences,
                       bool apart, const ggml_tensor *rows) {
    const Bound y = bound(*r.device, op);
    Written w{y.at.offset, uint32_t(y.at.offset + scores), {uint32_t(of_sequence), uint32_t(of_sequence * sequences)},
              uint32_t(op->op_params[0]), y.place, y.place};
    ggml_tensor *copy = r.copy_of_states(op, scores, of_sequence, sequences, apart, rows);
    if (!copy) return w;
    const bool one_row = uint64_t(copy->ne[0]) == of_sequence * sequences;  // of all sequences, one after the other
    const Bound cache = bound(*r.device, copy);
    w.kept = cache.at.offset;
    w.steps[0] = one_row ? uint32_t(of_sequence) : cache.at.s[1];
    w.steps[1] = cache.at.s[2];
    w.slots = cache.at.n[2];
    w.of_kept = cache.place;
    r.take(copy);
    return w;
}

// Rows of a lane: arithmetic is the limit of a prompt, and rows share some; memory is one token's, and wants many waves.
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
    if (q->ne[0] != v->ne[0] || v->ne[0] > MOST_SIZE || v->ne[1] > 65535 || v->ne[3] > 65535) return "size";
    return states_refused(op, 6);
}

static bool record_delta_net(Recording &r, ggml_tensor *op) {
    Bound of[6];
    for (int i = 0; i < 6; ++i) of[i] = bound(*r.device, op->src[i]);
    const ggml_tensor *v = op->src[2], *state = op->src[5];
    const uint64_t one = uint64_t(state->ne[0] * state->ne[1] * state->ne[2]), sequences = uint64_t(v->ne[3]);
    delta_net_constants constants{uint32_t(v->ne[0]), rows_of_lane(*r.device, v->ne[0], v->ne[2]),
                                  op->src[3]->ne[0] > 1, 0};
    Bound ids = of[5];
    const ggml_tensor *gathered = r.gathered(state);
    if (gathered) {
        const Bound all = bound(*r.device, gathered->src[0]);
        constants.named = 1;
        ids = bound(*r.device, gathered->src[1]);
        of[5].place = all.place;
        of[5].at.offset = all.at.offset;
        of[5].at.s[3] = all.at.s[1];
    }
    const Written w = written(r, op, uint64_t(ggml_nelements(v)), one, sequences, true,
                              gathered ? gathered->src[0] : nullptr);
    const delta_net_params params{of[0].at, of[1].at, of[2].at, of[3].at, of[4].at, of[5].at, ids.at.offset, w.scores,
                                  w.kept, {w.steps[0], w.steps[1]}, w.slots, 1.0f / std::sqrt(float(v->ne[0]))};
    return r.dispatch(GRAPH_DELTA_NET, constants, params,
                      {of[0].place, of[1].place, of[2].place, of[3].place, of[4].place, of[5].place, ids.place,
                       w.of_scores, w.of_kept});
}

static const char *scan_refused(const Device &, const ggml_tensor *op) {
    const ggml_tensor *state = op->src[0], *x = op->src[1], *ids = op->src[6];
    if (state->ne[0] > MOST_SIZE || op->src[4]->ne[1] > 65535 || x->ne[3] > 65535) return "size";
    if (ids->type != GGML_TYPE_I32 || ids->nb[0] != sizeof(int32_t)) return "type";
    return states_refused(op, 6);
}

static bool record_scan(Recording &r, ggml_tensor *op) {
    Bound of[7];
    for (int i = 0; i < 7; ++i) of[i] = bound(*r.device, op->src[i]);
    const ggml_tensor *state = op->src[0], *x = op->src[1];
    const uint64_t rows = uint64_t(x->ne[0] * x->ne[1]), sequences = uint64_t(x->ne[3]);
    const bool by_element = op->src[3]->ne[0] > 1;
    uint32_t own = rows_of_lane(*r.device, state->ne[0], x->ne[2]);
    while (!by_element && x->ne[0] % own) own /= 2;  // a lane's rows are of one head
    const ssm_scan_constants constants{uint32_t(state->ne[0]), own, by_element};
    const Written w = written(r, op, uint64_t(ggml_nelements(x)), rows * uint64_t(state->ne[0]), sequences,
                              sequences == 1, state);
    const ssm_scan_params params{of[0].at, of[1].at, of[2].at, of[4].at, of[5].at, of[3].at.offset, of[6].at.offset,
                                 w.scores, w.kept, {w.steps[0], w.steps[1]}, w.slots};
    return r.dispatch(GRAPH_SSM_SCAN, constants, params,
                      {of[0].place, of[1].place, of[2].place, of[3].place, of[4].place, of[5].place, of[6].place,
                       w.of_scores, w.of_kept});
}

const std::vector<Served> RECURRENT = {
    {GGML_OP_SSM_CONV, f32_refused, record_conv},
    {GGML_OP_GATED_DELTA_NET, delta_net_refused, record_delta_net},
    {GGML_OP_SSM_SCAN, scan_refused, record_scan},
};

}  // namespace zinc
