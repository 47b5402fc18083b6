// MUL_MAT: quantized weights with activations as int8, and weights of float types.
#include "operations.h"

#include <algorithm>

#include "weights.h"

namespace zinc {

constexpr uint64_t FEW = 8;         // rows of x that vector products take
constexpr uint64_t MOST_GRID = 65535;

// Rows of weights that one binding holds, whole groups that begin where a binding may; 0: none.
static uint64_t rows_of_binding(const Device &device, const ggml_tensor *w) {
    if (fits(device, w)) return uint64_t(w->ne[1]);
    if (w->ne[2] * w->ne[3] != 1) return 0;
    uint64_t step = WEIGHT_GROUP;
    while (step * w->nb[1] % device.alignment) step *= 2;
    return (device.most - device.alignment) / w->nb[1] / step * step;
}

// Rows of x, and of the result, of which one binding holds the results: all, or whole tiles of them; 0: none.
static uint64_t columns_of_binding(const Device &device, const ggml_tensor *op) {
    if (fits(device, op)) return std::max<uint64_t>(uint64_t(op->ne[1]), 1);
    return op->ne[2] * op->ne[3] == 1 ? (device.most - device.alignment) / op->nb[1] / 32 * 32 : 0;
}

static const char *product_refused(const Device &device, const ggml_tensor *op) {
    const ggml_tensor *w = op->src[0], *x = op->src[1];
    if (!is_f32(op) || float_type(x) < 0) return "type";
    if (uint64_t(op->ne[2] * op->ne[3]) > MOST_GRID || uint64_t(op->ne[1]) > FEW * MOST_GRID) return "size";
    if (!ggml_is_quantized(w->type))
        return float_type(w) < 0 ? "type" : fits(device, w) && fits(device, op) ? nullptr : "size";
    if (weight_type(w->type) < 0 || !is_f32(x)) return "type";
    const int precision = op->op_params[3];
    if (precision >= GGML_PREC_F32 && precision < GGML_PREC_Q8) return "precision";
    if (w->view_src || !ggml_is_contiguous(w) || (w->ne[2] * w->ne[3] > 1 && w->nb[2] % 16)) return "strides";
    return rows_of_binding(device, w) && columns_of_binding(device, op) ? nullptr : "size";
}

// What is added to a product, where the next operation does that and no more.
static ggml_tensor *addend(Recording &r, const ggml_tensor *op, ggml_tensor **sum) {
    ggml_tensor *found = r.only_user(op);
    if (!found || found->op != GGML_OP_ADD || !is_f32(found) || !ggml_are_same_shape(found, op)) return nullptr;
    ggml_tensor *other = found->src[0] == op ? found->src[1] : found->src[0];
    if (other == op || !is_f32(other)) return nullptr;
    for (int d = 0; d < 4; ++d)
        if (other->ne[d] != op->ne[d] && other->ne[d] != 1) return nullptr;
    if (found->src[1] == op && !ggml_are_same_shape(other, op)) return nullptr;
    *sum = found;
    return other;
}

// The steps of what is added: 0 where it repeats.
static Bound bound_added(const Device &device, const ggml_tensor *added) {
    Bound b = bound(device, added);
    for (int d = 0; d < 4; ++d)
        if (added->ne[d] == 1) b.at.s[d] = 0;
    return b;
}

static mul_mat_constants tile_of(uint64_t rows, uint64_t columns, bool added) {
    mul_mat_constants c{};
    c.tile_rows = rows > 32 ? 64 : 32;
    c.tile_columns = columns > 16 ? 32 : 16;
    c.own_rows = 4;
    c.own_columns = 4;
    c.workgroup_size = c.tile_rows / c.own_rows * c.tile_columns / c.own_columns;
    c.add = added;
    return c;
}

// A wave has a group of rows, or several waves have it and share the superblocks, whose sums lie in shared memory.
static mul_mat_vec_constants few_of(const Device &device, uint32_t type, uint32_t columns, uint32_t superblocks,
                                    bool added) {
    constexpr uint32_t WAVES = 8, SHARED = 16384;  // bytes
    const bool two = type == WEIGHT_TYPE_MXFP4 || type == WEIGHT_TYPE_Q2_K || type == WEIGHT_TYPE_Q3_K;
    const uint32_t waves = device.on_cpu ? 1 : std::min(WAVES, superblocks);
    mul_mat_vec_constants c{};
    c.type = type;
    c.columns = columns;
    c.workgroup_size = WAVE * waves;
    c.subgroups = device.wave32;
    c.superblocks = std::min(superblocks, SHARED / (128 * columns));
    c.ahead = device.on_cpu ? 0 : two && superblocks >= 2 * waves ? 2 : 1;
    c.add = added;
    return c;
}

static uint32_t count(uint64_t n, uint64_t size) { return uint32_t(pieces(n, size)); }

// Rows [first, first + rows) of the weights.
static bool multiply(Recording &r, const ggml_tensor *op, const ggml_tensor *w, const Quantized &x, const Bound &added,
                     Bound y, bool adds, uint64_t first, uint64_t rows) {
    const uint64_t columns = uint64_t(op->ne[1]), planes = uint64_t(op->ne[2] * op->ne[3]);
    const uint32_t type = uint32_t(weight_type(w->type));
    const size_t begin = begin_of(w) + first * w->nb[1];  // a multiple of the alignment
    const uint64_t bytes = rows * w->nb[1] * uint64_t(w->ne[2] * w->ne[3]);
    const za_place place{buffer_of(w)->memory.of.handle, begin, (bytes + 3) / 4 * 4};
    mul_mat_params params{};
    params.w_steps[0] = uint32_t(w->ne[2] > 1 ? w->nb[2] / 16 : 0);
    params.w_steps[1] = uint32_t(w->ne[3] > 1 ? w->nb[3] / 16 : 0);
    params.repeats[0] = uint32_t(op->ne[2] / w->ne[2]);
    params.repeats[1] = uint32_t(op->ne[3] / w->ne[3]);
    params.blocks = uint32_t(w->ne[0] / 32);
    params.y = y.at;
    params.y.n[0] = uint32_t(rows);
    params.y.offset += uint32_t(first) * y.at.s[0];
    params.added = added.at;
    params.added.offset += uint32_t(first) * added.at.s[0];
    const std::initializer_list<za_place> places = {place, x.q.place, x.scales.place, added.place, y.place};
    if (columns > FEW) {
        mul_mat_constants c = tile_of(rows, columns, adds);
        c.type = type;
        return r.dispatch(GRAPH_MUL_MAT, c, params, places, 16,
                          {{count(rows, c.tile_rows), count(columns, c.tile_columns), uint32_t(planes)}});
    }
    const mul_mat_vec_constants c = few_of(*r.device, type, uint32_t(columns), count(uint64_t(w->ne[0]), 256), adds);
    mul_mat_vec_params same;
    static_assert(sizeof same == sizeof params, "both products have the same parameters");
    __builtin_memcpy(&same, &params, sizeof same);
    return r.dispatch(GRAPH_MUL_MAT_VEC, c, same, places, 16, {{count(rows, WEIGHT_GROUP), 1, uint32_t(planes)}});
}

// Whether rows are whole words of neighboring elements, as products of few rows read them.
static bool rows_in_words(const ggml_tensor *t) {
    return t->nb[0] == ggml_type_size(t->type) && (begin_of(t) | t->nb[1] | t->nb[2] | t->nb[3]) % 4 == 0;
}

static bool multiply_floats(Recording &r, const ggml_tensor *op, const Bound &added, const Bound &y, bool adds) {
    const ggml_tensor *w = op->src[0], *x = op->src[1];
    const uint64_t rows = uint64_t(op->ne[0]), columns = uint64_t(op->ne[1]);
    const uint32_t w_type = uint32_t(float_type(w)), x_type = uint32_t(float_type(x));
    const uint32_t planes = uint32_t(op->ne[2] * op->ne[3]);
    const Bound weights = bound(*r.device, w), of_x = bound(*r.device, x);
    const std::initializer_list<za_place> places = {weights.place, of_x.place, added.place, y.place};
    if (columns <= FEW && w->ne[0] % 8 == 0 && rows_in_words(w) && rows_in_words(x)) {
        const mul_mat_vec_constants few = few_of(*r.device, 0, uint32_t(columns), count(uint64_t(w->ne[0]), 256), adds);
        const mul_mat_float_vec_constants c{w_type, x_type, few.columns, few.workgroup_size, few.subgroups,
                                            few.superblocks, few.ahead && w->ne[0] % 64 == 0, few.add};
        return r.dispatch(GRAPH_MUL_MAT_FLOAT_VEC, c, mul_mat_float_vec_params{weights.at, of_x.at, added.at, y.at},
                          places, 8, {{count(rows, WEIGHT_GROUP), 1, planes}});
    }
    const mul_mat_constants t = tile_of(rows, columns, adds);
    const mul_mat_float_constants c{w_type, x_type, t.tile_rows, t.tile_columns, t.own_rows, t.own_columns,
                                    t.workgroup_size, t.add};
    return r.dispatch(GRAPH_MUL_MAT_FLOAT, c, mul_mat_float_params{weights.at, of_x.at, added.at, y.at}, places, 8,
                      {{count(rows, t.tile_rows), count(columns, t.tile_columns), planes}});
}

// Rows [first, first + rows) of x, or of a result.
static ggml_tensor part_of(const ggml_tensor *t, uint64_t first, uint64_t rows) {
    ggml_tensor part = *t;
    part.ne[1] = int64_t(rows);
    part.data = static_cast<char *>(t->data) + first * t->nb[1];
    return part;
}

// Results beyond a binding come in pieces, of some rows of x each.
static bool multiply_pieces(Recording &r, const ggml_tensor *op, const ggml_tensor *sum, const Bound *added) {
    const uint64_t most = rows_of_binding(*r.device, op->src[0]), rows = uint64_t(op->ne[0]);
    const uint64_t columns = uint64_t(op->ne[1]), step = columns_of_binding(*r.device, sum);
    for (uint64_t column = 0; column < columns; column += step) {
        const uint64_t few = std::min(step, columns - column);
        const ggml_tensor x = part_of(op->src[1], column, few), result = part_of(sum, column, few);
        Quantized of_x;
        if (!r.quantized(&x, &of_x)) return false;
        const Bound y = bound(*r.device, &result);
        for (uint64_t first = 0; first < rows; first += most) {
            const uint64_t n = std::min(most, rows - first);
            if (!multiply(r, &result, op->src[0], of_x, added ? *added : y, y, added, first, n)) return false;
        }
    }
    return true;
}

static bool record_product(Recording &r, ggml_tensor *op) {
    const ggml_tensor *w = op->src[0], *x = op->src[1];
    const bool quantized = ggml_is_quantized(w->type);
    ggml_tensor *sum = op, *other = addend(r, op, &sum);
    if (other && !quantized && (overlap(sum, x) || overlap(sum, w))) other = nullptr, sum = op;
    const Bound added = bound_added(*r.device, other ? other : sum);
    if (other) r.take(sum);
    if (quantized) return multiply_pieces(r, op, sum, other ? &added : nullptr);
    const Bound y = bound(*r.device, sum);
    return multiply_floats(r, op, other ? added : y, y, other);
}

const std::vector<Served> PRODUCTS = {{GGML_OP_MUL_MAT, product_refused, record_product}};

}  // namespace zinc
