#include "recording.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

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
    const size_t begin = begin_of(t), unit = unit_of(t), first = begin & ~(device.alignment - 1);
    const int shift = __builtin_ctzll(unit);  // the bytes of an element are a power of two
    const size_t size = std::max<size_t>(begin - first + ggml_nbytes(t), 1);  // no binding is empty
    Bound binding{{buffer_of(t)->memory.buffer.handle, first, (size + 3) / 4 * 4}, {}};
    binding.view.offset = uint32_t((begin - first) >> shift);
    for (int d = 0; d < 4; ++d) {
        binding.view.n[d] = uint32_t(t->ne[d]);
        binding.view.s[d] = uint32_t(t->nb[d] >> shift);
    }
    return binding;
}

tensor dense(const tensor &rows, uint32_t columns) {
    const uint32_t plane = columns * rows.n[1];
    return {0, {columns, rows.n[1], rows.n[2], rows.n[3]}, {1, columns, plane, plane * rows.n[2]}};
}

bool scratch_rows(const Device &device, const Bound &x, uint32_t columns, Bound *rows) {
    Scratch scratch;
    const uint64_t count = uint64_t(x.view.n[1]) * x.view.n[2] * x.view.n[3];
    if (!device.recorder->scratch(4 * columns * count, &scratch)) return false;
    *rows = {scratch.place, dense(x.view, columns)};
    return true;
}

bool overlap(const ggml_tensor *a, const ggml_tensor *b) {
    return buffer_of(a) == buffer_of(b) && begin_of(a) < begin_of(b) + ggml_nbytes(b) &&
           begin_of(b) < begin_of(a) + ggml_nbytes(a);
}

// --- the graph -------------------------------------------------------------------------------------------------------

Recording::Recording(Device *device, Plan *plan, ggml_cgraph *graph) : device(device), plan(plan), graph_(graph) {
    const char *names = std::getenv("ZINC_ATTN_FUSE");
    for (int i = 0; i < FUSES; ++i) fuses_[i] = !names || std::strstr(names, FUSIONS[i].name);
}

bool is_view(const ggml_tensor *node) {
    return node->op == GGML_OP_NONE || node->op == GGML_OP_VIEW || node->op == GGML_OP_RESHAPE ||
           node->op == GGML_OP_PERMUTE || node->op == GGML_OP_TRANSPOSE;
}

void Recording::take(ggml_tensor *node) {
    changed(node);
    while (graph_->nodes[current_] != node) ++current_;
}

// Changes the layout of a tensor of weights, after the commands that were recorded for the other layout have run.
bool Recording::lay(const ggml_tensor *tensor, bool as_pieces) {
    const ggml_tensor *root = root_of(tensor);
    if (in_pieces(root) == as_pieces) return true;
    if (device->recorder->dispatches() && !(device->recorder->finish() && device->recorder->begin())) return false;
    quantized_.clear();
    grouped_.clear();
    rotations.clear();
    plan->begin();
    const bool is_weights = root->buffer->usage == GGML_BACKEND_BUFFER_USAGE_WEIGHTS;
    if (as_pieces && device->is_host && (!is_weights || stay_blocks(root))) lent_.push_back(root);
    return lay_weights(root, as_pieces);
}

// Weights that other devices read, too, become ggml's blocks again. The last tensor is converted first: of two tensors
// at the same place, the later tensor's bytes are there.
bool Recording::give_back() {
    bool ok = true;
    for (; !lent_.empty(); lent_.pop_back()) ok = lay_weights(lent_.back(), false) && ok;
    return ok;
}

// Products and GET_ROWS read weights in R32, all other operations in ggml's blocks.
bool Recording::lay_operands(const ggml_tensor *node) {
    const bool reads_pieces = is_product(node) || node->op == GGML_OP_GET_ROWS;
    for (int i = 0; i < GGML_MAX_SRC; ++i) {
        const ggml_tensor *source = node->src[i];
        if (!source || weight_type(source->type) < 0) continue;
        if (!lay(source, reads_pieces && i == 0 && !source->view_src)) return false;
    }
    return weight_type(node->type) < 0 || lay(node, false);
}

