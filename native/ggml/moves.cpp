// Copies: from type to type, between places, by rows, and repeated.
#include <algorithm>

#include "attention.h"
#include "cells.h"
#include "operations.h"
#include "orders.h"
#include "weights.h"

namespace zinc {

// --- types -----------------------------------------------------------------------------------------------------------

static int move_type(ggml_type type) {  // a MOVE_TYPE_; -1: none
    switch (type) {
#define X(name) case GGML_TYPE_##name: return MOVE_TYPE_##name;
        X(F32) X(F16) X(BF16) X(I32) X(I16) X(I8) X(Q8_0) X(Q4_0) X(Q4_1) X(Q5_0) X(Q5_1) X(IQ4_NL)
#undef X
        default: return -1;
    }
}

static bool in_blocks(int type) { return type >= MOVE_TYPE_Q8_0; }
static bool is_number(int type) { return type >= 0 && type <= MOVE_TYPE_I32; }

// Whether a row's elements, or its blocks, follow each other without gaps.
static bool dense_rows(const ggml_tensor *t) { return t->nb[0] == ggml_type_size(t->type); }

// Whether the kernels convert the source type to the target type.
static bool converts(int source, int target) {
    if (source < 0 || target < 0) return false;
    if (in_blocks(target)) return !in_blocks(source) && is_number(source) && source != MOVE_TYPE_I32;
    if (in_blocks(source)) return is_number(target);
    return source == target || (is_number(source) && is_number(target));
}

// --- the dispatch ----------------------------------------------------------------------------------------------------

struct Move {
    uint32_t op;
    int source, target;
    Bound x, ids, y;
    uint32_t id_words = 1;
    uint32_t shift[4] = {};
};

static bool record(Recording &r, const Move &m) {
    const move_constants constants{m.op, uint32_t(m.source), uint32_t(m.target)};  // TO_BLOCKS has the same constants
    const std::initializer_list<za_place> places = {m.x.place, m.ids.place, m.y.place};
    move_params params{m.x.view, m.ids.view, m.y.view, m.id_words, {}};
    std::copy_n(m.shift, 4, params.shift);
    return r.dispatch(in_blocks(m.target) ? GRAPH_TO_BLOCKS : GRAPH_MOVE, constants, params, places);
}

// A tensor of elements of 8 bytes as a tensor of twice as many elements of 4 bytes.
static Bound as_words(Bound b) {
    b.view.offset *= 2;
    b.view.n[0] *= 2;
    for (int d = 1; d < 4; ++d) b.view.s[d] *= 2;
    return b;
}

// A tensor of blocks as a tensor of the half words of these blocks.
static Bound as_halves(const ggml_tensor *t, Bound b) {
    b.view.n[0] = uint32_t(ggml_row_size(t->type, t->ne[0]) / 2);
    b.view.s[0] = 1;
    return b;
}

static Move move_of(Recording &r, uint32_t op, const ggml_tensor *x, const ggml_tensor *y) {
    Move m{op, move_type(x->type), move_type(y->type), bound(*r.device, x), {}, bound(*r.device, y), 1, {}};
    if (x->type == GGML_TYPE_I64) m = {op, MOVE_TYPE_I32, MOVE_TYPE_I32, as_words(m.x), {}, as_words(m.y), 1, {}};
    else if (x->type == y->type && ggml_is_quantized(x->type))
        m = {op, MOVE_TYPE_I16, MOVE_TYPE_I16, as_halves(x, m.x), {}, as_halves(y, m.y), 1, {}};
    else if (in_blocks(m.target)) m.y.view.n[0] = uint32_t(y->ne[0] / ggml_blck_size(y->type));  // for TO_BLOCKS
    m.ids = m.x;
    return m;
}

// --- copies ----------------------------------------------------------------------------------------------------------

// Blocks and elements of 8 bytes are moved as half words and words. SET, PAD and ROLL, which shift, take neither.
static const char *same_type_refused(const ggml_tensor *op, int operands) {
    const ggml_type type = op->type;
    const bool shifts = op->op == GGML_OP_SET || op->op == GGML_OP_PAD || op->op == GGML_OP_ROLL;
    const bool blocks = ggml_is_quantized(type) && ggml_type_size(type) % 2 == 0 && op->op != GGML_OP_REPEAT;
    bool dense = dense_rows(op);
    for (int i = 0; i < operands; ++i) {
        if (op->src[i]->type != type) return "type";
        dense = dense && dense_rows(op->src[i]);
    }
    if ((blocks || type == GGML_TYPE_I64) && !shifts) return dense ? nullptr : "strides";
    return is_number(move_type(type)) || type == GGML_TYPE_I16 || type == GGML_TYPE_I8 ? nullptr : "type";
}

static const char *copy_refused(const Device &, const ggml_tensor *op) {
    const ggml_tensor *x = op->src[0];
    const int source = move_type(x->type), target = move_type(op->type);
    if (x->type == op->type) return same_type_refused(op, 1);
    // Such values are often halfway between two numbers. ggml's reference and its CPU code round them differently.
    if (target == MOVE_TYPE_Q8_0 && (source == MOVE_TYPE_F16 || source == MOVE_TYPE_BF16)) return "rounding";
    if (!converts(source, target)) return "type";
    if ((in_blocks(source) && !dense_rows(x)) || (in_blocks(target) && !dense_rows(op))) return "strides";
    return nullptr;
}

static bool record_copy(Recording &r, ggml_tensor *op) { return record(r, move_of(r, MOVE_OP_LINEAR, op->src[0], op)); }

static const char *parts_refused(const Device &, const ggml_tensor *op) {
    return same_type_refused(op, op->op == GGML_OP_CONCAT || op->op == GGML_OP_SET ? 2 : 1);
}

static bool record_concat(Recording &r, ggml_tensor *op) {
    const int dim = op->op_params[0];
    uint32_t before = 0;
    for (int i = 0; i < 2; ++i) {
        Move m = move_of(r, MOVE_OP_LINEAR, op->src[i], op);
        m.y.view.offset += before * m.y.view.s[dim];
        m.y.view.n[dim] = m.x.view.n[dim];
        before += m.x.view.n[dim];
        if (!ggml_is_empty(op->src[i]) && !record(r, m)) return false;
    }
    return true;
}

static bool record_set(Recording &r, ggml_tensor *op) {
    const size_t unit = unit_of(op);
    if (!op->op_params[4] && !record_copy(r, op)) return false;
    Move m = move_of(r, MOVE_OP_LINEAR, op->src[1], op);
    m.y.view.offset += uint32_t(size_t(op->op_params[3]) / unit);
    for (int d = 0; d < 4; ++d) {
        m.y.view.n[d] = uint32_t(op->src[1]->ne[d]);
        m.y.view.s[d] = d ? uint32_t(size_t(op->op_params[d - 1]) / unit) : 1;
    }
    return record(r, m);
}

static bool record_repeat(Recording &r, ggml_tensor *op) { return record(r, move_of(r, MOVE_OP_WRAP, op->src[0], op)); }

static bool record_shifted(Recording &r, ggml_tensor *op) {
    const bool rolls = op->op == GGML_OP_ROLL, wraps = rolls || op->op_params[8];
    Move m = move_of(r, wraps ? MOVE_OP_WRAP : MOVE_OP_PAD, op->src[0], op);
    for (int d = 0; d < 4; ++d) {
        const int64_t n = op->src[0]->ne[d], before = op->op_params[rolls ? d : 2 * d];
        m.shift[d] = uint32_t(wraps ? (n - before % n) % n : -before);
    }
    return record(r, m);
}

// --- rows ------------------------------------------------------------------------------------------------------------

static const char *get_rows_refused(const Device &, const ggml_tensor *op) {
    const ggml_tensor *x = op->src[0];
    if (op->src[1]->type != GGML_TYPE_I32) return "type of rows' numbers";
    if (weight_type(x->type) >= 0 && !x->view_src)
        return is_f32(op) && ggml_is_contiguous(x) ? nullptr : "strides";
    if (!converts(move_type(x->type), move_type(op->type))) return "type";
    return in_blocks(move_type(x->type)) && !dense_rows(x) ? "strides" : nullptr;
}

static bool record_get_rows(Recording &r, ggml_tensor *op) {
    if (r.gathers_state(op)) return true;
    const ggml_tensor *x = op->src[0];
    const Bound ids = bound(*r.device, op->src[1]), y = bound(*r.device, op);
    if (weight_type(x->type) >= 0 && !x->view_src) {
        const Bound w = bound(*r.device, x);
        const get_weights_params params{ids.view, y.view, 2 * w.view.offset, {uint32_t(x->nb[2]), uint32_t(x->nb[3])},
                                        uint32_t(x->ne[1]), 0};
        return r.dispatch(GRAPH_GET_WEIGHTS, get_weights_constants{uint32_t(weight_type(x->type))}, params,
                          {w.place, ids.place, y.place});
    }
    Move m = move_of(r, MOVE_OP_GET_ROWS, x, op);
    m.ids = ids;
    return record(r, m);
}

static const char *set_rows_refused(const Device &, const ggml_tensor *op) {
    const ggml_tensor *x = op->src[0], *ids = op->src[1];
    const int target = move_type(op->type);
    if (ids->type != GGML_TYPE_I64 && ids->type != GGML_TYPE_I32) return "type of rows' numbers";
    if (!converts(move_type(x->type), target)) return "type";
    if (in_blocks(target) && !dense_rows(op)) return "strides";
    // The host reads the numbers of the rows, because it notes the order of writes.
    return root_of(ids)->op != GGML_OP_NONE && root_of(op)->op == GGML_OP_NONE ? "rows' numbers" : nullptr;
}

static int64_t number_at(const ggml_tensor *ids, const char *bytes, int64_t i, int64_t j, int64_t k) {
    const char *address = bytes + size_t(i) * ids->nb[0] + size_t(j % ids->ne[1]) * ids->nb[1] +
                          size_t(k % ids->ne[2]) * ids->nb[2];
    int64_t wide;
    int32_t narrow;
    if (ids->type == GGML_TYPE_I32) return __builtin_memcpy(&narrow, address, 4), narrow;
    return __builtin_memcpy(&wide, address, 8), wide;
}

// Notes the cells that SET_ROWS writes, row of x after row of x. Each cell becomes the latest of its cache.
static bool note_rows(const ggml_tensor *op) {
    const ggml_tensor *x = op->src[0], *ids = op->src[1], *root = root_of(op);
    const size_t cell = ggml_row_size(root->type, root->ne[0]);
    const char *bytes = host_bytes(ids);
    if (!bytes) return false;
    for (int64_t k = 0; k < x->ne[3]; ++k)
        for (int64_t j = 0; j < x->ne[2]; ++j)
            for (int64_t i = 0; i < x->ne[1]; ++i) {
                const int64_t row = number_at(ids, bytes, i, j, k);
                if (row < 0 || row >= op->ne[1])
                    return za_fail("got row %lld, expected one below %lld", static_cast<long long>(row),
                                   static_cast<long long>(op->ne[1]));
                const size_t offset = size_t(row) * op->nb[1] + size_t(j) * op->nb[2] + size_t(k) * op->nb[3];
                note_write(root, uint32_t((begin_of(op) - begin_of(root) + offset) / cell));
            }
    return true;
}

// Attention takes no magnitude below MIN_INPUT from a cache. f32 and bf16 have such magnitudes; they are written as +0.
static bool flush(Recording &r, Bound *x) {
    const Bound from = *x;
    return scratch_rows(*r.device, from, from.view.n[0], x) && fit(r, from, *x, MIN_INPUT);
}

static bool record_set_rows(Recording &r, ggml_tensor *op) {
    if (is_cache(root_of(op)) && !note_rows(op)) return false;
    Move m = move_of(r, MOVE_OP_SET_ROWS, op->src[0], op);
    m.ids = bound(*r.device, op->src[1]);
    m.id_words = op->src[1]->type == GGML_TYPE_I64 ? 2 : 1;
    const bool small = is_f32(op->src[0]) && (m.target == MOVE_TYPE_F32 || m.target == MOVE_TYPE_BF16);
    return (!small || !is_cache(root_of(op)) || flush(r, &m.x)) && record(r, m);
}

const std::vector<Served> MOVES = {
    {GGML_OP_CPY, copy_refused, record_copy},          {GGML_OP_CONT, copy_refused, record_copy},
    {GGML_OP_DUP, copy_refused, record_copy},          {GGML_OP_CONCAT, parts_refused, record_concat},
    {GGML_OP_SET, parts_refused, record_set},          {GGML_OP_REPEAT, parts_refused, record_repeat},
    {GGML_OP_PAD, parts_refused, record_shifted},      {GGML_OP_ROLL, parts_refused, record_shifted},
    {GGML_OP_GET_ROWS, get_rows_refused, record_get_rows},
    {GGML_OP_SET_ROWS, set_rows_refused, record_set_rows},
};

}  // namespace zinc
