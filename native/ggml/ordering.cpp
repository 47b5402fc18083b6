// ARGSORT and TOP_K.
#include "operations.h"

#include <algorithm>

namespace zinc {

static const char *sort_refused(const Device &, const ggml_tensor *op) {
    return is_f32(op->src[0]) && op->type == GGML_TYPE_I32 ? nullptr : "type";
}

struct Sort {
    Bound x, ids, y;
    bool descending;
};

static uint32_t power_of_two(uint64_t n) {
    uint32_t power = 2;
    while (power < n) power *= 2;
    return power;
}

static bool record(Recording &r, const Sort &s, uint32_t op, uint32_t columns, uint32_t count, uint32_t keep,
                   uint32_t distance, bool mirror) {
    const sort_constants constants{op, s.descending, columns};
    const sort_params params{s.x.view, s.ids.view, s.y.view, count, keep, distance, mirror};
    return r.dispatch(GRAPH_SORT, constants, params, {s.x.place, s.ids.place, s.y.place});
}

// Sorts whole rows.
static bool sort_rows(Recording &r, const Sort &s) {
    const uint32_t n = s.x.view.n[0];
    if (n <= SORT_PIECE) return record(r, s, SORT_OP_SORT, power_of_two(n), n, n, 0, false);
    if (!record(r, s, SORT_OP_SORT, SORT_PIECE, n, SORT_PIECE, 0, false)) return false;
    for (uint64_t size = 2 * SORT_PIECE; size / 2 < n; size *= 2) {
        if (!record(r, s, SORT_OP_EXCHANGE, SORT_PIECE, n, 0, uint32_t(size / 2), true)) return false;
        for (uint64_t distance = size / 4; distance >= SORT_PIECE; distance /= 2)
            if (!record(r, s, SORT_OP_EXCHANGE, SORT_PIECE, n, 0, uint32_t(distance), false)) return false;
        if (!record(r, s, SORT_OP_MERGE, SORT_PIECE, n, SORT_PIECE, 0, false)) return false;
    }
    return true;
}

static bool record_argsort(Recording &r, ggml_tensor *op) {
    if (const std::optional<bool> done = record_route(r, op)) return *done;
    const Bound x = bound(*r.device, op->src[0]), y = bound(*r.device, op);
    return sort_rows(r, {x, y, y, op->op_params[0] == GGML_SORT_ORDER_DESC});
}

// Takes the first `keep` elements of each piece of a row, and repeats that with these elements until one piece is left.
static bool record_top_k(Recording &r, ggml_tensor *op) {
    const uint32_t keep = uint32_t(op->ne[0]);
    Sort s{bound(*r.device, op->src[0]), {}, bound(*r.device, op), true};
    const Bound result = s.y;
    uint32_t n = s.x.view.n[0];
    s.ids = s.y;
    if (2 * keep > SORT_PIECE && n > SORT_PIECE) {
        if (!scratch_rows(*r.device, s.x, n, &s.y) || !sort_rows(r, s)) return false;
        move_params params{s.y.view, s.y.view, result.view, 1, {}};
        params.x.n[0] = keep;
        return r.dispatch(GRAPH_MOVE, move_constants{MOVE_OP_LINEAR, MOVE_TYPE_I32, MOVE_TYPE_I32}, params,
                          {s.y.place, s.y.place, result.place});
    }
    for (uint32_t step = SORT_OP_SORT;; step = SORT_OP_SORT_IDS) {
        const uint32_t columns = std::min<uint32_t>(power_of_two(n), SORT_PIECE), whole = n / columns;
        const uint32_t left = whole * keep + std::min(n % columns, keep);
        s.y = result;
        if (n > columns && !scratch_rows(*r.device, s.x, left, &s.y)) return false;
        if (!record(r, s, step, columns, n, keep, 0, false)) return false;
        if (n <= columns) return true;
        s.ids = s.y;
        n = left;
    }
}

const std::vector<Served> ORDERING = {{GGML_OP_ARGSORT, sort_refused, record_argsort},
                                      {GGML_OP_TOP_K, sort_refused, record_top_k}};

}  // namespace zinc
