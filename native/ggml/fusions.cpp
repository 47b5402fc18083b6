#include "fusions.h"

#include <algorithm>

#include "operations.h"
#include "tiles.h"
#include "weights.h"

namespace zinc {

const Fusion FUSIONS[FUSES] = {
    {"addend", "MUL_MAT/MUL_MAT_ID(W, x) ADD(0, a)", "none", 1},
    {"gated", "MUL_MAT/MUL_MAT_ID(W, x) MUL_MAT/MUL_MAT_ID(W, x) GLU(0, 1) MUL_MAT/MUL_MAT_ID(W, 2)", "none", 2},
    {"rms", "RMS_NORM(x) MUL(0, a) MUL_MAT(W, 1)", "all", 0},
    {"follower", "RMS_NORM/NORM/L2_NORM/UNARY(x) MUL/ADD/SCALE(0, a) MUL/ADD/SCALE(1, b)?", "none", 2},
    {"turned", "RMS_NORM/NORM/L2_NORM(x) MUL/ADD/SCALE(0, a)? ROPE(1, P)", "none", 1},
    {"int8", "RMS_NORM/NORM/L2_NORM/GLU/MUL(x) MUL_MAT/MUL_MAT_ID(W, 0)", "all", 1},
    {"router", "SOFT_MAX/SIGMOID(l)? ADD(0, b)? ARGSORT(1) VIEW(2) RESHAPE(0) GET_ROWS(4, 3) RESHAPE(5) SUM_ROWS(6)? "
               "CLAMP(7)? DIV/SOFT_MAX(6, 8)? SCALE(9)?", "ARGSORT's first", 7},
    {"experts", "MUL(x, w) VIEW(0) VIEW(0) ADD(1, 2) ADD(3, a)? ADD(4, b)?", "none", 3},
    {"summed", "MUL(x, w) VIEW(0) VIEW(0) ADD(1, 2) RMS_NORM(3) MUL/ADD/SCALE(4, a)? MUL_MAT(W, 5)", "ADD's", 1},
    {"concat", "CONCAT(s, x) SSM_CONV(0, w)", "CONCAT's", 0},
    {"activated", "SSM_CONV(x, w) ADD(0, b)? SILU(1)?", "none", 2},
    {"normed", "SSM_CONV(x, w) VIEW(0) L2_NORM/RMS_NORM(1) SCALE(2)? VIEW(0) L2_NORM/RMS_NORM(4)? SCALE(5)?",
     "SSM_CONV's", 2},
    {"states", "GATED_DELTA_NET/SSM_SCAN(q, k, v, g, b, s) VIEW(0) CPY(1, c)", "the scores", 1},
    {"gathered", "GET_ROWS(s, I) RESHAPE(0) GATED_DELTA_NET(q, k, v, g, b, 1)", "none", 1},
    {"settled", "ROPE(x, P) PERMUTE(0) FLASH_ATTN_EXT(1, K, V)", "none", 1},
};

// --- conditions ------------------------------------------------------------------------------------------------------

int Recording::number(const ggml_tensor *node) const {
    return int(std::find(graph_->nodes + current_, graph_->nodes + graph_->n_nodes, node) - graph_->nodes);
}

bool Recording::is_hidden(const ggml_tensor *node, int uses) const {
    const int i = number(node);
    if (i == graph_->n_nodes || node->flags & GGML_TENSOR_FLAG_OUTPUT || ggml_node_get_use_count(graph_, i) != uses)
        return false;
    return !node->view_src || is_view(node) || is_hidden(node->src[0]);
}

bool Recording::hides(const ggml_tensor *last, const ggml_tensor *result) const {
    for (int i = current_; graph_->nodes[i] != last; ++i) {
        const ggml_tensor *node = graph_->nodes[i];
        if (root_of(node) == result) continue;
        int uses = 0;
        for (int j = i + 1; j < graph_->n_nodes && graph_->nodes[j - 1] != last; ++j)
            for (const ggml_tensor *source : graph_->nodes[j]->src) uses += source == node;
        if (!is_hidden(node, uses)) return false;
    }
    return true;
}

ggml_tensor *Recording::only_user(const ggml_tensor *node) const {
    for (int alias = number(node), i = alias + 1; i < graph_->n_nodes && is_hidden(graph_->nodes[alias]); ++i) {
        ggml_tensor *user = graph_->nodes[i];
        if (user->op == GGML_OP_RESHAPE && user->src[0] == graph_->nodes[alias]) alias = i;
        if (is_view(user) || ggml_is_empty(user)) continue;
        const auto is_node = [node](const ggml_tensor *t) { return t && shaped(t) == node; };
        return std::any_of(user->src, user->src + 2, is_node) ? user : nullptr;
    }
    return nullptr;
}

const ggml_tensor *Recording::only_reader(ggml_op op, int operand) const {
    const ggml_tensor *node = graph_->nodes[current_];
    if (!is_hidden(node)) return nullptr;
    for (int i = current_ + 1; i < graph_->n_nodes; ++i) {
        const ggml_tensor *user = graph_->nodes[i];
        if (std::find(user->src, user->src + GGML_MAX_SRC, node) == user->src + GGML_MAX_SRC) continue;
        if (!is_view(user)) return user->op == op && user->src[operand] == node ? user : nullptr;
        if (!is_hidden(node = user)) return nullptr;
    }
    return nullptr;
}

ggml_tensor *Recording::after(const ggml_tensor *node) const {
    int i = number(node) + 1;
    while (i < graph_->n_nodes && (is_view(graph_->nodes[i]) || ggml_is_empty(graph_->nodes[i]))) ++i;
    return i < graph_->n_nodes ? graph_->nodes[i] : nullptr;
}

bool Recording::keeps(const ggml_tensor *t, const ggml_tensor *since) const {
    for (int i = current_; i-- > 0;) {
        const ggml_tensor *other = graph_->nodes[i];
        if (other == since) return true;
        if (!is_view(other) && !ggml_is_empty(other) && overlap(other, t)) return false;
    }
    return false;  // the earlier node is in another graph
}

// The operations that follow an operation in a graph, one after another.
struct Chain {
    const Recording *r;
    const ggml_tensor *last;

