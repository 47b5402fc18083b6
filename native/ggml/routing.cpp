// Operations of a graph in one dispatch: routers of experts, and the sums of what experts give.
#include "operations.h"

namespace zinc {

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
    if (!is_route(r, first, &route)) return {};
    const uint64_t n = uint64_t(route.sorted->ne[0]), rows = uint64_t(ggml_nrows(route.sorted));
    const uint64_t k = uint64_t(route.order->ne[0]);
    const Bound x = matrix_of(*r.device, route.logits, n, rows), ids = matrix_of(*r.device, route.sorted, k, rows);
    const Bound y = matrix_of(*r.device, route.result, k, rows);
    const Bound bias = route.bias ? matrix_of(*r.device, route.bias, n, rows) : x;
    const route_params params{x.at, bias.at, ids.at, y.at, route.least, route.most, route.factor, route.added};
    r.take(route.sorted);
    r.take(route.result);
    return r.dispatch(GRAPH_ROUTE, route.constants, params, {x.place, bias.place, ids.place, y.place});
}

std::optional<bool> record_sum_experts(Recording &r, ggml_tensor *products) {
    ExpertsSum made{};
    if (!is_sum_of_experts(r, products, &made)) return {};
    Bound of[4];
    for (int i = 0; i < 4; ++i) made.places[i] = (of[i] = bound(*r.device, made.reads[i])).place;
    made.params = {of[0].at, of[1].at, {of[2].at.offset, of[3].at.offset}, bound(*r.device, made.y).at};
    ggml_tensor *norm = norm_of(r, made);
    r.take(made.y);
    if (!norm) return record_sum(r, made);
    r.take(norm);
    return record_norm_of(r, norm, &made);
}

bool record_sum(Recording &r, const ExpertsSum &sum) {
    const za_place *at = sum.places;
    return r.dispatch(GRAPH_SUM_EXPERTS, sum_experts_constants{sum.added}, sum.params,
                      {at[0], at[1], at[2], at[3], bound(*r.device, sum.y).place});
}

}  // namespace zinc
