// The lists of an operation's rows, and the calls that they make.
#include <algorithm>
#include <cstring>
#include <numeric>

#include "../graph/rope_table.h"
#include "memory.h"
#include "plan.h"

namespace zinc {

constexpr size_t ENTRIES = 8;  // lists that are kept: a model has a few kinds of layers

// --- calls of many rows ----------------------------------------------------------------------------------------------

// The rows of calls are multiples of this number, so that q and results of a call begin where a buffer can be bound.
static uint64_t rows_of_alignment(const Device &device, const struct za_info &info, const Operation &o) {
    const uint64_t row = 4 * std::gcd(info.k_dim, info.v_dim) * uint64_t(o.kind.q_heads);
    return device.alignment / std::gcd<uint64_t>(device.alignment, row);
}

static uint64_t products_of(const struct za_info &info, const Operation &o, uint64_t keys) {
    return std::max<uint64_t>(keys * o.kind.q_heads * (info.k_dim + info.v_dim), 1);
}

// Rows of a call without states, in which a workgroup with matrix units attends all keys of its rows. Calls have about
// the same number of rows. Two compute units make 2**38 products by units in a second. 0: the device has no units.
static size_t rows_without_states(const Device &device, const za_attn *attn, const Operation &o, uint64_t keys,
                                  uint64_t rows) {
    constexpr uint64_t PRODUCTS = uint64_t(1) << 38;
    const struct za_info info = za_info(attn);
    if (device.arithmetic != ZA_INTEGER || !device.units.m) return 0;
    const uint64_t most = std::clamp<uint64_t>(PRODUCTS / products_of(info, o, keys), 1, MOST_GROUPS);
    const uint64_t unit = rows_of_alignment(device, info, o);
    const uint64_t parts = (rows + most - 1) / most, part = (rows + parts - 1) / parts;
    return (part + unit - 1) / unit * unit;
}

// Every device has storage buffers of 128 MiB and grids of 65,535 workgroups. A compute unit makes 2**35 products a
// second.
size_t rows_of_call(const Device &device, const za_attn *attn, const Operation &o, uint64_t keys) {
    constexpr uint64_t PRODUCTS = uint64_t(1) << 34;
    const uint64_t bytes = std::min<uint64_t>(device.most, uint64_t(1) << 27);
    const struct za_info info = za_info(attn);
    const uint64_t nodes = keys / KEYS_PER_NODE + 1, heads = o.kind.q_heads;
    const uint64_t row = std::max(4 * nodes * heads * (info.v_dim + 2), 8 * keys);
    const uint64_t unit = rows_of_alignment(device, info, o);
    if (unit * row > device.most || unit * nodes > MOST_GROUPS) return 0;
    const uint64_t most = std::min({bytes / row, MOST_GROUPS / nodes, PRODUCTS / products_of(info, o, keys)});
    return std::max(most / unit, uint64_t(1)) * unit;
}

// --- lists -----------------------------------------------------------------------------------------------------------

static bool make_lists(const Operation &o, const WriteOrder *order, const char *mask, Lists *lists) {
    const ggml_tensor *root = root_of(o.cache_k);
    const uint64_t rows_of_cell =  // rows of K in a row of the root
        ggml_row_size(root->type, root->ne[0]) / ggml_row_size(o.cache_k->type, o.cache_k->ne[0]);
    for (uint32_t s = 0; s < o.streams; ++s) {
        const uint64_t first = o.k_rows.first + s * o.k_rows.stream;
        const uint64_t in_cache = o.cache_rows.first + s * o.cache_rows.stream;
        const char *halves = mask ? mask + (s % o.mask->ne[3]) * o.mask->nb[3] : nullptr;
        StreamMask stream{reinterpret_cast<const uint16_t *>(halves), mask ? o.mask->nb[1] / 2 : 0, o.rows, o.cells,
                          {in_cache / rows_of_cell, std::max<uint64_t>(o.cache_rows.cell / rows_of_cell, 1)},
                          {first, o.k_rows.cell}};
        if (!add_stream(order ? &order->order() : nullptr, stream, lists))
            return za_fail_as(ZA_INVALID, "its mask has a NaN or +inf");
    }
    return true;
}

Plan::Entry *Plan::entry(const ggml_tensor *op, const Operation &o, const WriteOrder *order) {
    std::vector<uint64_t> key = key_of(op);
    key.push_back(order ? order->history() : 0);
    key.insert(key.end(), {o.kind.latent, o.cache_rows.first, o.cache_rows.cell, o.cache_rows.stream});
    const size_t bytes = o.mask ? ggml_nbytes(o.mask) : 0;
    const char *mask = nullptr;
    for (Entry &known : entries_) {
        if (known.key != key) continue;
        if (known.graph == graph_ && known.mask_tensor == o.mask) return &known;
        if (bytes && !mask && !(mask = host_bytes(o.mask))) return nullptr;
        if (!std::equal(known.mask.begin(), known.mask.end(), mask)) continue;
        if (known.graph != graph_) known.calls.clear();
        known.graph = graph_;
        known.mask_tensor = o.mask;
        return &known;
    }
    if (bytes && !mask && !(mask = host_bytes(o.mask))) return nullptr;
    Entry fresh{std::move(key), std::vector<char>(mask, mask + bytes), o.mask, {}, graph_, {}};
    if (!make_lists(o, order, mask, &fresh.lists)) return nullptr;
    auto oldest = std::min_element(entries_.begin(), entries_.end(),
                                   [](const Entry &a, const Entry &b) { return a.graph < b.graph; });
    if (entries_.size() < ENTRIES || oldest->graph == graph_) oldest = entries_.insert(entries_.end(), Entry{});
    *oldest = std::move(fresh);
    return &*oldest;
}

// --- calls -----------------------------------------------------------------------------------------------------------

// ggml's slopes of ALiBi, by which mask values are multiplied. With a max_bias of 0 there are none.
static std::vector<float> slopes_of(const Operation &o) {
    std::vector<float> slopes(o.max_bias > 0 && o.mask ? o.kind.q_heads : 0);
    const size_t whole = graph::power_of_two_in(o.kind.q_heads);
    const double step = -double(o.max_bias) / double(whole);  // as in SOFT_MAX
    for (size_t h = 0; h < slopes.size(); ++h)
        slopes[h] = float(graph::exp2_of(h < whole ? step * double(h + 1) : step / 2 * double(2 * (h - whole) + 1)));
    return slopes;
}

// Adds a row to the request of the row before it, if the request can hold it. Rows of a prompt are one request: each
// sees the keys of the row before and its own key. Rows that see the same keys are one request, too.
static bool extend_request(const RowKeys &row, const RowKeys &last, za_request *request) {
    const bool grows = row.count == last.count + 1 && !request->noncausal;
    const bool same = row.count == last.count && (request->q_len == 1 || request->noncausal);
    if (row.bias != NO_BIAS || request->mask || row.begin != last.begin || !(grows || same)) return false;
    ++request->q_len;
    request->noncausal = same;
    request->tokens = request->pages = uint32_t(row.count);
    return true;
}

// The requests of rows [begin, end). A stream has `rows` rows, and a request has rows of one stream.
static std::vector<za_request> requests_of(const Lists &lists, size_t rows, size_t begin, size_t end) {
    std::vector<za_request> requests;
    for (size_t row = begin; row < end; ++row) {
        const RowKeys &keys = lists.rows[row];
        if (row > begin && row % rows && extend_request(keys, lists.rows[row - 1], &requests.back())) continue;
        za_request request{};
        request.tokens = request.pages = uint32_t(keys.count);
        request.page_table = lists.pages.data() + keys.begin;
        request.q_len = 1;
        if (keys.bias != NO_BIAS) {
            request.mask = lists.bias.data() + keys.bias;
            request.mask_keys = request.tokens;
        }
        requests.push_back(request);
    }
    return requests;
}

static bool make_calls(Device *device, za_cache *cache, const Operation &o, const Lists &lists,
                       std::vector<Call> *calls) {
    const std::vector<float> slopes = slopes_of(o);
    za_call call{};
    call.scale = double(o.scale);
    call.softcap = double(o.softcap);
    call.splits = device->splits;
    if (o.sinks && !(call.sinks = reinterpret_cast<const float *>(host_bytes(o.sinks)))) return false;
    size_t keys = 0;
    for (const RowKeys &row : lists.rows) keys = std::max(keys, row.count);
    const za_attn *attn = device->attn(o.kind, true).attn;
    const size_t with_states = rows_of_call(*device, attn, o, keys);
    const size_t without_states = rows_without_states(*device, attn, o, keys, lists.rows.size());
    std::vector<za_request> requests;
    bool masked = false;
    auto take = [&](size_t begin, size_t end) {
        requests = requests_of(lists, o.rows, begin, end);
        call.request = requests.data();
        call.requests = uint32_t(requests.size());
        masked = std::any_of(requests.begin(), requests.end(), [](const za_request &r) { return r.mask; });
        call.mask_slopes = masked && !slopes.empty() ? slopes.data() : nullptr;
        return end;
    };
    for (size_t begin = 0, end; begin < lists.rows.size(); begin = end) {
        Call laid_call{begin, {}, {}};
        void *words;
        end = take(begin, std::min(lists.rows.size(), begin + std::max(with_states, without_states)));
        if (end - begin > with_states && (masked || !za_lay_out(cache, &call, false, &laid_call.laid) ||
                                          !laid_call.laid.rule.whole))
            end = take(begin, begin + with_states);
        if (!za_lay(cache, &call, false, &laid_call.laid) ||
            !device->recorder->words(laid_call.laid.work_bytes, &laid_call.words, &words))
            return false;
        za_laid_write(cache, 0, &call, &laid_call.laid, static_cast<uint32_t *>(words));
        calls->push_back(laid_call);
    }
    return true;
}

const std::vector<Call> *Plan::calls(Device *device, za_cache *cache, const ggml_tensor *op, const Operation &o,
                                     const WriteOrder *order) {
    Entry *known = entry(op, o, order);
    if (!known) return nullptr;
    for (const SinkCalls &with_sinks : known->calls)
        if (with_sinks.sinks == o.sinks) return &with_sinks.calls;
    SinkCalls with_sinks{o.sinks, {}};
    if (!make_calls(device, cache, o, known->lists, &with_sinks.calls)) return nullptr;
    known->calls.push_back(std::move(with_sinks));
    return &known->calls.back().calls;
}

}  // namespace zinc
