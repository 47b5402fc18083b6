// MUL_MAT and MUL_MAT_ID: quantized weights with activations as int8, and weights of float types.
#include "operations.h"

#include <algorithm>

#include "tiles.h"
#include "weights.h"

namespace zinc {

// --- limits ----------------------------------------------------------------------------------------------------------

// Some rows and matrices of a tensor as a tensor.
static ggml_tensor part_of(const ggml_tensor *w, uint64_t row, uint64_t rows, uint64_t matrix, uint64_t matrices) {
    ggml_tensor part = *w;
    part.view_src = const_cast<ggml_tensor *>(root_of(w));
    part.data = static_cast<char *>(w->data) + row * w->nb[1] + matrix * w->nb[2];
    part.ne[1] = int64_t(rows);
    part.ne[2] = int64_t(matrices);
    return part;
}

// The rows of weights that one binding can hold: all of them, or whole groups of rows of a single matrix. 0: none.
static uint64_t rows_of_binding(const Device &device, const ggml_tensor *w) {
    if (fits(device, w)) return uint64_t(w->ne[1]);
    if (w->ne[2] * w->ne[3] != 1) return 0;
    return (device.most - device.alignment) / w->nb[1] / WEIGHT_GROUP * WEIGHT_GROUP;
}

// The matrices of experts that one binding can hold.
static uint64_t experts_of_binding(const Device &device, const ggml_tensor *w) {
    if (fits(device, w)) return uint64_t(w->ne[2]);
    return std::min<uint64_t>((device.most - device.alignment) / w->nb[2], UINT32_MAX / (w->ne[0] * w->ne[1]));
}

// The rows of the result that one binding can hold: all of them, or whole tiles of rows. 0: none.
static uint64_t columns_of_binding(const Device &device, const ggml_tensor *op) {
    if (fits(device, op)) return std::max<uint64_t>(uint64_t(op->ne[1]), 1);
    return op->ne[2] * op->ne[3] == 1 ? (device.most - device.alignment) / op->nb[1] / 32 * 32 : 0;
}

static const char *size_refused(const Device &device, const ggml_tensor *op) {
    const ggml_tensor *w = op->src[0];
    const uint64_t columns = uint64_t(op->ne[1]), planes = uint64_t(op->ne[2] * op->ne[3]);
    if (has_experts(op)) {
        const uint64_t tiles = columns * planes / LEAST_TILE + uint64_t(w->ne[2]) + 1;
        const bool bound = experts_of_binding(device, w) && fits(device, op);
        return bound && w->ne[2] <= EXPERTS_MOST && tiles <= MOST_GROUPS ? nullptr : "size";
    }
    const bool bound = ggml_is_quantized(w->type) ? rows_of_binding(device, w) && columns_of_binding(device, op)
                                                  : fits(device, w) && fits(device, op);
    return bound && planes <= MOST_GROUPS && columns <= MOST_VECTOR_ROWS * MOST_GROUPS ? nullptr : "size";
}

static const char *product_refused(const Device &device, const ggml_tensor *op) {
    const ggml_tensor *w = op->src[0], *x = op->src[1];
    if (!is_f32(op) || float_type(x) < 0) return "type";
    if (!ggml_is_quantized(w->type)) return float_type(w) < 0 ? "type" : size_refused(device, op);
    if (weight_type(w->type) < 0 || !is_f32(x)) return "type";
    const int precision = op->op_params[3];
    if (precision >= GGML_PREC_F32 && precision < GGML_PREC_Q8) return "precision";
    if (w->view_src || !ggml_is_contiguous(w) || (w->ne[2] * w->ne[3] > 1 && w->nb[2] % 16)) return "strides";
    return size_refused(device, op);
}

// --- dispatches ------------------------------------------------------------------------------------------------------

// The tensor that is added to a product. Its step is 0 in a dimension in which it repeats.
static Bound bound_added(const Device &device, const ggml_tensor *added) {
    Bound b = bound(device, added);
    for (int d = 0; d < 4; ++d)
        if (added->ne[d] == 1) b.view.s[d] = 0;
    return b;
}

// A part of the weights: their place, the number of the first row, and the number of the first expert and of experts.
struct Part {
    Bound w;
    uint32_t row, rows, expert, experts;
    bool first() const { return row + expert == 0; }
};

template <typename Params>
static void set_shared(const Product &p, const Part &part, Params *params) {
    const ggml_tensor *w = p.op->src[0];
    params->x_slots = uint32_t(p.op->src[1]->ne[1]);
    params->experts[0] = part.expert;
    params->experts[1] = part.experts;
    params->experts[2] = uint32_t(w->ne[2]);
    params->ids = p.ids.view;
    params->y = p.y.view;
    params->y.n[0] = part.rows;
    params->y.offset += part.row * p.y.view.s[0];
    params->added = p.added.view;
    params->added.offset += part.row * p.added.view.s[0];
}

static bool multiply(Recording &r, const Product &p, const Part &part) {
    const ggml_tensor *w = p.op->src[0];
    mul_mat_params params{};
    set_shared(p, part, &params);
    params.w_begin = uint32_t(part.w.view.offset * unit_of(w) / 16);
    params.w_steps[0] = uint32_t(w->ne[2] > 1 ? w->nb[2] / 16 : 0);
    params.w_steps[1] = uint32_t(w->ne[3] > 1 ? w->nb[3] / 16 : 0);
    params.repeats[0] = uint32_t(p.op->ne[2] / w->ne[2]);
    params.repeats[1] = uint32_t(p.op->ne[3] / w->ne[3]);
    params.blocks = uint32_t(w->ne[0] / 32);
    const ggml_tensor up = p.up ? part_of(p.up, part.row, part.rows, part.expert, part.experts) : *w;
    const za_place added = p.up ? bound(*r.device, &up).place : p.added.place;
    const std::initializer_list<za_place> places = {part.w.place, p.x.q.place, p.x.scales.place,
                                                    added,        p.ids.place, p.y.place};
    const bool independent = !part.first();
    if (p.by_units) return r.dispatch(GRAPH_MUL_MAT_UNITS, units_constants(*r.device, p), params, places, independent);
    if (p.is_vector) return r.dispatch(GRAPH_MUL_MAT_VEC, vector_constants(*r.device, p), params, places, independent);
    return r.dispatch(GRAPH_MUL_MAT, tile_constants(p, part.rows), params, places, independent);
}

// Whether a row's elements are neighbors and its bytes whole words. Vector products read such rows.
static bool rows_in_words(const ggml_tensor *t) {
    return t->nb[0] == ggml_type_size(t->type) && (begin_of(t) | t->nb[1] | t->nb[2] | t->nb[3]) % 4 == 0;
}

static bool multiply_floats(Recording &r, const Product &p, const Part &part) {
    const ggml_tensor *w = p.op->src[0], *x = p.op->src[1];
    const uint32_t w_type = uint32_t(float_type(w)), x_type = uint32_t(float_type(x));
    const ggml_tensor *norm = p.is_vector && !p.adds ? rms_of(r, p.op) : nullptr;
    const Bound of_x = bound(*r.device, norm ? norm->src[0]->src[0] : x);
    const Bound added = norm ? bound(*r.device, norm->src[1]) : p.added;
    const std::initializer_list<za_place> places = {part.w.place, of_x.place, added.place, p.ids.place, p.y.place};
    mul_mat_float_params params{};
    set_shared(p, part, &params);
    if (norm) params.added = added.view;
    params.w = part.w.view;
    params.x = of_x.view;
    if (!p.is_vector) {
        const mul_mat_constants t = tile_constants(p, part.rows);
        const mul_mat_float_constants c{w_type,        x_type,           t.tile_rows, t.tile_columns, t.own_rows,
                                        t.own_columns, t.workgroup_size, t.add,       t.experts};
        return r.dispatch(GRAPH_MUL_MAT_FLOAT, c, params, places, !part.first());
    }
    const mul_mat_vec_constants f = vector_constants(*r.device, p);
    const mul_mat_float_vec_constants c{
        w_type,        x_type,  f.columns, f.workgroup_size, f.subgroups,
        f.superblocks, f.ahead && FLOAT_VEC_AHEAD(w->ne[0]), f.add, f.experts,
        norm ? uint32_t(norm->src[0]->op_params[0]) : 0};
    return r.dispatch(GRAPH_MUL_MAT_FLOAT_VEC, c, params, places, !part.first());
}

// --- operations ------------------------------------------------------------------------------------------------------

// Chooses the kernel, and assigns columns to matrices: a plane of x has its matrix, and a pair of a slot and a token
// has the matrix of its expert.
static bool choose_kernel(Recording &r, Product *p) {
    const ggml_tensor *w = p->op->src[0], *x = p->op->src[1], *ids = p->op->src[2];
    const uint64_t columns = uint64_t(p->op->ne[1]), planes = uint64_t(p->op->ne[2] * p->op->ne[3]);
    const bool words =
        ggml_is_quantized(w->type) || (FLOAT_VEC_SERVED(w->ne[0]) && rows_in_words(w) && rows_in_words(x));
    p->is_vector = words && (ids ? planes : columns) <= MOST_VECTOR_ROWS;
    p->columns = !ids ? columns : p->is_vector ? 1 : columns * planes / uint64_t(w->ne[2]);
    p->by_units = uses_units(*r.device, *p);
    p->ids = ids ? bound(*r.device, ids) : p->y;
    if (!ids || p->is_vector) return true;
    Grouped groups;
    if (!r.grouped(ids, uint32_t(w->ne[2]), columns_of_tile(*r.device, *p), &groups)) return false;
    p->ids.place = groups.list.place;
    return true;
}

// Multiplies with the weights part by part. A part is as large as one binding can hold.
static bool multiply_parts(Recording &r, const Product &p) {
    const ggml_tensor *w = p.op->src[0];
    const auto multiplied = ggml_is_quantized(w->type) ? multiply : multiply_floats;
    const uint64_t rows = uint64_t(w->ne[1]), matrices = uint64_t(w->ne[2]);
    const uint64_t most_rows = has_experts(p.op) ? rows : rows_of_binding(*r.device, w);
    const uint64_t most = has_experts(p.op) ? experts_of_binding(*r.device, w) : matrices;
    for (uint64_t matrix = 0; matrix < matrices; matrix += most)
        for (uint64_t row = 0; row < rows; row += most_rows) {
            const uint64_t n = std::min(most_rows, rows - row), m = std::min(most, matrices - matrix);
            const ggml_tensor part = part_of(w, row, n, matrix, m);
            if (!multiplied(r, p, {bound(*r.device, &part), uint32_t(row), uint32_t(n), uint32_t(matrix), uint32_t(m)}))
                return false;
        }
    return true;
}

// Records two products of x and their GLU in one dispatch, whose result is int8.
static bool record_gated(Recording &r, ggml_tensor *glu, const Quantized *int8) {
    const ggml_tensor *gate = glu->src[0], *up = glu->src[1];
    Product p{};
    p.op = gate;
    p.up = up->src[0];
    p.glu = 1 + uint32_t(ggml_get_glu_op(glu));
    p.y = bound(*r.device, gate);
    p.y.view.offset = 0;
    p.y.place = int8->q.place;
    p.y.place.size += int8->scales.place.size;
    p.added = p.y;
    if (!r.quantized(gate->src[1], &p.x) || !choose_kernel(r, &p) || !multiply_parts(r, p)) return false;
    r.take(glu);
    return true;
}

// A result that is too large for one binding is computed in pieces of some rows each.
static bool record_product(Recording &r, ggml_tensor *op) {
    ggml_tensor *glu = glu_of(r, op);
    // Weights are converted first: a conversion would discard the memory that is reserved for the GLU as int8.
    if (glu && !(r.lay_operands(glu->src[0]) && r.lay_operands(glu->src[1]) && r.lay_operands(r.only_user(glu))))
        return false;
    if (const Quantized *int8 = glu ? r.int8_copy(glu) : nullptr) return record_gated(r, glu, int8);
    const ggml_tensor *w = op->src[0], *x = op->src[1];
    const bool quantized = ggml_is_quantized(w->type);
    ggml_tensor *sum = op, *other = addend(r, op, &sum);
    const Bound added = bound_added(*r.device, other ? other : sum);
    if (other) r.take(sum);
    const uint64_t columns = uint64_t(op->ne[1]), step = has_experts(op) ? columns : columns_of_binding(*r.device, sum);
    for (uint64_t column = 0; column < columns; column += step) {
        const uint64_t n = std::min(step, columns - column);
        const ggml_tensor result = part_of(sum, column, n, 0, uint64_t(sum->ne[2]));
        ggml_tensor rows = has_experts(op) ? *x : part_of(x, column, n, 0, uint64_t(x->ne[2])), piece = *op;
        piece.ne[1] = int64_t(n);
        piece.src[1] = &rows;
        Product p{};
        p.op = &piece;
        p.y = bound(*r.device, &result);
        p.added = other ? added : p.y;
        p.adds = other;
        if (quantized && !r.quantized(&rows, &p.x)) return false;
        if (!choose_kernel(r, &p) || !multiply_parts(r, p)) return false;
    }
    return true;
}

const std::vector<Served> PRODUCTS = {
    {GGML_OP_MUL_MAT, product_refused, record_product},
    {GGML_OP_MUL_MAT_ID, product_refused, record_product},
};

}  // namespace zinc
