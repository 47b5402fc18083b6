#include "routing.h"

#include "operations.h"

namespace zinc {

// --- operations that follow one another ------------------------------------------------------------------------------

static const ggml_tensor *behind_views(const ggml_tensor *t) {
    while (t->op != GGML_OP_NONE && is_view(t)) t = t->src[0];
    return t;
}

// What a graph computes behind an operation, in order.
class Chain {
  public:
    Chain(const Recording &r, const ggml_tensor *first) : r_(&r), at_(first) {}

    // The next operation where it is this one, and its first operand is `of` or a view of it; else NULL.
    ggml_tensor *then(ggml_op op, const ggml_tensor *of) {
        ggml_tensor *found = r_->behind(at_);
        if (!found || found->op != op || behind_views(found->src[0]) != of) return nullptr;
        at_ = found;
        return found;
    }

  private:
    const Recording *r_;
    const ggml_tensor *at_;
};

// --- routers ---------------------------------------------------------------------------------------------------------

struct Route {
    const ggml_tensor *logits, *bias, *order;  // order: the first indices of each row of `sorted`
    ggml_tensor *sorted, *result;
    route_constants constants;
    float least, most, factor, added;
};

static bool is_matrix(const ggml_tensor *t, int64_t columns, int64_t rows) {
    return is_f32(t) && ggml_is_contiguous(t) && t->ne[0] == columns && ggml_nrows(t) == rows;
}

static bool is_plain_soft_max(const ggml_tensor *op) {
    return !op->src[1] && !op->src[2] && number_of(op, 0) == 1;
}

// From the gate, or from ARGSORT where there is none, to the weights of the chosen.
static bool read_choice(Chain *chain, ggml_tensor *first, Route *route) {
    const bool sorts = first->op == GGML_OP_ARGSORT;
    const ggml_tensor *gated = sorts ? first->src[0] : first, *scores = gated;
    const int64_t n = gated->ne[0], rows = ggml_nrows(gated);
    route->logits = first->src[0];
    route->constants.gate = sorts ? GATE_OP_NONE : first->op == GGML_OP_SOFT_MAX ? GATE_OP_SOFT_MAX : GATE_OP_SIGMOID;
    if (n > ROUTE_PIECE || !is_matrix(route->logits, n, rows) || !is_matrix(gated, n, rows)) return false;
    if (first->op == GGML_OP_SOFT_MAX && !is_plain_soft_max(first)) return false;
    if (ggml_tensor *sum = sorts ? nullptr : chain->then(GGML_OP_ADD, gated)) {
        route->bias = sum->src[1];
        route->constants.biased = 1;
        if (!is_matrix(route->bias, n, ggml_nrows(route->bias)) || !is_matrix(sum, n, rows)) return false;
        if (ggml_nrows(route->bias) != 1 && ggml_nrows(route->bias) != rows) return false;
        scores = sum;
    }
    route->sorted = sorts ? first : chain->then(GGML_OP_ARGSORT, scores);
    if (!route->sorted || route->sorted->src[0] != scores || route->sorted->op_params[0] != GGML_SORT_ORDER_DESC)
        return false;
    route->result = chain->then(GGML_OP_GET_ROWS, gated);
    if (!route->result) return false;
    const ggml_tensor *order = route->order = route->result->src[1], *values = route->result->src[0];
    const bool first_ones = order->op == GGML_OP_VIEW && order->src[0] == route->sorted && !order->view_offs &&
                            order->ne[1] == rows && order->ne[0] <= CHOSEN_PIECE &&
                            order->nb[1] == route->sorted->nb[1];
    return first_ones && is_matrix(values, 1, n * rows) && values->ne[1] == n;
}

// The weights' norm and scale, as far as they follow.
static void read_norm(Chain *chain, Route *route) {
    const int64_t k = route->order->ne[0], rows = route->order->ne[1];
    const Chain before = *chain;
    ggml_tensor *sum = chain->then(GGML_OP_SUM_ROWS, route->result), *clamp = nullptr, *quotients = nullptr;
    if (sum && is_matrix(sum->src[0], k, rows)) clamp = chain->then(GGML_OP_CLAMP, sum);
    if (clamp && is_matrix(clamp, 1, rows)) quotients = chain->then(GGML_OP_DIV, route->result);
    if (quotients && quotients->src[1] == clamp && is_matrix(quotients, k, rows)) {
        route->constants.norm = ROUTE_NORM_OP_SUM;
        route->least = number_of(clamp, 0);
        route->most = number_of(clamp, 1);
        route->result = quotients;
    } else {
        *chain = before;
        ggml_tensor *soft = chain->then(GGML_OP_SOFT_MAX, route->result);
        if (soft && is_plain_soft_max(soft) && is_matrix(soft, k, rows)) {
            route->constants.norm = ROUTE_NORM_OP_SOFT_MAX;
            route->result = soft;
        } else {
            *chain = before;
        }
    }
    ggml_tensor *scaled = chain->then(GGML_OP_SCALE, route->result);
    if (scaled && is_f32(scaled)) {
        route->constants.scaled = 1;
        route->factor = number_of(scaled, 0);
        route->added = number_of(scaled, 1);
        route->result = scaled;
    }
}

// Columns of a contiguous tensor; a single row repeats.
static Bound matrix_of(const Device &device, const ggml_tensor *t, uint64_t columns, uint64_t rows) {
    Bound b = bound(device, t);
    const bool repeats = uint64_t(ggml_nelements(t)) < columns * rows;
    const uint32_t step = repeats ? 0 : uint32_t(t->ne[0] == 1 ? columns : uint64_t(t->ne[0]));
    b.at = {b.at.offset, {uint32_t(columns), uint32_t(rows), 1, 1}, {1, step, 0, 0}};
    return b;
}

std::optional<bool> record_route(Recording &r, ggml_tensor *first) {
    Route route{};
    Chain chain(r, first);
    if (!read_choice(&chain, first, &route)) return {};
    read_norm(&chain, &route);
    // of `sorted` the first are written
    if (!r.hides(route.result, route.sorted) || !r.is_hidden(route.sorted, 1)) return {};
    if (route.bias && !r.is_before(route.bias, route.result)) return {};
    const uint64_t n = uint64_t(route.sorted->ne[0]), rows = uint64_t(ggml_nrows(route.sorted));
    // A workgroup has read its own row before it writes.
    for (const ggml_tensor *read : {route.logits, route.bias ? route.bias : route.logits})
        if (rows > 1 && (overlap(read, route.result) || overlap(read, route.sorted))) return {};
    const uint64_t k = uint64_t(route.order->ne[0]);
    const Bound x = matrix_of(*r.device, route.logits, n, rows), ids = matrix_of(*r.device, route.sorted, k, rows);
    const Bound y = matrix_of(*r.device, route.result, k, rows);
    const Bound bias = route.bias ? matrix_of(*r.device, route.bias, n, rows) : x;
    const route_params params{x.at, bias.at, ids.at, y.at, route.least, route.most, route.factor, route.added};
    if (route.sorted != first) r.take(route.sorted);
    r.take(route.result);
    return r.dispatch(GRAPH_ROUTE, route.constants, params, {x.place, bias.place, ids.place, y.place});
}

// --- sums of experts -------------------------------------------------------------------------------------------------

static bool is_expert(const ggml_tensor *t, const ggml_tensor *products, int64_t e) {
    return t->op == GGML_OP_VIEW && t->src[0] == products && t->view_offs == size_t(e) * products->nb[1] &&
           t->ne[0] == products->ne[0] && t->ne[1] == products->ne[2] && t->nb[1] == products->nb[2] && t->ne[2] == 1;
}

// Whether the sum lies where one expert's results do: an invocation reads its column of all of them before it writes.
static bool in_place(const ggml_tensor *total, const ggml_tensor *x) {
    return x->ne[2] == 1 && ggml_is_contiguous(x) && ggml_is_contiguous(total) && begin_of(total) >= begin_of(x) &&
           (begin_of(total) - begin_of(x)) % x->nb[1] == 0;
}

// Whether the sum of a total and another tensor may be made with the total: elements lie alike, or apart.
static bool adds(const Recording &r, const ggml_tensor *sum, const ggml_tensor *total) {
    const ggml_tensor *other = sum->src[1];
    return sum->src[0] == total && r.is_before(other, sum) && is_f32(sum) && is_f32(other) &&
           ggml_is_contiguous(other) && ggml_are_same_shape(total, sum) && ggml_are_same_shape(other, sum) &&
           (!overlap(sum, other) || (begin_of(sum) == begin_of(other) && ggml_are_same_stride(sum, other)));
}

std::optional<bool> record_sum_experts(Recording &r, ggml_tensor *products) {
    const ggml_tensor *x = products->src[0], *weights = products->src[1];
    const int64_t experts = x->ne[1];
    if (!is_f32(products) || !is_f32(x) || !is_f32(weights) || experts < 2 || x->ne[3] != 1 || weights->ne[0] != 1 ||
        weights->ne[1] != experts || weights->ne[2] != x->ne[2])
        return {};
    Chain chain(r, products);
    ggml_tensor *total = products;
    for (int64_t e = 1; e < experts; ++e) {
        ggml_tensor *sum = chain.then(GGML_OP_ADD, total);
        if (!sum || !is_f32(sum) || !is_expert(sum->src[1], products, e)) return {};
        if (!(e == 1 ? is_expert(sum->src[0], products, 0) : sum->src[0] == total)) return {};
        total = sum;
    }
    ExpertsSum made{{x, weights, x, x}, nullptr, {}, {}, {}};
    for (ggml_tensor *sum; made.constants.added < 2 && (sum = chain.then(GGML_OP_ADD, total)) && adds(r, sum, total);) {
        made.reads[2 + made.constants.added++] = sum->src[1];
        total = sum;
    }
    if ((overlap(total, x) && !in_place(total, x)) || overlap(total, weights) || !r.hides(total, total)) return {};
    made.y = total;
    Bound of[4];
    for (int i = 0; i < 4; ++i) made.places[i] = (of[i] = bound(*r.device, made.reads[i])).place;
    made.params = {of[0].at, of[1].at, {of[2].at.offset, of[3].at.offset}, bound(*r.device, total).at};
    r.take(total);
    ggml_tensor *norm = r.behind(total);
    if (!norm || norm->op != GGML_OP_RMS_NORM || norm->src[0] != total || !ggml_is_contiguous(total))
        return record_sum(r, made);
    r.take(norm);
    return record_norm_of(r, norm, made);
}

bool record_sum(Recording &r, const ExpertsSum &sum) {
    const za_place *at = sum.places;
    return r.dispatch(GRAPH_SUM_EXPERTS, sum.constants, sum.params,
                      {at[0], at[1], at[2], at[3], bound(*r.device, sum.y).place});
}

}  // namespace zinc
