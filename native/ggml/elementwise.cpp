// Operations element by element.
#include "operations.h"

namespace zinc {

static const char *types_refused(const ggml_tensor *op) {
    if (float_type(op) < 0 || float_type(op->src[0]) < 0) return "type";
    return in_words(op) ? nullptr : "strides";
}

// --- two operands ----------------------------------------------------------------------------------------------------

static const char *binary_refused(const Device &, const ggml_tensor *op) {
    return float_type(op->src[1]) < 0 ? "type" : types_refused(op);
}

// Also writes y as int8, if y is float32 and a product reads it.
static bool glu(Recording &r, const ggml_tensor *op, uint32_t kind, const Bound &a, const Bound &b) {
    const Bound y = bound(*r.device, op);
    const glu_constants constants{kind, uint32_t(float_type(op))};
    const glu_params params{a.view, b.view, y.view, number_of(op, 2), number_of(op, 3)};
    if (const Quantized *int8 = r.int8_copy(op))
        return r.dispatch(GRAPH_GLU_QUANTIZED, constants, params,
                          {a.place, b.place, y.place, int8->q.place, int8->scales.place});
    return r.dispatch(GRAPH_GLU, constants, params, {a.place, b.place, y.place});
}

static bool record_binary(Recording &r, ggml_tensor *op) {
    const std::optional<bool> done = op->op == GGML_OP_MUL ? record_sum_experts(r, op) : std::nullopt;
    if (done) return *done;
    const uint32_t kind = op->op == GGML_OP_ADD ? BINARY_OP_ADD : op->op == GGML_OP_SUB ? BINARY_OP_SUB
                        : op->op == GGML_OP_MUL ? BINARY_OP_MUL : BINARY_OP_DIV;
    const Bound a = bound(*r.device, op->src[0]), b = bound(*r.device, op->src[1]), y = bound(*r.device, op);
    const bool plain = is_f32(op) && is_f32(op->src[0]) && is_f32(op->src[1]) && ggml_are_same_shape(op, op->src[1]);
    if (op->op == GGML_OP_MUL && plain) return glu(r, op, GLU_OP_MUL, a, b);
    const binary_constants constants{kind, uint32_t(float_type(op->src[0])), uint32_t(float_type(op->src[1])),
                                     uint32_t(float_type(op))};
    return r.dispatch(GRAPH_BINARY, constants, binary_params{a.view, b.view, y.view}, {a.place, b.place, y.place});
}

static const char *glu_refused(const Device &, const ggml_tensor *op) {
    if (ggml_get_glu_op(op) >= GGML_GLU_OP_COUNT) return "operation";
    for (int i = 0; i < 2; ++i)
        if (op->src[i] && op->src[i]->type != op->type) return "type";
    return types_refused(op);
}

static bool record_glu(Recording &r, ggml_tensor *op) {
    Bound a = bound(*r.device, op->src[0]), b = op->src[1] ? bound(*r.device, op->src[1]) : a;
    if (!op->src[1]) {
        const bool swapped = op->op_params[1];
        (swapped ? a : b).view.offset += uint32_t(op->ne[0]);
        a.view.n[0] = b.view.n[0] = uint32_t(op->ne[0]);
    }
    return glu(r, op, uint32_t(ggml_get_glu_op(op)), a, b);
}

static bool record_add_id(Recording &r, ggml_tensor *op) {
    const Bound a = bound(*r.device, op->src[0]), b = bound(*r.device, op->src[1]), y = bound(*r.device, op);
    const Bound ids = bound(*r.device, op->src[2]);
    return r.dispatch(GRAPH_ADD_ID, {}, add_id_params{a.view, b.view, ids.view, y.view},
                      {a.place, b.place, ids.place, y.place});
}

// --- one operand -----------------------------------------------------------------------------------------------------

constexpr std::pair<ggml_op, int> UNARY[] = {
    {GGML_OP_SCALE, UNARY_OP_SCALE}, {GGML_OP_CLAMP, UNARY_OP_CLAMP}, {GGML_OP_SQR, UNARY_OP_SQR},
    {GGML_OP_SQRT, UNARY_OP_SQRT},   {GGML_OP_LOG, UNARY_OP_LOG},     {GGML_OP_SIN, UNARY_OP_SIN},
    {GGML_OP_COS, UNARY_OP_COS},     {GGML_OP_FILL, UNARY_OP_FILL},   {GGML_OP_LEAKY_RELU, UNARY_OP_LEAKY_RELU}};

static int unary_op(const ggml_tensor *op) {  // -1: none
    for (const auto &[ggml_kind, kind] : UNARY)
        if (ggml_kind == op->op) return kind;
    return ggml_get_unary_op(op) < GGML_UNARY_OP_COUNT ? int(ggml_get_unary_op(op)) : -1;
}

static const char *unary_refused(const Device &, const ggml_tensor *op) {
    return unary_op(op) < 0 ? "operation" : types_refused(op);
}

static bool record_unary(Recording &r, ggml_tensor *op) {
    const std::optional<bool> done = unary_op(op) == UNARY_OP_SIGMOID ? record_route(r, op) : std::nullopt;
    if (done) return *done;
    const ggml_tensor *source = op->op == GGML_OP_FILL ? op : op->src[0], *result = op;
    const Bound x = bound(*r.device, source);
    Follower then{FOLLOW_OP_NONE, x, 0, nullptr};
    if (is_f32(op) && source != op) then = follower(r, {source}, &result, false);
    const Bound y = bound(*r.device, result);
    const int first = op->op == GGML_OP_UNARY ? 1 : 0;  // number of the operation's parameters
    const unary_constants constants{uint32_t(unary_op(op)), uint32_t(float_type(source)), uint32_t(float_type(op)),
                                    then.op};
    const unary_params params{x.view, then.other.view, y.view, number_of(op, first), number_of(op, first + 1),
                              number_of(op, first + 2), number_of(op, first + 3)};
    return r.dispatch(GRAPH_UNARY, constants, params, {x.place, then.other.place, y.place});
}

static_assert(int(UNARY_OP_XIELU) == int(GGML_UNARY_OP_XIELU) && int(UNARY_OP_TRUNC) == int(GGML_UNARY_OP_TRUNC) &&
              int(GLU_OP_SWIGLU_CLAMP) == int(GGML_GLU_OP_SWIGLU_CLAMP), "kernels number operations as ggml does");

const std::vector<Served> ELEMENTWISE = {
    {GGML_OP_ADD, binary_refused, record_binary},      {GGML_OP_SUB, binary_refused, record_binary},
    {GGML_OP_MUL, binary_refused, record_binary},      {GGML_OP_DIV, binary_refused, record_binary},
    {GGML_OP_GLU, glu_refused, record_glu},            {GGML_OP_ADD_ID, f32_refused, record_add_id},
    {GGML_OP_UNARY, unary_refused, record_unary},      {GGML_OP_SCALE, unary_refused, record_unary},
    {GGML_OP_CLAMP, unary_refused, record_unary},      {GGML_OP_SQR, unary_refused, record_unary},
    {GGML_OP_SQRT, unary_refused, record_unary},       {GGML_OP_LOG, unary_refused, record_unary},
    {GGML_OP_SIN, unary_refused, record_unary},        {GGML_OP_COS, unary_refused, record_unary},
    {GGML_OP_LEAKY_RELU, unary_refused, record_unary}, {GGML_OP_FILL, unary_refused, record_unary},
};

}  // namespace zinc