    // The next operation, if it is `op` of `operand` in any shape; else NULL. part: a part of the operand is enough.
    ggml_tensor *then(ggml_op op, const ggml_tensor *operand, bool part = false) {
        ggml_tensor *next = r->after(last);
        if (!next || next->op != op) return nullptr;
        const ggml_tensor *source = next->src[0];
        while (source->op != GGML_OP_NONE && is_view(source)) source = source->src[0];
        const bool all = ggml_is_contiguous(next->src[0]) && ggml_nelements(next->src[0]) == ggml_nelements(operand);
        return source == operand && (all || part) ? last = next, next : nullptr;
    }
};

// --- ADD, MUL or SCALE of one result ---------------------------------------------------------------------------------

// The only user of a node's result, if it is ADD, MUL or SCALE, and the user's other operand.
static ggml_tensor *next_of(const Recording &r, const ggml_tensor *node, ggml_tensor **other) {
    ggml_tensor *user = r.only_user(node);
    *other = nullptr;
    if (!user || !is_f32(user) || !ggml_are_same_shape(user, node)) return nullptr;
    if (user->op == GGML_OP_SCALE) return user;
    if (user->op != GGML_OP_MUL && user->op != GGML_OP_ADD) return nullptr;
    *other = shaped(user->src[0]) == node ? user->src[1] : user->src[0];
    return is_f32(*other) && shaped(*other) != node ? user : nullptr;
}

ggml_tensor *addend(const Recording &r, const ggml_tensor *product, ggml_tensor **sum) {
    ggml_tensor *other, *user = r.fuses(ADDEND) ? next_of(r, product, &other) : nullptr;
    if (!user || user->op != GGML_OP_ADD) return nullptr;
    for (int d = 0; d < 4; ++d)
        if (other->ne[d] != product->ne[d] && other->ne[d] != 1) return nullptr;
    for (const ggml_tensor *read : product->src)
        if (read && overlap(user, read)) return nullptr;
    *sum = user;
    return other;
}

// --- gate, up and their GLU ------------------------------------------------------------------------------------------

ggml_tensor *glu_of(const Recording &r, const ggml_tensor *product) {
    const ggml_tensor *w = product->src[0], *x = product->src[1], *other = r.fuses(GATED) ? r.after(product) : nullptr;
    ggml_tensor *glu = other ? r.after(other) : nullptr;
    if (!glu || glu->op != GGML_OP_GLU || other->op != product->op || r.device->is_host) return nullptr;
    if ((glu->src[0] != product || glu->src[1] != other) && (glu->src[0] != other || glu->src[1] != product))
        return nullptr;
    const ggml_tensor *v = other->src[0], *reader = r.only_user(glu);
    const bool alike = x == other->src[1] && product->src[2] == other->src[2] && w->type == v->type &&
                       ggml_are_same_shape(w, v) && (begin_of(w) - begin_of(v)) % r.device->alignment == 0;
    const uint32_t kind = uint32_t(ggml_get_glu_op(glu));
    // Vector products serve few rows of x. Without experts one binding holds a whole matrix.
    const int64_t rows = product->src[2] ? product->ne[2] * product->ne[3] : product->ne[1];
    const bool served = (kind == GLU_OP_SWIGLU || kind == GLU_OP_GEGLU) && rows <= int64_t(MOST_VECTOR_ROWS) &&
                        weight_type(w->type) >= 0 && w->ne[1] % SUPERBLOCK == 0 && fits(*r.device, product) &&
                        (product->src[2] || fits(*r.device, w));
    const bool reads = reader && is_product(reader) && shaped(reader->src[1]) == glu;
    const bool hidden = r.is_hidden(product) && r.is_hidden(other);
    return alike && served && hidden && reads && reader->src[1]->ne[0] == glu->ne[0] ? glu : nullptr;
}

// --- a norm before a product -----------------------------------------------------------------------------------------

const ggml_tensor *rms_of(const Recording &r, const ggml_tensor *product) {
    constexpr int64_t MOST_ROWS = 1024;  // of weights: larger products take longer than they would wait for the norm
    const ggml_tensor *y = product->src[1], *norm = y->op == GGML_OP_MUL ? y->src[0] : y, *x = norm->src[0];
    if (!r.fuses(RMS) || y->op != GGML_OP_MUL || norm->op != GGML_OP_RMS_NORM || r.device->is_host) return nullptr;
    const ggml_tensor *a = y->src[1];
    const bool rows = is_f32(x) && is_f32(a) && is_f32(y) && ggml_nrows(x) == 1 && a->ne[0] == x->ne[0] &&
                      ggml_are_same_shape(x, y) && x->nb[0] == sizeof(float);
    const bool small = product->op == GGML_OP_MUL_MAT && product->src[0]->ne[1] <= MOST_ROWS && number_of(norm, 0) > 0;
    const bool kept = !overlap(x, norm) && r.keeps(x, norm) && r.keeps(a, norm);
    return rows && small && kept && !overlap(x, product) && !overlap(a, product) ? y : nullptr;
}

// Whether a kernel may write rows of y while it still reads rows of x: they lie at the same places, or do not overlap.
static bool spares_rows(const ggml_tensor *x, const ggml_tensor *y) {
    return !overlap(x, y) || (begin_of(x) == begin_of(y) && ggml_are_same_stride(x, y) && ggml_are_same_shape(x, y));
}

Follower follower(Recording &r, std::initializer_list<const ggml_tensor *> x, const ggml_tensor **result, bool scale) {
    ggml_tensor *other, *user = r.fuses(FOLLOWER) ? next_of(r, *result, &other) : nullptr;
    Follower follow{FOLLOW_OP_NONE, bound(*r.device, *result), 0, nullptr};
    if (!user || (user->op == GGML_OP_SCALE && (!scale || number_of(user, 1) != 0))) return follow;
    for (const ggml_tensor *read : x)
        if (read && !spares_rows(read, user)) return follow;
    follow.op = user->op == GGML_OP_SCALE ? FOLLOW_OP_SCALE : user->op == GGML_OP_MUL ? FOLLOW_OP_MUL : FOLLOW_OP_ADD;
    if (other) follow.other = bound(*r.device, follow.tensor = other);
    else follow.scale = number_of(user, 0);
    r.take(user);
    *result = user;
    return follow;
}

ggml_tensor *rope_of_norm(const Recording &r, std::initializer_list<const ggml_tensor *> reads,
                          const ggml_tensor *norm) {
    ggml_tensor *rope = r.fuses(TURNED) && !r.device->is_host ? r.only_user(norm) : nullptr;
    if (!rope || rope->op != GGML_OP_ROPE || rope->src[0] != norm || !is_f32(rope)) return nullptr;
    for (const ggml_tensor *read : reads)
        if (read && !spares_rows(read, rope)) return nullptr;
    return rope;
}

// --- results as int8 -------------------------------------------------------------------------------------------------

const Quantized *Recording::int8_copy(const ggml_tensor *y, bool packs_rows) {
    constexpr int NEAR = 64;  // nodes
    const bool whole = fuses(INT8) && is_f32(y) && ggml_is_contiguous(y);
    for (int i = current_ + 1; whole && i < std::min(graph_->n_nodes, current_ + NEAR); ++i) {
        const ggml_tensor *user = graph_->nodes[i], *x = user->src[1];
        if (!is_product(user) || shaped(x) != y || weight_type(user->src[0]->type) < 0) continue;
        const bool packs = packs_rows && y->ne[0] % 32 == 0 && x->ne[0] % y->ne[0] == 0 && x->ne[0] % 256 == 0;
        if (x->ne[0] == y->ne[0] || packs) return reserve(x, &int8_copy_) ? &int8_copy_ : nullptr;
    }
    return nullptr;
}

// --- routers ---------------------------------------------------------------------------------------------------------

static bool is_matrix(const ggml_tensor *t, int64_t columns, int64_t rows) {
    return is_f32(t) && ggml_is_contiguous(t) && t->ne[0] == columns && ggml_nrows(t) == rows;
}

static bool is_plain_soft_max(const ggml_tensor *op) {
    return !op->src[1] && !op->src[2] && number_of(op, 0) == 1;
}

// Reads the nodes from the gate, or from ARGSORT if there is no gate, to the weights of the chosen experts.
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
    const bool is_prefix = order->op == GGML_OP_VIEW && order->src[0] == route->sorted && !order->view_offs &&
                           order->ne[1] == rows && order->ne[0] <= CHOSEN_PIECE &&
                           order->nb[1] == route->sorted->nb[1];
    return is_prefix && is_matrix(values, 1, n * rows) && values->ne[1] == n;
}

