#include "attention.h"

#include <algorithm>

#include "orders.h"
#include "say.h"

namespace zinc {

static const char OTHER_DEVICE[] = "the KV cache is in memory of the back end's other device";

// --- what the device takes -------------------------------------------------------------------------------------------

// Why the arithmetic does not take an operation's K or V, or "".
static std::string refused_types(const Device &device, const ggml_tensor *op) {
    const std::string reason = refused_type(device, op->src[1]);
    return reason.empty() ? refused_type(device, op->src[2]) : reason;
}

// The reason why an operation is left to another device. "": *o describes the operation, and *attn runs it.
static std::string refused(Device *device, const ggml_tensor *op, bool has_turn, Operation *o, za_attn **attn) {
    const std::string types = refused_types(*device, op);
    if (!types.empty()) return types;
    if (!read_operation(op, o)) return "its types, sizes, strides or numbers are not served";
    for (const ggml_tensor *t : {o->mask, o->sinks})
        if (t && root_of(t)->op != GGML_OP_NONE) return "its mask or sinks are computed in the graph";
    for (const ggml_tensor *t : {o->k_root, o->v_root}) {
        if (is_elsewhere(t)) return "the KV cache is not on ZINC0: -ngl 99, and no --no-kv-offload";
        if (t->buffer && holder_of(t) != device) return OTHER_DEVICE;
        if ((ggml_nbytes(t) + 3) / 4 * 4 > device->most) return "a layer's K or V is larger than a storage buffer";
    }
    const Opened opened = device->attn(o->kind, has_turn);
    if (!(*attn = opened.attn)) return opened.reason;
    const struct za_info info = za_info(*attn);
    const uint64_t rows = uint64_t(o->rows) * o->streams, vectors = rows * o->kind.q_heads;
    if (device->arithmetic == ZA_INTEGER && rows > MOST_GROUPS) return "its rows are more than workgroups of a grid";
    if (4 * vectors * std::max(info.k_dim, info.v_dim) > device->most || !fits(*device, o->q))
        return "its q or result is larger than a storage buffer";
    return rows_of_call(*device, *attn, *o, o->cells) ? "" : "a row's states are larger than a storage buffer";
}

bool attention_supported(Device *device, const ggml_tensor *op) {
    // No other device has the arithmetic, so the operation stays here, and its graph fails with the reason.
    if (!refused_types(*device, op).empty()) return true;
    Operation o;
    za_attn *attn;
    const std::string reason = refused(device, op, false, &o, &attn);
    if (!reason.empty() && reason != OTHER_DEVICE && o.k_root->buffer)  // a context whose caches have memory asks
        say_once("attention is left to another device and its bits: " + reason);
    return reason.empty();
}

// --- dispatches ------------------------------------------------------------------------------------------------------

bool fit(Recording &r, const Bound &x, const Bound &y, float least) {
    return r.dispatch(GRAPH_FIT, {}, fit_params{x.view, y.view, least}, {x.place, y.place});
}

// A tensor's (dims, rows, heads, streams) as (dims, heads, rows, streams).
static Bound heads_first(Bound x) {
    std::swap(x.view.n[1], x.view.n[2]);
    std::swap(x.view.s[1], x.view.s[2]);
    return x;
}

static za_place place_of(const ggml_tensor *root) {
    return {buffer_of(root)->memory.buffer.handle, begin_of(root), (ggml_nbytes(root) + 3) / 4 * 4};
}

// The places where the calls of an operation read q and write their states and results. They lie in a single piece of
// scratch memory, so that no part of the piece can be reused before the last call has run.
struct CallPlaces {
    Bound q, out;
    za_place states;
    bool out_in_place;  // out is the operation's tensor, because the kernels' rows have no padding
};

static bool make_places(Recording &r, const ggml_tensor *op, const Operation &o, const za_attn *attn,
                       const std::vector<Call> &calls, CallPlaces *places) {
    const struct za_info info = za_info(attn);
    const uint64_t unit = std::max<uint64_t>(r.device->alignment, 256);
    const uint64_t rows = uint64_t(o.rows) * o.streams * o.kind.q_heads;
    auto bytes_of = [unit](uint64_t n) { return (n + unit - 1) / unit * unit; };
    const Bound out = bound(*r.device, op), q = heads_first(bound(*r.device, o.q));
    uint64_t states = 0;
    for (const Call &call : calls) states = std::max(states, call.laid.states_bytes);
    places->out_in_place = info.v_dim == o.kind.v_head_dim && out.view.offset == 0;
    const bool rounds = r.device->arithmetic == ZA_INTEGER;  // ROUND_Q also pads q, and takes small magnitudes as 0
    const tensor dense_q = dense(q.view, rounds ? o.kind.head_dim : info.k_dim);
    const bool q_in_place = (rounds || r.is_settled(o.q)) && q.view.offset == 0 && dense_q.n[0] == o.kind.head_dim &&
                       std::equal(q.view.s, q.view.s + (o.streams > 1 ? 4 : 3), dense_q.s);
    const uint64_t unrounded_bytes = q_in_place || !rounds ? 0 : bytes_of(4 * rows * o.kind.head_dim);
    const uint64_t q_bytes = q_in_place && !rounds ? 0 : bytes_of(4 * rows * info.k_dim);
    const uint64_t out_bytes = places->out_in_place ? 0 : 4 * rows * info.v_dim;
    Scratch taken;
    if (!r.device->recorder->scratch(unrounded_bytes + q_bytes + bytes_of(states) + out_bytes, &taken)) return false;
    const VkBuffer buffer = taken.place.buffer;
    const VkDeviceSize begin = taken.place.offset + unrounded_bytes;
    const Bound unrounded = q_in_place ? q : Bound{{buffer, taken.place.offset, 4 * rows * dense_q.n[0]}, dense_q};
    places->q = rounds ? Bound{{buffer, begin, 4 * rows * info.k_dim}, dense(q.view, info.k_dim)} : unrounded;
    places->states = {buffer, begin + q_bytes, states};
    places->out = out;
    if (!places->out_in_place)
        places->out = {{buffer, begin + q_bytes + bytes_of(states), out_bytes}, dense(out.view, info.v_dim)};
    if (!q_in_place && !fit(r, q, unrounded, MIN_INPUT)) return false;
    if (!rounds) return true;
    return r.device->recorder->command(za_round_q(attn, rows / o.kind.q_heads, unrounded.place, places->q.place));
}

bool attend(Recording &r, ggml_tensor *op) {
    Operation o;
    za_attn *attn;
    const std::string reason = refused(r.device, op, true, &o, &attn);
    if (!reason.empty()) return za_fail_as(ZA_UNSUPPORTED, "%s", reason.c_str());
    const za_place k = place_of(o.k_root), v = place_of(o.v_root);
    za_cache *cache = r.device->cache(o.kind, {o.pages, uint32_t(o.k_rows.head), k, o.kind.latent ? za_place{} : v});
    const std::vector<Call> *calls =
        cache ? r.plan->calls(r.device, cache, op, o, order_of_keys(root_of(o.cache_k), root_of(o.cache_v)))
              : nullptr;
    CallPlaces places;
    if (!calls || !make_places(r, op, o, attn, *calls, &places)) return false;
    for (const Call &call : *calls) {
        const uint64_t vectors = call.first_row * o.kind.q_heads;
        bindings b{call.words, {}, places.q.place, k, v, places.states, places.out.place};
        b.q.offset += 4 * vectors * places.q.view.n[0];
        b.q.size = call.laid.q_bytes;
        b.out.offset += 4 * vectors * places.out.view.n[0];
        b.out.size = call.laid.out_bytes;
        struct za_command commands[CALL_COMMANDS];
        const int n = za_laid_commands(attn, &call.laid, &b, commands);
        for (int i = 0; i < n; ++i)
            if (!r.device->recorder->command(commands[i])) return false;
    }
    return places.out_in_place || fit(r, places.out, bound(*r.device, op), 0);
}

}  // namespace zinc
