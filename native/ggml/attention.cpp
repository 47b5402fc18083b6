#include "attention.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "memory.h"
#include "say.h"

namespace zinc {

// --- what is taken ---------------------------------------------------------------------------------------------------

// Query rows of up to `keys` keys that one submission serves; 0: not even one.  A row has a state for each 64 keys at
// most.  128 MiB are in every device's storage buffers, and 65,535 states are as many workgroups as every device takes.
// Both bound the time of a submission of several rows: it has at most 2**32 multiplications and as many additions.
static uint64_t rows_of_call(const Device &device, const za_attn *attn, const Operation &o, uint64_t keys) {
    constexpr uint64_t BYTES = uint64_t(1) << 27, GROUPS = 65535;
    const struct za_info info = za_info(attn);
    const uint64_t states = keys / 64 + 1;
    const uint64_t row = states * std::max(info.v_dim + 2, info.k_dim) * o.kind.q_heads * sizeof(float);
    if (row > device.most || states > GROUPS) return 0;
    return std::max<uint64_t>(std::min(BYTES / row, GROUPS / states), 1);
}

// The reason why an operation is left to another device, or NULL and what runs it.
static const char *refused(Device *device, const ggml_tensor *op, Operation *o, const za_attn **attn) {
    if (!read_operation(op, o)) return "its types, sizes, strides or numbers are not served";
    for (const ggml_tensor *t : {o->k_root, o->v_root}) {
        if (is_elsewhere(t)) return "the KV cache is not on ZINC0: -ngl 99, and no --no-kv-offload";
        if ((ggml_nbytes(t) + 3) / 4 * 4 > device->most) return "a layer's K or V is larger than a storage buffer";
    }
    const Opened &opened = device->attn(o->kind);
    if (!(*attn = opened.attn)) return opened.reason.c_str();
    return rows_of_call(*device, *attn, *o, o->cells) ? nullptr : "a row's states are larger than a storage buffer";
}

bool attention_supported(Device *device, const ggml_tensor *op) {
    Operation o;
    const za_attn *attn;
    std::lock_guard<std::mutex> lock(device->mutex);
    const char *reason = refused(device, op, &o, &attn);
    if (reason && o.k_root->buffer)  // the caches of a context are there
        say_once(std::string("attention is left to another device and its bits: ") + reason);
    return !reason;
}

// --- calls -----------------------------------------------------------------------------------------------------------

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

// The request of a row, behind those of the rows before it. Rows of a prompt, each of which sees the key of its own
// behind the keys of the row before, are one.
static void add_row(const Lists &lists, size_t row, bool first_of_stream, std::vector<za_request> *requests) {
    const RowKeys &keys = lists.rows[row];
    const bool plain = keys.bias == NO_BIAS;
    if (!requests->empty() && !first_of_stream && plain && !requests->back().mask) {
        const RowKeys &last = lists.rows[row - 1];
        if (keys.begin == last.begin && keys.count == last.count + 1) {
            ++requests->back().q_len;
            requests->back().pages = ++requests->back().tokens;
            return;
        }
    }
    za_request request{};
    request.tokens = request.pages = uint32_t(keys.count);
    request.page_table = lists.pages.data() + keys.begin;
    request.q_len = 1;
    if (!plain) {
        request.mask = lists.bias.data() + keys.bias;
        request.mask_keys = request.tokens;
    }
    requests->push_back(request);
}

// One submission: rows from `begin` on, as many of them as it serves; returns the row behind them, or `begin` where it
// fails.
static size_t run_rows(const Operation &o, const Lists &lists, size_t most, size_t begin, za_cache *cache, za_call call,
                       za_data data) {
    const size_t end = std::min(lists.rows.size(), begin + most);
    std::vector<za_request> requests;
    for (size_t row = begin; row < end; ++row) add_row(lists, row, row % o.rows == 0, &requests);
    call.request = requests.data();
    call.requests = uint32_t(requests.size());
    if (std::none_of(requests.begin(), requests.end(), [](const za_request &r) { return r.mask; }))
        call.mask_slopes = nullptr;
    data.q += begin * o.kind.q_heads * o.kind.head_dim;
    data.out += begin * o.kind.q_heads * o.kind.v_head_dim;
    return za_run(cache, 0, &call, &data) ? end : begin;
}

static bool run(Device *device, const Operation &o, const za_attn *attn, const Lists &lists, float *out) {
    const za_place v = o.kind.latent ? za_place{} : place_of(o.v_root);
    za_cache *cache = device->cache(o.kind, {o.pages, uint32_t(o.at.head), place_of(o.k_root), v});
    if (!cache) return false;
    const std::vector<float> q = gather_q(o), slopes = slopes_of(o);
    za_call call{};
    call.scale = double(o.scale);
    call.softcap = double(o.softcap);
    call.sinks = o.sinks ? static_cast<const float *>(o.sinks->data) : nullptr;
    call.mask_slopes = slopes.empty() ? nullptr : slopes.data();
    za_data data{};
    data.q = q.data();
    data.out = out;
    size_t keys = 0;
    for (const RowKeys &row : lists.rows) keys = std::max(keys, row.count);
    const size_t most = rows_of_call(*device, attn, o, keys);
    for (size_t begin = 0, end; begin < lists.rows.size(); begin = end)
        if ((end = run_rows(o, lists, most, begin, cache, call, data)) == begin) return false;
    return true;
}

ggml_status attend(Device *device, Plan *plan, ggml_tensor *op) {
    Operation o;
    const za_attn *attn;
    const char *reason = refused(device, op, &o, &attn);
    if (!reason && !(buffer_of(o.k_root) && buffer_of(o.v_root))) reason = "K or V is in no buffer";
    if (!reason && !plan->make(op, o, order_of_keys(o.k_root, o.v_root))) reason = "its mask has a NaN or +inf";
    if (!reason && run(device, o, attn, plan->lists(), static_cast<float *>(op->data))) return GGML_STATUS_SUCCESS;
    say("FLASH_ATTN_EXT %s: %s", op->name, reason ? reason : za_error());
    return GGML_STATUS_FAILED;
}

}  // namespace zinc