// Reads the nodes of the weights' norm and scale, if these follow.
static void read_norm(Chain *chain, Route *route) {
    const int64_t k = route->order->ne[0], rows = route->order->ne[1];
    Chain sums = *chain, softs = *chain;
    ggml_tensor *sum = sums.then(GGML_OP_SUM_ROWS, route->result), *clamp = sums.then(GGML_OP_CLAMP, sum);
    ggml_tensor *quotients = sums.then(GGML_OP_DIV, route->result), *soft = softs.then(GGML_OP_SOFT_MAX, route->result);
    if (sum && clamp && quotients && quotients->src[1] == clamp && is_matrix(sum->src[0], k, rows) &&
        is_matrix(clamp, 1, rows) && is_matrix(quotients, k, rows)) {
        route->constants.norm = ROUTE_NORM_OP_SUM;
        route->least = number_of(clamp, 0);
        route->most = number_of(clamp, 1);
        route->result = quotients;
        *chain = sums;
    } else if (soft && is_plain_soft_max(soft) && is_matrix(soft, k, rows)) {
        route->constants.norm = ROUTE_NORM_OP_SOFT_MAX;
        route->result = soft;
        *chain = softs;
    }
    ggml_tensor *scaled = chain->then(GGML_OP_SCALE, route->result);
    if (scaled && is_f32(scaled)) {
        route->constants.scaled = 1;
        route->factor = number_of(scaled, 0);
        route->added = number_of(scaled, 1);
        route->result = scaled;
    }
}

