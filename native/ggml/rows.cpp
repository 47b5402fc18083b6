// Operations on rows, and rotations.
#include "operations.h"

#include <algorithm>

#include "../graph/rope_table.h"

namespace zinc {

// ggml's own SUM takes only rows whose elements are neighbors.
static const char *sum_refused(const Device &, const ggml_tensor *op) {
    return is_f32(op->src[0]) ? op->src[0]->nb[0] == sizeof(float) ? nullptr : "strides" : "type";
}

// --- rotary positions ------------------------------------------------------------------------------------------------

static graph::Rope rope_of(const ggml_tensor *op) {
    const int mode = op->op_params[2];
    graph::Rope rope{graph::RopeMode::NORMAL, op->op_params[1], op->op_params[4], number_of(op, 5), number_of(op, 6),
                     number_of(op, 7), number_of(op, 8), number_of(op, 9), number_of(op, 10), {},
                     op->op == GGML_OP_ROPE_BACK};
    for (int i = 0; i < 4; ++i) rope.sections[i] = op->op_params[11 + i];
    if (mode == GGML_ROPE_TYPE_NEOX) rope.mode = graph::RopeMode::NEOX;
    else if (mode == GGML_ROPE_TYPE_IMROPE) rope.mode = graph::RopeMode::IMROPE;
    else if (mode == GGML_ROPE_TYPE_VISION) rope.mode = graph::RopeMode::VISION;
    else if (mode == GGML_ROPE_TYPE_MROPE) rope.mode = graph::RopeMode::MROPE;
    return rope;
}

static const char *rope_refused(const Device &, const ggml_tensor *op) {
    const ggml_tensor *x = op->src[0], *factors = op->src[2];
    const graph::Rope rope = rope_of(op);
    const int mode = op->op_params[2], sum = rope.sections[0] + rope.sections[1] + rope.sections[2] + rope.sections[3];
    const uint32_t pairs = uint32_t(graph::rope_pairs(rope)), first = uint32_t(op->op_params[15]);
    if (rope.mode == graph::RopeMode::NORMAL && mode != GGML_ROPE_TYPE_NORMAL) return "mode";
    if (mode & GGML_ROPE_TYPE_MROPE && sum <= 0) return "sections";
    if (x->type != op->type || (op->type != GGML_TYPE_F32 && op->type != GGML_TYPE_F16)) return "type";
    if (factors && (root_of(factors)->op != GGML_OP_NONE || !ggml_is_contiguous(factors))) return "frequency factors";
    // The kernel writes a pair of 16-bit elements as a word, so rows must be whole words.
    const bool even = op->nb[0] == 2 && (op->nb[1] | op->nb[2] | op->nb[3] | op->view_offs) % 4 == 0;
    if (op->type == GGML_TYPE_F16 && (!even || first % 2 || (graph::rope_step(rope) > 1 && pairs % 2)))
        return "strides";
    return op->ne[0] % 2 ? "size" : nullptr;
}

// The table of the operation's rotations. The first operation of a graph with these parameters makes it.
static bool table_of(Recording &r, const ggml_tensor *op, za_place *place) {
    const graph::Rope rope = rope_of(op);
    const size_t pairs = size_t(graph::rope_pairs(rope));
    const char *factors = op->src[2] ? host_bytes(op->src[2]) : nullptr;
    if (op->src[2] && !factors) return false;
    const char *parameters = reinterpret_cast<const char *>(op->op_params);
    std::vector<char> key(parameters, parameters + 15 * sizeof *op->op_params);
    if (factors) key.insert(key.end(), factors, factors + 4 * pairs);
    key.push_back(rope.backward);
    za_place &table = r.rotations[key];
    if (!table.buffer) {
        void *words;
        if (!r.device->recorder->words(4 * ROPE_WORDS * pairs, &table, &words)) return false;
        graph::rope_table(rope, reinterpret_cast<const float *>(factors), static_cast<uint32_t *>(words));
    }
    *place = table;
    return true;
}

// Sets the fields of a kernel that turns pairs.
template <typename Params>
static bool set_turns(Recording &r, const ggml_tensor *op, Params *params, za_place *positions, za_place *table) {
    const graph::Rope rope = rope_of(op);
    const Bound source = bound(*r.device, op->src[1]);
    *positions = source.place;
    params->positions = source.view.offset;
    params->stride = uint32_t(op->ne[2]);
    params->pairs = uint32_t(graph::rope_pairs(rope));
    params->first = uint32_t(op->op_params[15]);
    params->step = uint32_t(graph::rope_step(rope));
    params->least = r.settles_q(op) ? MIN_INPUT : 0;
    return table_of(r, op, table);
}

static bool record_rope(Recording &r, ggml_tensor *op) {
    const Bound x = bound(*r.device, op->src[0]), y = bound(*r.device, op);
    rope_params params{x.view, y.view};
    za_place positions, table;
    return set_turns(r, op, &params, &positions, &table) &&
           r.dispatch(GRAPH_ROPE, rope_constants{uint32_t(float_type(op))}, params,
                      {x.place, positions, table, y.place});
}

// --- norms -----------------------------------------------------------------------------------------------------------

static const char *group_norm_refused(const Device &, const ggml_tensor *op) {
    if (!is_f32(op) || !is_f32(op->src[0])) return "type";
    return ggml_is_contiguous(op->src[0]) && op->src[0]->ne[2] % op->op_params[0] == 0 ? nullptr : "strides";
}

bool record_norm_of(Recording &r, ggml_tensor *op, const ExpertsSum *sum) {
    const uint32_t kind = op->op == GGML_OP_RMS_NORM ? NORM_OP_RMS
                        : op->op == GGML_OP_L2_NORM  ? NORM_OP_L2 : NORM_OP_NORM;
    Bound x = bound(*r.device, op->src[0]), y = bound(*r.device, op);
    const ggml_tensor *result = op;
    Follower first{FOLLOW_OP_NONE, y, 0, nullptr}, second = first;
    int eps = 0;
    if (op->op == GGML_OP_GROUP_NORM) {  // a group is a row
        const uint32_t groups = uint32_t(op->op_params[0]), n = uint32_t(op->ne[0] * op->ne[1] * op->ne[2]) / groups;
        for (Bound *rows : {&x, &y})
            rows->view = {rows->view.offset, {n, groups, uint32_t(op->ne[3]), 1}, {1, n, n * groups, 0}};
        eps = 1;
    } else {
        first = follower(r, {op->src[0]}, &result, true);
        if (first.op) second = follower(r, {op->src[0], first.tensor}, &result, true);
        y = bound(*r.device, result);
    }
    const norm_quantized_constants constants{kind, first.op, second.op};
    norm_params params{x.view, first.other.view, second.other.view, y.view, number_of(op, eps),
                       1.0f / float(x.view.n[0]), {first.scale, second.scale}, 1, 0, 0, 0, 0, 0, 0, 0};
    if (const Quantized *int8 = op->op == GGML_OP_GROUP_NORM ? nullptr : r.int8_copy(result, true)) {
        params.joined = uint32_t(int8->ne[0] / result->ne[0]);
        if (sum && !second.op && norm_fuses_sum(*sum, result, first.tensor)) {
            const za_place *places = sum->places;
            return r.dispatch(GRAPH_NORM_SUMMED, norm_summed_constants{kind, first.op, 0, sum->added},
                              norm_summed_params{sum->params.experts, sum->params.weights,
                                                 {sum->params.added[0], sum->params.added[1]}, params.x, params.a,
                                                 params.b, params.y, params.eps, params.factor, {first.scale, 0},
                                                 params.joined},
                              {x.place, first.other.place, places[3], y.place, int8->q.place, int8->scales.place,
                               places[0], places[1], places[2]});
        }
        if (sum && !record_sum(r, *sum)) return false;
        return r.dispatch(GRAPH_NORM_QUANTIZED, constants, params,
                          {x.place, first.other.place, second.other.place, y.place, int8->q.place,
                           int8->scales.place});
    }
    if (sum && !record_sum(r, *sum)) return false;
    za_place positions = x.place, table = x.place;
    ggml_tensor *rope = op->op == GGML_OP_GROUP_NORM ? nullptr
                      : rope_of_norm(r, {op->src[0], first.tensor, second.tensor}, result);
    if (rope) {
        r.take(rope);
        if (!set_turns(r, rope, &params, &positions, &table)) return false;
        y = bound(*r.device, rope);
        params.y = y.view;
    }
    return r.dispatch(GRAPH_NORM, norm_constants{kind, first.op, second.op, rope != nullptr}, params,
                      {x.place, first.other.place, second.other.place, y.place, positions, table});
}

static bool record_norm(Recording &r, ggml_tensor *op) { return record_norm_of(r, op, nullptr); }

// --- sums ------------------------------------------------------------------------------------------------------------

static bool record_sum(Recording &r, ggml_tensor *op) {
    const Bound x = bound(*r.device, op->src[0]), y = bound(*r.device, op);
    const uint32_t terms = uint32_t(op->op == GGML_OP_SUM ? ggml_nelements(op->src[0]) : op->src[0]->ne[0]);
    const float factor = op->op == GGML_OP_MEAN ? 1.0f / float(terms) : 1.0f;
    const sum_rows_params params{x.view, y.view, terms, factor};
    return r.dispatch(GRAPH_SUM_ROWS, {}, params, {x.place, y.place});
}

static const char *soft_max_refused(const Device &, const ggml_tensor *op) {
    const ggml_tensor *mask = op->src[1], *sinks = op->src[2];
    if (!is_f32(op) || !is_f32(op->src[0]) || !is_f32(sinks)) return "type";
    return !mask || mask->type == GGML_TYPE_F32 || mask->type == GGML_TYPE_F16 ? nullptr : "type";
}

static bool record_soft_max(Recording &r, ggml_tensor *op) {
    if (const std::optional<bool> done = record_route(r, op)) return *done;
    const ggml_tensor *mask = op->src[1], *sinks = op->src[2];
    const Bound x = bound(*r.device, op->src[0]), y = bound(*r.device, op), m = mask ? bound(*r.device, mask) : x;
    const Bound s = sinks ? bound(*r.device, sinks) : x;
    const float max_bias = number_of(op, 1);
    const uint32_t whole = graph::power_of_two_in(x.view.n[2]);
    soft_max_params params{x.view, m.view, y.view, s.view.offset, number_of(op, 0), 0, 0, whole};
    if (max_bias > 0) {
        params.step = -max_bias / float(whole);
        params.half_step = -max_bias / 2 / float(whole);
    }
    const uint32_t type = !mask ? MASK_TYPE_NONE : mask->type == GGML_TYPE_F32 ? MASK_TYPE_F32 : MASK_TYPE_F16;
    return r.dispatch(GRAPH_SOFT_MAX, soft_max_constants{type, sinks != nullptr}, params,
                      {x.place, m.place, s.place, y.place});
}

const std::vector<Served> ROWS_OPERATIONS = {
    {GGML_OP_RMS_NORM, f32_refused, record_norm}, {GGML_OP_NORM, f32_refused, record_norm},
    {GGML_OP_L2_NORM, f32_refused, record_norm},  {GGML_OP_GROUP_NORM, group_norm_refused, record_norm},
    {GGML_OP_SUM_ROWS, f32_refused, record_sum},  {GGML_OP_MEAN, f32_refused, record_sum},
    {GGML_OP_SUM, sum_refused, record_sum},       {GGML_OP_SOFT_MAX, soft_max_refused, record_soft_max},
    {GGML_OP_ROPE, rope_refused, record_rope},    {GGML_OP_ROPE_BACK, rope_refused, record_rope},
};

}  // namespace zinc
