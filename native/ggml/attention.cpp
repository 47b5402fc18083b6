#include "attention.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "orders.h"
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

static za_place place_of(const ggml_tensor *root) {  // ggml leaves room between tensors
    return {buffer_of(root)->memory.of.handle, begin_of(root), (ggml_nbytes(root) + 3) / 4 * 4};
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

// A tensor (dims, heads, rows, streams) of `rows` rows in all.
static tensor rows_at(uint64_t dims, uint64_t heads, uint64_t rows) {
    const uint32_t row = uint32_t(dims * heads);
    return {0, {uint32_t(dims), uint32_t(heads), uint32_t(rows), 1}, {1, uint32_t(dims), row, row * uint32_t(rows)}};
}

// q as the kernels take it, all rows of all streams.
static bool fit_q(Recording &r, const Operation &o, uint32_t dims, za_place *place) {
    Scratch scratch;
    const uint64_t rows = uint64_t(o.rows) * o.streams;
    if (!r.device->recorder->scratch(4 * rows * o.kind.q_heads * dims, &scratch)) return false;
    Bound q = bound(*r.device, o.q);
    std::swap(q.at.n[1], q.at.n[2]);  // heads, then rows
    std::swap(q.at.s[1], q.at.s[2]);
    fit_params params{q.at, rows_at(dims, o.kind.q_heads, o.rows), 0x1p-40f};
    params.y.n[3] = o.streams;
    *place = scratch.place;
    return r.dispatch(GRAPH_FIT, {}, params, {q.place, *place}, 2, grid(rows * o.kind.q_heads * dims / 256 + 1));
}

// Rows from `begin` on, as many of them as one call serves; returns the row behind them, or `begin` where it fails.
static size_t record_rows(Recording &r, const Operation &o, const za_attn *attn, const Lists &lists, size_t most,
                          size_t begin, za_cache *cache, za_call call, za_place q, const ggml_tensor *op) {
    const struct za_info info = za_info(attn);
    const size_t end = std::min(lists.rows.size(), begin + most);
    std::vector<za_request> requests;
    for (size_t row = begin; row < end; ++row) add_row(lists, row, row % o.rows == 0, &requests);
    call.request = requests.data();
    call.requests = uint32_t(requests.size());
    if (std::none_of(requests.begin(), requests.end(), [](const za_request &one) { return one.mask; }))
        call.mask_slopes = nullptr;
    struct laid laid;
    struct bindings b{};
    void *work;
    Scratch states, out;
    if (!za_lay(cache, &call, false, &laid) || !r.device->recorder->words(laid.work_bytes, &b.work, &work) ||
        !r.device->recorder->scratch(std::max<uint64_t>(laid.states_bytes, 4), &states) ||
        !r.device->recorder->scratch(laid.out_bytes, &out))
        return begin;
    za_laid_write(cache, 0, &call, &laid, static_cast<uint32_t *>(work));
    b.q = {q.buffer, q.offset + begin * o.kind.q_heads * info.k_dim * 4, laid.q_bytes};
    b.k = place_of(o.k_root);
    b.v = o.kind.latent ? b.k : place_of(o.v_root);
    b.states = states.place;
    b.out = out.place;
    struct za_command commands[CALL_COMMANDS];
    const int n = za_laid_commands(attn, &laid, &b, commands);
    for (int i = 0; i < n; ++i)
        if (!r.device->recorder->command(commands[i])) return begin;
    const Bound y = bound(*r.device, op);
    fit_params params{rows_at(info.v_dim, o.kind.q_heads, end - begin), rows_at(o.kind.v_head_dim, o.kind.q_heads, end - begin), 0};
    params.y.offset = uint32_t(y.at.offset + begin * o.kind.q_heads * o.kind.v_head_dim);
    return r.dispatch(GRAPH_FIT, {}, params, {b.out, y.place}, 2,
                      grid((end - begin) * o.kind.q_heads * o.kind.v_head_dim / 256 + 1)) ? end : begin;
}

static bool record(Recording &r, const Operation &o, const za_attn *attn, const Lists &lists, const ggml_tensor *op) {
    const za_place v = o.kind.latent ? za_place{} : place_of(o.v_root);
    za_cache *cache = r.device->cache(o.kind, {o.pages, uint32_t(o.at.head), place_of(o.k_root), v});
    if (!cache) return false;
    const std::vector<float> slopes = slopes_of(o);
    za_call call{};
    call.scale = double(o.scale);
    call.softcap = double(o.softcap);
    call.sinks = o.sinks ? reinterpret_cast<const float *>(host_bytes(o.sinks)) : nullptr;
    call.mask_slopes = slopes.empty() ? nullptr : slopes.data();
    size_t keys = 0;
    for (const RowKeys &row : lists.rows) keys = std::max(keys, row.count);
    const size_t most = rows_of_call(*r.device, attn, o, keys);
    za_place q;
    if (!fit_q(r, o, za_info(attn).k_dim, &q)) return false;
    for (size_t begin = 0, end; begin < lists.rows.size(); begin = end)
        if ((end = record_rows(r, o, attn, lists, most, begin, cache, call, q, op)) == begin) return false;
    return true;
}

bool attend(Recording &r, ggml_tensor *op) {
    Operation o;
    const za_attn *attn;
    const char *reason = refused(r.device, op, &o, &attn);
    if (!reason && !(buffer_of(o.k_root) && buffer_of(o.v_root))) reason = "K or V is in no buffer";
    if (!reason && !r.plan->make(op, o, order_of_keys(o.k_root, o.v_root))) reason = "its mask has a NaN or +inf";
    return reason ? za_fail("%s", reason) : record(r, o, attn, r.plan->lists(), op);
}

}  // namespace zinc