bool is_route(const Recording &r, ggml_tensor *first, Route *route) {
    Chain chain{&r, first};
    if (!r.fuses(ROUTER) || !read_choice(&chain, first, route)) return false;
    read_norm(&chain, route);
    // The kernel writes only the first indices of `sorted`.
    if (!r.hides(route->result, route->sorted) || !r.is_hidden(route->sorted)) return false;
    if (route->bias && !r.is_before(route->bias, route->result)) return false;
    if (overlap(route->result, route->sorted)) return false;
    // A workgroup reads its whole row before it writes. A single row may therefore be overwritten, several may not.
    for (const ggml_tensor *read : {route->logits, route->bias ? route->bias : route->logits})
        if (ggml_nrows(first) > 1 && (overlap(read, route->result) || overlap(read, route->sorted))) return false;
    return true;
}

// --- sums of experts -------------------------------------------------------------------------------------------------

static bool is_expert(const ggml_tensor *t, const ggml_tensor *products, int64_t e) {
    return t->op == GGML_OP_VIEW && t->src[0] == products && t->view_offs == size_t(e) * products->nb[1] &&
           t->ne[0] == products->ne[0] && t->ne[1] == products->ne[2] && t->nb[1] == products->nb[2] && t->ne[2] == 1;
}

// Whether the kernel of the total can add another tensor, too: elements lie at the same places, or do not overlap.
static bool adds(const Recording &r, const ggml_tensor *sum, const Experts &to) {
    const ggml_tensor *other = sum->src[1];
    return sum->src[0] == to.y && r.is_before(other, sum) && is_f32(sum) && is_f32(other) &&
           ggml_is_contiguous(other) && ggml_are_same_shape(to.y, sum) && ggml_are_same_shape(other, sum) &&
           spares_rows(other, sum) && (!to.added || spares_rows(to.reads[2], sum));
}

