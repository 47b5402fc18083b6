#include "recording.h"

#include <algorithm>

#include "attention.h"
#include "ggml-impl.h"
#include "operations.h"
#include "orders.h"
#include "say.h"
#include "weights.h"

namespace zinc {

// --- how tensors are bound -------------------------------------------------------------------------------------------

uint64_t blocks_of(const ggml_tensor *x) { return uint64_t(ggml_nrows(x)) * (uint64_t(x->ne[0] + 255) / 256 * 8); }

size_t unit_of(const ggml_tensor *t) { return ggml_is_quantized(t->type) ? 2 : ggml_type_size(t->type); }

bool fits(const Device &device, const ggml_tensor *t) {
    return ggml_nbytes(t) + device.alignment <= device.most && uint64_t(ggml_nelements(t)) < UINT32_MAX;
}

Bound bound(const Device &device, const ggml_tensor *t) {
    const size_t begin = begin_of(t), unit = unit_of(t), first = begin / device.alignment * device.alignment;
    Bound made{{buffer_of(t)->memory.of.handle, first, (begin - first + ggml_nbytes(t) + 3) / 4 * 4}, {}};
    made.at.offset = uint32_t((begin - first) / unit);
    for (int d = 0; d < 4; ++d) {
        made.at.n[d] = uint32_t(t->ne[d]);
        made.at.s[d] = uint32_t(t->nb[d] / unit);
    }
    return made;
}

bool overlap(const ggml_tensor *a, const ggml_tensor *b) {
    return buffer_of(a) == buffer_of(b) && begin_of(a) < begin_of(b) + ggml_nbytes(b) &&
           begin_of(b) < begin_of(a) + ggml_nbytes(a);
}

// --- the graph -------------------------------------------------------------------------------------------------------

Recording::Recording(Device *device, Plan *plan, ggml_cgraph *graph) : device(device), plan(plan), graph_(graph) {}

bool is_view(const ggml_tensor *node) {
    return node->op == GGML_OP_NONE || node->op == GGML_OP_VIEW || node->op == GGML_OP_RESHAPE ||
           node->op == GGML_OP_PERMUTE || node->op == GGML_OP_TRANSPOSE;
}

const ggml_tensor *Recording::next() const {
    return behind(graph_->nodes[at_]);
}

bool Recording::is_hidden(const ggml_tensor *node, int uses) const {
    int i = at_;
    while (i < graph_->n_nodes && graph_->nodes[i] != node) ++i;
    if (i == graph_->n_nodes || node->flags & GGML_TENSOR_FLAG_OUTPUT || ggml_node_get_use_count(graph_, i) != uses)
        return false;
    return !node->view_src || is_view(node) || is_hidden(node->src[0], 1);
}

ggml_tensor *Recording::only_user(const ggml_tensor *node) {
    for (int i = at_ + 1, of = at_; i < graph_->n_nodes && is_hidden(graph_->nodes[of], 1); ++i) {
        ggml_tensor *user = graph_->nodes[i];
        if (user->op == GGML_OP_RESHAPE && user->src[0] == graph_->nodes[of]) of = i;
        if (is_view(user) || ggml_is_empty(user)) continue;
        const auto is_node = [node](const ggml_tensor *t) { return t && shaped(t) == node; };
        return std::any_of(user->src, user->src + 2, is_node) ? user : nullptr;
    }
    return nullptr;
}

ggml_tensor *Recording::only_copy(const ggml_tensor *node, size_t bytes) {
    const ggml_tensor *copy = next(), *part = copy && copy->op == GGML_OP_CPY ? copy->src[0] : nullptr;
    if (!part || part->view_src != node || part->view_offs != bytes || !ggml_is_contiguous(part)) return nullptr;
    int users = 0;
    for (int i = at_ + 1; i < graph_->n_nodes; ++i) {
        const ggml_tensor *user = graph_->nodes[i];
        const bool uses = std::find(user->src, user->src + GGML_MAX_SRC, node) != user->src + GGML_MAX_SRC;
        users += uses;
        if (user == part ? !is_hidden(part, 1) : user->view_src == node && user->view_offs + ggml_nbytes(user) > bytes)
            return nullptr;
        if (uses && !is_view(user)) return nullptr;
    }
    return is_hidden(node, users) ? const_cast<ggml_tensor *>(copy) : nullptr;
}

bool Recording::gathers_state(const ggml_tensor *node) {
    const ggml_tensor *rows = node->src[0], *ids = node->src[1], *last = node;
    if (!is_f32(node) || !is_f32(rows) || ggml_nelements(ids) != 1 || !ggml_is_contiguous(rows)) return false;
    for (int i = at_ + 1; i < graph_->n_nodes && is_hidden(last, 1); ++i) {
        const ggml_tensor *user = graph_->nodes[i];
        if (user->op == GGML_OP_GATED_DELTA_NET && user->src[5] == last && last->view_src == node && !last->view_offs)
            return (gathered_ = node);
        if (is_view(user) && user->src[0] == last) last = user;
        if (!is_view(user) && !ggml_is_empty(user) && (overlap(user, rows) || overlap(user, ids))) return false;
    }
    return false;
}

bool Recording::settles_q(const ggml_tensor *node) {
    const ggml_tensor *last = node;
    for (int i = at_ + 1; i < graph_->n_nodes && is_f32(node) && is_hidden(last, 1); ++i) {
        const ggml_tensor *user = graph_->nodes[i];
        if (user->op == GGML_OP_FLASH_ATTN_EXT && user->src[0] == last) return (settled_ = node);
        if (is_view(user) && user->src[0] == last) last = user;
    }
    return false;
}

ggml_tensor *Recording::behind(const ggml_tensor *node) const {
    int i = at_;
    while (i < graph_->n_nodes && graph_->nodes[i] != node) ++i;
    for (++i; i < graph_->n_nodes && (is_view(graph_->nodes[i]) || ggml_is_empty(graph_->nodes[i]));) ++i;
    return i < graph_->n_nodes ? graph_->nodes[i] : nullptr;
}

bool Recording::has_sources(const ggml_tensor *node) const {
    for (int i = at_; i-- > 0;) {
        const ggml_tensor *other = graph_->nodes[i];
        if (other == node) return true;
        if (is_view(other) || ggml_is_empty(other)) continue;
        for (int j = 0; j < GGML_MAX_SRC && node->src[j]; ++j)
            if (overlap(other, node->src[j]) || overlap(other, node)) return false;
    }
    return false;  // another graph's
}

bool Recording::is_before(const ggml_tensor *t, const ggml_tensor *last) const {
    for (int i = at_; graph_->nodes[i] != last; ++i)
        if (graph_->nodes[i] == root_of(t)) return false;
    return true;
}

bool Recording::hides(const ggml_tensor *last, const ggml_tensor *result) const {
    for (int i = at_; graph_->nodes[i] != last; ++i) {
        const ggml_tensor *node = graph_->nodes[i];
        if (root_of(node) == result) continue;
        int uses = 0;
        for (int j = i + 1; j < graph_->n_nodes && graph_->nodes[j - 1] != last; ++j)
            for (const ggml_tensor *source : graph_->nodes[j]->src) uses += source == node;
        if (!is_hidden(node, uses)) return false;
    }
    return true;
}

void Recording::take(ggml_tensor *node) {
    changed(node);
    while (graph_->nodes[at_] != node) ++at_;
}

// A tensor's layout changes between what was recorded and what follows.
bool Recording::lay(const ggml_tensor *tensor, bool as_pieces) {
    const ggml_tensor *root = root_of(tensor);
    if (in_pieces(root) == as_pieces) return true;
    if (device->recorder->dispatches() && !(device->recorder->finish() && device->recorder->begin())) return false;
    quantized_.clear();
    grouped_.clear();
    rotations.clear();
    plan->begin();
    return lay_weights(root, as_pieces);
}

// Weights lie in R32 for products and GET_ROWS, in ggml's blocks for all else.
bool Recording::lay_operands(const ggml_tensor *node) {
    const bool reads_pieces = is_product(node) || node->op == GGML_OP_GET_ROWS;
    for (int i = 0; i < GGML_MAX_SRC; ++i) {
        const ggml_tensor *source = node->src[i];
        if (!source || weight_type(source->type) < 0) continue;
        if (!lay(source, reads_pieces && i == 0 && !source->view_src)) return false;
    }
    return weight_type(node->type) < 0 || lay(node, false);
}

// What is known of the bytes that a node writes is known no more.
void Recording::changed(const ggml_tensor *node) {
    Buffer *buffer = buffer_of(node);
    const size_t begin = begin_of(node), end = begin + ggml_nbytes(node);
    if (!buffer->weights.empty() || !buffer->shadows.empty()) note_change(buffer, begin, end - begin);
    auto stale = [&](const Source &x) {
        return x.buffer == buffer->memory.of.handle && x.begin < end && begin < x.end;
    };
    quantized_.erase(std::remove_if(quantized_.begin(), quantized_.end(), stale), quantized_.end());
    grouped_.erase(std::remove_if(grouped_.begin(), grouped_.end(), stale), grouped_.end());
}

bool Recording::record(ggml_tensor *node) {
    const Served *served = served_operation(node->op);
    if (!served) return za_fail_as(ZA_UNSUPPORTED, "%s is not served", ggml_op_desc(node));
    return lay_operands(node) && served->record(*this, node);
}

bool Recording::run() {
    if (!device->recorder->begin()) return say("%s", za_error()), false;
    plan->begin();
    for (at_ = 0; at_ < graph_->n_nodes; ++at_) {
        ggml_tensor *node = graph_->nodes[at_];
        if (is_view(node) || ggml_is_empty(node)) continue;
        if (!record(node)) {
            say("%s %s: %s", ggml_op_desc(node), node->name, za_error());
            device->recorder->abandon();
            return false;
        }
        changed(node);
        if (beside_.buffer) quantized_.push_back(beside_);
        beside_ = {};
    }
    return device->recorder->finish() || (say("%s", za_error()), false);
}

// --- what several dispatches read ------------------------------------------------------------------------------------

Source::Source(const ggml_tensor *t)
    : buffer(buffer_of(t)->memory.of.handle), begin(begin_of(t)), end(begin + ggml_nbytes(t)) {
    std::copy(t->ne, t->ne + 4, ne);
    std::copy(t->nb, t->nb + 4, nb);
}

bool Source::is(const ggml_tensor *t) const {
    return buffer == buffer_of(t)->memory.of.handle && begin == begin_of(t) && std::equal(ne, ne + 4, t->ne) &&
           std::equal(nb, nb + 4, t->nb);
}

bool Recording::quantized(const ggml_tensor *x, Quantized *found) {
    for (const Quantized &one : quantized_)
        if (one.is(x) && device->recorder->holds(one.q) && device->recorder->holds(one.scales)) {
            *found = one;
            return true;
        }
    Quantized made;
    if (!reserve(x, &made)) return false;
    const Bound of = bound(*device, x);
    if (!dispatch(GRAPH_QUANTIZE, {}, quantize_params{of.at}, {of.place, made.q.place, made.scales.place}))
        return false;
    quantized_.push_back(made);
    *found = made;
    return true;
}

bool Recording::reserve(const ggml_tensor *x, Quantized *made) {
    *made = {Source(x), {}, {}};
    return device->recorder->scratch(32 * blocks_of(x), &made->q) &&
           device->recorder->scratch(8 * blocks_of(x), &made->scales);
}

bool Recording::grouped(const ggml_tensor *ids, uint32_t experts, uint32_t columns, Grouped *found) {
    for (const Grouped &one : grouped_)
        if (one.is(ids) && one.experts == experts && one.columns == columns && device->recorder->holds(one.list)) {
            *found = one;
            return true;
        }
    const uint64_t pairs = uint64_t(ggml_nelements(ids));
    const uint32_t tiles = uint32_t(std::min<uint64_t>(pairs, pairs / columns + experts + 1));
    Grouped made{Source(ids), experts, columns, {}};
    if (!device->recorder->scratch(uint64_t(4) * tiles * (columns + 1), &made.list)) return false;
    const Bound of = bound(*device, ids);
    if (!dispatch(GRAPH_BY_EXPERT, {}, by_expert_params{of.at, experts, columns, tiles}, {of.place, made.list.place}))
        return false;
    grouped_.push_back(made);
    *found = made;
    return true;
}

const Quantized *Recording::beside(const ggml_tensor *y, bool joined) {
    constexpr int NEAR = 64;  // nodes
    const int end = is_f32(y) && ggml_is_contiguous(y) ? std::min(graph_->n_nodes, at_ + NEAR) : 0;
    for (int i = at_ + 1; i < end; ++i) {
        const ggml_tensor *user = graph_->nodes[i], *x = user->src[1];
        if (!is_product(user) || shaped(x) != y || weight_type(user->src[0]->type) < 0) continue;
        const bool whole = joined && y->ne[0] % 32 == 0 && x->ne[0] % y->ne[0] == 0 && x->ne[0] % 256 == 0;
        if (x->ne[0] == y->ne[0] || whole) return reserve(x, &beside_) ? &beside_ : nullptr;
    }
    return nullptr;
}

}  // namespace zinc
