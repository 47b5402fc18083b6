// Chains of operations in one dispatch: routers of experts, and sums of the experts' results.
#include "operations.h"

namespace zinc {

// A contiguous tensor as a matrix. A single row is repeated for all rows.
static Bound matrix_of(const Device &device, const ggml_tensor *t, uint64_t columns, uint64_t rows) {
    Bound b = bound(device, t);
    const bool repeats = uint64_t(ggml_nelements(t)) < columns * rows;
    const uint32_t step = repeats ? 0 : uint32_t(t->ne[0] == 1 ? columns : uint64_t(t->ne[0]));
    b.view = {b.view.offset, {uint32_t(columns), uint32_t(rows), 1, 1}, {1, step, 0, 0}};
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
    const route_params params{x.view, bias.view, ids.view, y.view, route.least, route.most, route.factor, route.added};
    r.take(route.sorted);
    r.take(route.result);
    return r.dispatch(GRAPH_ROUTE, route.constants, params, {x.place, bias.place, ids.place, y.place});
}

std::optional<bool> record_sum_experts(Recording &r, ggml_tensor *products) {
    ExpertsSum sum{};
    if (!is_sum_of_experts(r, products, &sum)) return {};
    Bound read[4];
    for (int i = 0; i < 4; ++i) sum.places[i] = (read[i] = bound(*r.device, sum.reads[i])).place;
    sum.params = {read[0].view, read[1].view, {read[2].view.offset, read[3].view.offset}, bound(*r.device, sum.y).view};
    ggml_tensor *norm = norm_of(r, sum);
    r.take(sum.y);
    if (!norm) return record_sum(r, sum);
    r.take(norm);
    return record_norm_of(r, norm, &sum);
}

bool record_sum(Recording &r, const ExpertsSum &sum) {
    const za_place *places = sum.places;
    return r.dispatch(GRAPH_SUM_EXPERTS, sum_experts_constants{sum.added}, sum.params,
                      {places[0], places[1], places[2], places[3], bound(*r.device, sum.y).place});
}

}  // namespace zinc