bool is_sum_of_experts(const Recording &r, ggml_tensor *products, Experts *experts) {
    const ggml_tensor *x = products->src[0], *weights = products->src[1];
    const int64_t n = x->ne[1];
    if (!r.fuses(EXPERTS) || !is_f32(products) || !is_f32(x) || !is_f32(weights) || n < 2 || x->ne[3] != 1 ||
        weights->ne[0] != 1 || weights->ne[1] != n || weights->ne[2] != x->ne[2])
        return false;
    Chain chain{&r, products};
    ggml_tensor *total = products;
    for (int64_t e = 1; e < n; ++e) {
        ggml_tensor *sum = chain.then(GGML_OP_ADD, total, e == 1);
        if (!sum || !is_f32(sum) || !is_expert(sum->src[1], products, e)) return false;
        if (!(e == 1 ? is_expert(sum->src[0], products, 0) : sum->src[0] == total)) return false;
        total = sum;
    }
    *experts = {{x, weights, x, x}, total, 0};
    for (ggml_tensor *sum; experts->added < 2 && (sum = chain.then(GGML_OP_ADD, total)) && adds(r, sum, *experts);) {
        experts->reads[2 + experts->added++] = sum->src[1];
        experts->y = total = sum;
    }
    // An invocation reads its column of all experts before it writes. So the total may overwrite an expert's results.
    const bool alike = x->ne[2] == 1 && ggml_is_contiguous(x) && ggml_is_contiguous(total) &&
                       begin_of(total) >= begin_of(x) && (begin_of(total) - begin_of(x)) % x->nb[1] == 0;
    return (!overlap(total, x) || alike) && !overlap(total, weights) && r.hides(total, total);
}