// A node writes bytes: forget the copies and the lists that were made of their former values.
void Recording::changed(const ggml_tensor *node) {
    Buffer *buffer = buffer_of(node);
    const size_t begin = begin_of(node), end = begin + ggml_nbytes(node);
    if (!buffer->weights.empty() || !buffer->shadows.empty()) note_change(buffer, begin, end - begin);
    auto forget = [&](auto *all) {  // the order of the elements has no meaning
        for (size_t i = all->size(); i-- > 0;) {
            const Source &x = (*all)[i];
            if (x.begin >= end || begin >= x.end || x.buffer != buffer->memory.buffer.handle) continue;
            (*all)[i] = all->back();
            all->pop_back();
        }
    };
    forget(&quantized_);
    forget(&grouped_);
}

bool Recording::record(ggml_tensor *node) {
    const Served *served = served_operation(node->op);
    if (!served) return za_fail_as(ZA_UNSUPPORTED, "%s is not served", ggml_op_desc(node));
    return lay_operands(node) && served->record(*this, node);
}

bool Recording::run() {
    if (!device->recorder->begin()) return say("%s", za_error()), false;
    plan->begin();
    for (current_ = 0; current_ < graph_->n_nodes; ++current_) {
        ggml_tensor *node = graph_->nodes[current_];
        if (is_view(node) || ggml_is_empty(node)) continue;
        if (!record(node)) {
            say("%s %s: %s", ggml_op_desc(node), node->name, za_error());
            device->recorder->abandon();
            give_back();
            return false;
        }
        changed(node);
        if (int8_copy_.buffer) quantized_.push_back(int8_copy_);
        int8_copy_ = {};
    }
    const bool done = device->recorder->finish();
    return (give_back() && done) || (say("%s", za_error()), false);
}

// --- copies and lists that several dispatches read -------------------------------------------------------------------

Source::Source(const ggml_tensor *t)
    : buffer(buffer_of(t)->memory.buffer.handle), begin(begin_of(t)), end(begin + ggml_nbytes(t)) {
    std::copy(t->ne, t->ne + 4, ne);
    std::copy(t->nb, t->nb + 4, nb);
}

bool Source::is(const ggml_tensor *t) const {
    return buffer == buffer_of(t)->memory.buffer.handle && begin == begin_of(t) && std::equal(ne, ne + 4, t->ne) &&
           std::equal(nb, nb + 4, t->nb);
}

bool Recording::quantized(const ggml_tensor *x, Quantized *copy) {
    const Recorder &recorder = *device->recorder;
    for (const Quantized &known : quantized_)
        if (known.is(x) && recorder.holds(known.q) && recorder.holds(known.scales)) return *copy = known, true;
    const Bound rows = bound(*device, x);
    if (!reserve(x, copy) ||
        !dispatch(GRAPH_QUANTIZE, {}, quantize_params{rows.view}, {rows.place, copy->q.place, copy->scales.place}))
        return false;
    quantized_.push_back(*copy);
    return true;
}

bool Recording::reserve(const ggml_tensor *x, Quantized *copy) {
    *copy = {Source(x), {}, {}};
    // q, then the scales. Rows are whole superblocks, so that q has a multiple of 256 bytes.
    const uint64_t bytes = 32 * blocks_of(x);
    if (!device->recorder->scratch(bytes + bytes / 4, &copy->q)) return false;
    copy->scales = copy->q;
    copy->scales.place.offset += bytes;
    copy->scales.place.size = bytes / 4;
    copy->q.place.size = bytes;
    return true;
}

bool Recording::grouped(const ggml_tensor *ids, uint32_t experts, uint32_t columns, Grouped *list) {
    for (const Grouped &known : grouped_) {
        const bool same = known.is(ids) && known.experts == experts && known.columns == columns;
        if (same && device->recorder->holds(known.list)) return *list = known, true;
    }
    const uint64_t pairs = uint64_t(ggml_nelements(ids));
    const uint32_t tiles = uint32_t(std::min<uint64_t>(pairs, pairs / columns + experts + 1));
    const Bound source = bound(*device, ids);
    const by_expert_params params{source.view, experts, columns, tiles};
    *list = {Source(ids), experts, columns, {}};
    if (!device->recorder->scratch(uint64_t(4) * tiles * (columns + 1), &list->list) ||
        !dispatch(GRAPH_BY_EXPERT, {}, params, {source.place, list->list.place}))
        return false;
    grouped_.push_back(*list);
    return true;
}

}  // namespace zinc
