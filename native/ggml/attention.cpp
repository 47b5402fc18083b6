#include "attention.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>

#include "memory.h"
#include "set_rows.h"

namespace zinc {

// --- what an operation is --------------------------------------------------------------------------------------------

// Where the rows of K (or V) are that belong to one head and cell, counted in such rows from the begin of the root.
struct Rows {
    uint64_t first, cell, head, stream;
    bool operator==(const Rows &b) const {
        return first == b.first && cell == b.cell && head == b.head && stream == b.stream;
    }
};

struct Operation {
    const ggml_tensor *q, *k, *v, *mask, *sinks;
    float scale, max_bias, softcap;
    uint32_t rows, cells, streams;
    Rows at;
    Kind kind;
};

static bool kept_as(const ggml_tensor *t, Kept *kept) {
    *kept = {storage_type(t->type), uint32_t(ggml_row_size(t->type, t->ne[0]))};
    return kept->type != ZA_AS_K;
}

// False where the tensor's strides are no multiples of its rows.
static bool rows_of(const ggml_tensor *t, Rows *rows) {
    size_t bytes = ggml_row_size(t->type, t->ne[0]), offset = t->view_src ? t->view_offs : 0;
    if (t->nb[0] != ggml_type_size(t->type)) return false;
    if (offset % bytes || t->nb[1] % bytes || t->nb[2] % bytes || t->nb[3] % bytes) return false;
    uint64_t head = t->ne[2] > 1 ? t->nb[2] / bytes : 1, stream = t->ne[3] > 1 ? t->nb[3] / bytes : 0;
    *rows = {offset / bytes, t->nb[1] / bytes, head, stream};
    return true;
}

static bool is_latent(const ggml_tensor *k, const ggml_tensor *v) {
    return root_of(k) == root_of(v) && (k->view_src ? k->view_offs : 0) == (v->view_src ? v->view_offs : 0) &&
           k->type == v->type && v->ne[0] <= k->ne[0] && std::equal(k->nb, k->nb + 4, v->nb);
}

// False for what is not taken.  Needs no memory behind the tensors.
static bool read(const ggml_tensor *op, Operation *o) {
    const ggml_tensor *q = op->src[0], *k = op->src[1], *v = op->src[2], *mask = op->src[3], *sinks = op->src[4];
    float numbers[3];
    std::memcpy(numbers, op->op_params, sizeof numbers);
    *o = {q, k, v, mask, sinks, numbers[0], numbers[1], numbers[2], uint32_t(q->ne[1]), uint32_t(k->ne[1]),
          uint32_t(q->ne[3]), {}, {}};
    if (q->type != GGML_TYPE_F32 || q->nb[0] != sizeof(float)) return false;
    if (op->type != GGML_TYPE_F32 || !ggml_is_contiguous(op)) return false;
    if (!kept_as(k, &o->kind.k) || !kept_as(v, &o->kind.v) || q->ne[0] != k->ne[0]) return false;
    if (k->ne[2] != v->ne[2] || q->ne[2] % k->ne[2] || k->ne[3] != q->ne[3] || v->ne[3] != q->ne[3]) return false;
    if (mask && (mask->type != GGML_TYPE_F16 || mask->nb[0] != 2 || mask->ne[0] < k->ne[1] || mask->ne[1] < q->ne[1] ||
                 mask->ne[2] != 1 || q->ne[3] % mask->ne[3])) return false;
    if (sinks && (sinks->type != GGML_TYPE_F32 || !ggml_is_contiguous(sinks) || sinks->ne[0] != q->ne[2])) return false;
    float scale = std::fabs(o->scale), cap = o->softcap;
    if (!(scale >= 0x1p-126f && scale <= 0x1p126f) || !(cap == 0 || (cap >= 0x1p-40f && cap <= 0x1p60f))) return false;
    o->kind = {uint32_t(q->ne[2]), uint32_t(k->ne[2]), uint32_t(k->ne[0]), uint32_t(v->ne[0]), is_latent(k, v),
               o->kind.k, o->kind.v};
    Rows of_v;
    return rows_of(k, &o->at) && (o->kind.latent || (rows_of(v, &of_v) && of_v == o->at));
}

bool attention_supported(Device *device, const ggml_tensor *op) {
    Operation o;
    if (!read(op, &o)) return false;
    for (const ggml_tensor *t : {root_of(o.k), root_of(o.v)})
        if ((t->buffer && !buffer_of(t)) || ggml_nbytes(t) > device->most) return false;
    std::lock_guard<std::mutex> lock(device->mutex);
    order_of_keys(root_of(o.k));  // which is the last layer's is known before the first row is written
    return device->attn(o.kind) != nullptr;
}

// --- lists -----------------------------------------------------------------------------------------------------------

bool Plan::make(const ggml_tensor *op) {
    Operation o;
    read(op, &o);
    const ggml_tensor *root = root_of(o.k);
    WriteOrder *known = order_of_keys(root);
    const std::vector<uint32_t> none, &order = known ? known->order() : none;
    size_t mask_bytes = o.mask ? ggml_nbytes(o.mask) : 0, row_bytes = ggml_row_size(o.k->type, o.k->ne[0]);
    uint64_t cell_rows = ggml_row_size(root->type, root->ne[0]) / row_bytes;  // rows of a head in a row of the root
    const std::vector<uint64_t> numbers = {o.at.first, o.at.cell, o.at.stream, cell_rows,
                                           o.rows, o.cells, o.streams, mask_bytes, known != nullptr};
    const char *mask = mask_bytes ? static_cast<const char *>(o.mask->data) : nullptr;
    if (valid_ && numbers == numbers_ && order == order_ && std::equal(mask_.begin(), mask_.end(), mask)) return true;
    valid_ = false;
    lists_ = {};
    for (uint32_t s = 0; s < o.streams; ++s) {
        uint64_t first = o.at.first + s * o.at.stream;
        const uint16_t *of_stream =
            mask ? reinterpret_cast<const uint16_t *>(mask + (s % o.mask->ne[3]) * o.mask->nb[3]) : nullptr;
        StreamMask stream{of_stream, mask ? o.mask->nb[1] / 2 : 0, o.rows, o.cells,
                          {first / cell_rows, std::max<uint64_t>(o.at.cell / cell_rows, 1)},
                          {first, o.at.cell}};
        if (!add_stream(known ? &order : nullptr, stream, &lists_)) return false;
    }
    order_ = order;
    mask_.assign(mask, mask + mask_bytes);
    numbers_ = numbers;
    return valid_ = true;
}

// --- a call ----------------------------------------------------------------------------------------------------------

// Query rows [row, row + count) of an operation whose keys one request serves.
struct Run {
    size_t row, count;
    za_request request;
};

// Rows of a prompt, each of which sees the key of its own behind the keys of the row before, are one request.
static std::vector<Run> runs_of(const Lists &lists, size_t rows_of_stream) {
    std::vector<Run> runs;
    for (size_t i = 0; i < lists.rows.size(); ++i) {
        const RowKeys &row = lists.rows[i];
        bool plain = row.bias == NO_BIAS;
        if (i % rows_of_stream && plain && !runs.back().request.mask) {
            const RowKeys &last = lists.rows[i - 1];
            if (row.begin == last.begin && row.count == last.count + 1) {
                ++runs.back().count;
                ++runs.back().request.q_len;
                runs.back().request.pages = ++runs.back().request.tokens;
                continue;
            }
        }
        za_request request{};
        request.tokens = request.pages = uint32_t(row.count);
        request.page_table = lists.pages.data() + row.begin;
        request.q_len = 1;
        if (!plain) {
            request.mask = lists.bias.data() + row.bias;
            request.mask_keys = request.tokens;
        }
        runs.push_back({i, 1, request});
    }
    return runs;
}

// All rows of all streams: (streams, rows, q_heads, head_dim).
static std::vector<float> gather_q(const Operation &o) {
    const size_t dims = o.kind.head_dim;
    std::vector<float> out(size_t(ggml_nelements(o.q)));
    const char *from = static_cast<const char *>(o.q->data);
    float *to = out.data();
    for (size_t s = 0; s < o.streams; ++s)
        for (size_t row = 0; row < o.rows; ++row)
            for (size_t h = 0; h < o.kind.q_heads; ++h, to += dims)
                std::memcpy(to, from + row * o.q->nb[1] + h * o.q->nb[2] + s * o.q->nb[3], dims * sizeof(float));
    return out;
}

// ggml's slopes of ALiBi, by which the values of masks are multiplied; none for a max_bias of 0.
static std::vector<float> slopes_of(const Operation &o) {
    std::vector<float> slopes(o.max_bias > 0 && o.mask ? o.kind.q_heads : 0);
    size_t whole = 1;  // the power of two up to the heads
    while (2 * whole <= o.kind.q_heads) whole *= 2;
    float step = std::pow(2.0f, -o.max_bias / float(whole)), half_step = std::pow(2.0f, -o.max_bias / 2 / float(whole));
    for (size_t h = 0; h < slopes.size(); ++h)
        slopes[h] = h < whole ? std::pow(step, float(h + 1)) : std::pow(half_step, float(2 * (h - whole) + 1));
    return slopes;
}

static za_place place_of(const ggml_tensor *root) {
    Buffer *buffer = buffer_of(root);
    size_t offset = size_t(static_cast<char *>(root->data) - static_cast<char *>(buffer->memory.base));
    return {buffer->memory.buffer, offset, (ggml_nbytes(root) + 3) / 4 * 4};  // ggml leaves room between tensors
}

// Runs that fit into one submission: so many items (of a leaf at least) that the device takes them, and their states.
static size_t runs_of_call(const Device &device, const Operation &o, const std::vector<Run> &runs, size_t begin) {
    size_t state = (size_t(o.v->ne[0]) + 2) * o.kind.q_heads * sizeof(float), end = begin;
    uint64_t most = std::min<uint64_t>(65535, device.most / state), items = 0;
    for (; end < runs.size(); ++end) {
        items += runs[end].count * (runs[end].request.tokens / 64 + 1);
        if (end > begin && items > most) break;
    }
    return end;
}

static bool call(Device *device, const Operation &o, const std::vector<Run> &runs, float *out) {
    const ggml_tensor *k = root_of(o.k), *v = root_of(o.v);
    const uint64_t rows = ggml_nbytes(k) / o.kind.k.row, behind = (o.kind.kv_heads - 1) * o.at.head;
    const za_place of_v = o.kind.latent ? za_place{} : place_of(v);
    za_cache *cache = device->cache(o.kind, {uint32_t(rows - behind), uint32_t(o.at.head), place_of(k), of_v});
    const std::vector<float> q = gather_q(o), slopes = slopes_of(o);
    const size_t q_row = size_t(o.kind.q_heads) * o.kind.head_dim, out_row = size_t(o.kind.q_heads) * o.kind.v_head_dim;
    std::vector<za_request> requests;
    for (size_t begin = 0, end; cache && begin < runs.size(); begin = end) {
        end = runs_of_call(*device, o, runs, begin);
        requests.clear();
        for (size_t i = begin; i < end; ++i) requests.push_back(runs[i].request);
        za_call call{};
        call.request = requests.data();
        call.requests = uint32_t(requests.size());
        call.scale = double(o.scale);
        call.softcap = double(o.softcap);
        call.sinks = o.sinks ? static_cast<const float *>(o.sinks->data) : nullptr;
        const bool masks = std::any_of(requests.begin(), requests.end(), [](const za_request &r) { return r.mask; });
        call.mask_slopes = masks && !slopes.empty() ? slopes.data() : nullptr;
        za_data data{};
        data.q = q.data() + runs[begin].row * q_row;
        data.out = out + runs[begin].row * out_row;
        if (!za_run(cache, 0, &call, &data)) return false;
    }
    return cache != nullptr;
}

ggml_status attend(Device *device, Plan *plan, ggml_tensor *op) {
    Operation o;
    const char *reason = "its mask has a NaN or +inf";
    if (read(op, &o) && plan->make(op)) {
        if (call(device, o, runs_of(plan->lists(), o.rows), static_cast<float *>(op->data))) return GGML_STATUS_SUCCESS;
        reason = za_error();
    }
    std::fprintf(stderr, "ggml-zinc: FLASH_ATTN_EXT %s: %s\n", op->name, reason);
    return GGML_STATUS_FAILED;
}

}  // namespace zinc