ggml_tensor *norm_of(const Recording &r, const Experts &sum) {
    ggml_tensor *norm = r.fuses(SUMMED) ? r.after(sum.y) : nullptr;
    const bool is_norm = norm && norm->op == GGML_OP_RMS_NORM && norm->src[0] == sum.y;
    return is_norm && ggml_is_contiguous(sum.y) ? norm : nullptr;
}

bool norm_fuses_sum(const Experts &sum, const ggml_tensor *norm, const ggml_tensor *other) {
    auto meets = [norm](const ggml_tensor *read) { return overlap(read, norm); };
    return !meets(sum.y) && !(other && overlap(other, sum.y)) && std::none_of(sum.reads, sum.reads + 4, meets);
}

// --- convolutions ----------------------------------------------------------------------------------------------------

constexpr int64_t GROUP = 256;  // channels of a workgroup

static bool spares(const Conv &c, const ggml_tensor *t) {
    return std::none_of(c.reads, c.reads + 4, [t](const ggml_tensor *read) { return overlap(t, read); });
}

// The next node, if it is the only user of a node's result and does not overwrite the convolution's operands.
static ggml_tensor *next_in_conv(const Recording &r, const Conv &c, const ggml_tensor *node, ggml_op op) {
    ggml_tensor *user = r.only_user(node);
    if (!user || user->op != op || user->src[0] != node || !is_f32(user) || !ggml_is_contiguous(user)) return nullptr;
    return spares(c, user) ? user : nullptr;
}

// Whether a node is a norm of rows of y's channels, for a single token, with the parameters of the norm before it.
static bool is_norm_of(const Conv &c, const ggml_tensor *norm, const ggml_tensor *before) {
    if (!norm || (norm->op != GGML_OP_RMS_NORM && norm->op != GGML_OP_L2_NORM)) return false;
    const ggml_tensor *rows = norm->src[0];
    const size_t n = size_t(rows->ne[0]);
    if (rows->view_src != c.y || rows->nb[1] != n * sizeof(float) || rows->ne[2] != 1 || rows->ne[3] != c.y->ne[2] ||
        (rows->ne[3] > 1 && rows->nb[3] != c.y->nb[2]))
        return false;
    if (c.y->ne[1] != 1 || c.y->ne[0] % GROUP || n > GROUP || n & (n - 1) || rows->view_offs % rows->nb[1])
        return false;
    const bool alike = !before || (before->op == norm->op && before->op_params[0] == norm->op_params[0] &&
                                   before->src[0]->ne[0] == rows->ne[0]);
    return alike && spares(c, norm) && !overlap(norm, c.y);
}

Conv conv_with(const Recording &r, ggml_tensor *op) {
    const ggml_tensor *x = op->src[0], *w = op->src[1];
    Conv c{{x, x, w, w}, op, {}, {}, {}};
    if (r.fuses(CONCAT) && x->op == GGML_OP_CONCAT && x->op_params[0] == 0 && r.keeps(x->src[0], x) &&
        r.keeps(x->src[1], x) && r.keeps(x, x) && !overlap(op, x->src[0]) && !overlap(op, x->src[1]))
        c.reads[0] = x->src[0], c.reads[1] = x->src[1];
    ggml_tensor *sum = r.fuses(ACTIVATED) ? next_in_conv(r, c, op, GGML_OP_ADD) : nullptr;
    ggml_tensor *added = sum ? sum->src[1] : nullptr;
    if (sum && is_f32(added) && ggml_nelements(added) == op->ne[0] && added->ne[0] == op->ne[0] &&
        !overlap(sum, added)) {
        c.reads[3] = added;
        c.constants.biased = 1;
        c.y = sum;
    }
    ggml_tensor *act = r.fuses(ACTIVATED) ? next_in_conv(r, c, c.y, GGML_OP_UNARY) : nullptr;
    if (act && ggml_get_unary_op(act) == GGML_UNARY_OP_SILU) {
        c.constants.silu = 1;
        c.y = act;
    }
    ggml_tensor *last = c.y;
    for (int i = 0; i < 2 && r.fuses(NORMED); ++i) {
        ggml_tensor *norm = r.after(last);
        if (!is_norm_of(c, norm, i ? c.norms[0] : nullptr)) break;
        ggml_tensor *scaled = next_in_conv(r, c, norm, GGML_OP_SCALE);
        const bool scales = scaled && number_of(scaled, 1) == 0 && !overlap(scaled, c.y);
        c.constants.normed = 1;
        c.constants.op = norm->op == GGML_OP_L2_NORM ? NORM_OP_L2 : NORM_OP_RMS;
        c.norms[i] = norm;
        c.results[i] = last = scales ? scaled : norm;
    }
    return c;
}

// --- states ----------------------------------------------------------------------------------------------------------

ggml_tensor *Recording::copy_of_states(const ggml_tensor *op, uint64_t outputs, uint64_t of_sequence,
                                       uint64_t sequences, bool apart, const ggml_tensor *rows) const {
    const size_t bytes = outputs * sizeof(float);
    ggml_tensor *copy = fuses(STATES) && apart ? after(op) : nullptr, *part = copy ? copy->src[0] : nullptr;
    if (!copy || copy->op != GGML_OP_CPY || !is_f32(copy) || part->view_src != op || part->view_offs != bytes ||
        !ggml_is_contiguous(part) || !is_hidden(part))
        return nullptr;
    int views = 0;  // of op; other users are not allowed
    for (int i = current_ + 1; i < graph_->n_nodes; ++i) {
        const ggml_tensor *view = graph_->nodes[i];
        if (view->view_src != op) continue;
        if (view != part && view->view_offs + ggml_nbytes(view) > bytes) return nullptr;
        views += is_view(view) && view->src[0] == op;
    }
    const size_t row = of_sequence * sizeof(float);
    const bool shifted = rows && overlap(copy, rows) && (!ggml_is_contiguous(rows) ||
                         (begin_of(copy) - begin_of(rows)) % row || (copy->ne[2] > 1 && copy->nb[2] % row));
    if (!is_hidden(op, views) || overlap(copy, op) || shifted) return nullptr;
    for (int i = 0; i < GGML_MAX_SRC; ++i)
        if (op->src[i] && overlap(copy, op->src[i]) && !(op->op == GGML_OP_SSM_SCAN && i == 0)) return nullptr;
    // The copy has all sequences in a single row, or a row for each sequence.
    const bool one_row = uint64_t(copy->ne[0]) == of_sequence * sequences && copy->ne[1] == 1;
    const bool a_row_each = uint64_t(copy->ne[0]) == of_sequence && uint64_t(copy->ne[1]) == sequences;
    return copy->nb[0] == sizeof(float) && copy->ne[3] == 1 && (one_row || a_row_each) ? copy : nullptr;
}

bool Recording::gathers_state(const ggml_tensor *node) {
    const ggml_tensor *rows = node->src[0], *ids = node->src[1];
    if (!fuses(GATHERED) || !is_f32(node) || !is_f32(rows) || ggml_nelements(ids) != 1 || !ggml_is_contiguous(rows))
        return false;
    const ggml_tensor *net = only_reader(GGML_OP_GATED_DELTA_NET, 5);
    if (!net || net->src[5]->view_src != node || net->src[5]->view_offs) return false;
    for (int i = current_ + 1; graph_->nodes[i - 1] != net; ++i) {
        const ggml_tensor *other = graph_->nodes[i];
        if (!is_view(other) && !ggml_is_empty(other) && (overlap(other, rows) || overlap(other, ids))) return false;
    }
    return (gathered_ = node);
}

bool Recording::settles_q(const ggml_tensor *node) {
    return fuses(SETTLED) && is_f32(node) && only_reader(GGML_OP_FLASH_ATTN_EXT, 0) && (settled_ = node);
}

}  // namespace zinc
