/* Calls that wait for their results, from host memory to host memory, or between buffers on the device. */
#include <string.h>

#include "check.h"
#include "error.h"
#include "record.h"
#include "floats.h"
#include "rows.h"

/* A call whose arguments were checked, and its layout. */
struct checked {
    struct za_cache *cache;
    uint32_t layer;
    const struct za_call *call;
    struct laid laid;
};

static bool make(struct za_cache *cache, uint32_t layer, const struct za_call *call, struct checked *checked) {
    *checked = (struct checked){.cache = cache, .layer = layer, .call = call};
    if (layer >= cache->layers) return za_fail("layer: got %u, expected one below %u", layer, cache->layers);
    return za_lay_out(cache, call, true, &checked->laid);
}

/* Append, attend, merge: one submission. b: with q, rows and out. */
static bool perform(const struct checked *checked, struct bindings b, const struct za_places *places) {
    struct za_attn *attn = checked->cache->attn;
    struct za_device *device = attn->device;
    const struct laid *laid = &checked->laid;
    if (!za_need_buffer(attn, WORK, laid->work_bytes) || !za_need_buffer(attn, STATES, laid->states_bytes) ||
        !za_laid_pipelines(attn, laid))
        return false;
    uint32_t *work = attn->scratch[WORK].mapped;
    za_laid_write(checked->cache, checked->layer, checked->call, laid, work);
    attn->trace = (struct za_trace){
        .work = work + laid->parts.base, .work_words = laid->parts.end, .shared = (uint32_t)laid->counts.shared};
    for (uint32_t i = checked->call->requests; i-- > 0;) {
        const struct za_request *request = &checked->call->request[i];
        if (!request->q_len) continue;
        attn->trace.splits = za_layout(&attn->shape, checked->call, request, laid->rule).splits;
    }
    b.work = za_whole(&attn->scratch[WORK]);
    b.states = za_whole(&attn->scratch[STATES]);
    b.k = checked->cache->k;
    b.v = checked->cache->v;
    return za_sets_reset(device, &attn->sets) && za_begin(device, device->commands) &&
           za_record_call(attn, device->commands, &attn->sets, laid, &b, places) &&
           za_submit(device, device->commands, true);
}

/* --- host memory ------------------------------------------------------------------------------------- */

/* Write queries (rows, q_heads, k_dim) with zeros from head_dim on. For ZA_INTEGER they end at head_dim. */
static void write_q(const struct za_attn *attn, const float *q, uint64_t rows, float *out) {
    const struct shape *shape = &attn->shape;
    size_t n = (size_t)rows * shape->q_heads, dims = shape->head_dim;
    const size_t filled = attn->arithmetic == INTEGER_SUMS ? dims : shape->k_dim;
    for (size_t i = 0; i < n; ++i, out += filled) {
        for (size_t d = 0; d < dims; ++d) out[d] = za_flushed(q[i * dims + d]);
        memset(out + dims, 0, 4 * (filled - dims));
    }
}

/* The results, whose rows have v_dim values on the device. */
static void read_out(const struct za_attn *attn, const struct za_data *data, uint64_t rows) {
    const struct shape *shape = &attn->shape;
    size_t n = (size_t)rows * shape->q_heads, dims = shape->v_head_dim, filled = shape->v_dim;
    const float *out = attn->scratch[OUT].mapped;
    for (size_t i = 0; i < n; ++i) memcpy(data->out + i * dims, out + i * filled, 4 * dims);
    if (n && data->lse) memcpy(data->lse, out + n * filled, 4 * n);
}

/* New rows and queries, to the buffers that the device reads. */
static bool write_data(const struct checked *checked, const struct za_data *data, double *largest_k) {
    struct za_attn *attn = checked->cache->attn;
    const struct shape *shape = &attn->shape;
    const struct row_format format = {shape->kv_heads, shape->k, shape->v};
    const float *scales = za_layer_of(checked->cache, checked->layer).scales;
    const struct new_rows rows = {
        .tokens = (uint32_t)checked->laid.counts.new_rows,
        .encoded = data->encoded,
        .k = data->k,
        .v = data->v,
        .k_scales = scales,
        .v_scales = scales ? scales + shape->kv_heads : NULL,
    };
    if (!za_rows_encode(&format, &rows, attn->scratch[ROWS].mapped, largest_k) ||
        !za_check_scores(shape, checked->call, data->q, checked->laid.counts.rows, *largest_k))
        return false;
    write_q(attn, data->q, checked->laid.counts.rows, attn->scratch[Q].mapped);
    return true;
}

static bool run(struct za_cache *cache, uint32_t layer, const struct za_call *call, const struct za_data *data) {
    struct za_attn *attn = cache->attn;
    const struct shape *shape = &attn->shape;
    const bool rounds = attn->arithmetic == INTEGER_SUMS;
    struct checked checked;
    double largest_k = cache->largest_k;
    if (!make(cache, layer, call, &checked) || !za_check_data(shape, data, &checked.laid.counts) ||
        !za_need_buffer(attn, Q, checked.laid.q_bytes) ||
        (rounds && !za_need_buffer(attn, FILLED, checked.laid.q_bytes)) ||
        !za_need_buffer(attn, ROWS, za_rows_bytes(shape, checked.laid.counts.new_rows)) ||
        !za_need_buffer(attn, OUT, checked.laid.out_bytes) || !write_data(&checked, data, &largest_k))
        return false;
    const struct bindings b = {
        .rows = za_whole(&attn->scratch[ROWS]),
        .q = za_whole(&attn->scratch[rounds ? FILLED : Q]),
        .out = za_whole(&attn->scratch[OUT]),
        .unrounded_q = za_whole(&attn->scratch[Q]),
    };
    if (!perform(&checked, b, NULL)) return false;
    cache->largest_k = largest_k;
    read_out(attn, data, checked.laid.counts.rows);
    return true;
}

bool za_run(struct za_cache *cache, uint32_t layer, const struct za_call *call, const struct za_data *data) {
    return za_not_null("cache", cache) && za_not_null("call", call) && za_not_null("data", data) &&
           za_within(cache->attn->device, run(cache, layer, call, data));
}

/* --- places on the device ---------------------------------------------------------------------------- */

static bool run_at(struct za_cache *cache, uint32_t layer, const struct za_call *call, const struct za_places *places) {
    struct za_attn *attn = cache->attn;
    struct checked checked;
    bool filled, result;
    if (!make(cache, layer, call, &checked) ||
        !za_check_places(cache, places, checked.laid.counts.rows, checked.laid.counts.new_rows, &filled, &result))
        return false;
    struct bindings b = za_bound(attn, places, checked.laid.counts.rows, checked.laid.counts.new_rows);
    if ((filled && !za_need_buffer(attn, FILLED, b.q.size)) || (result && !za_need_buffer(attn, RESULT, b.out.size)))
        return false;
    if (filled) b.q = za_whole(&attn->scratch[FILLED]);
    if (result) b.out = za_whole(&attn->scratch[RESULT]);
    return perform(&checked, b, places);
}

bool za_run_at(struct za_cache *cache, uint32_t layer, const struct za_call *call, const struct za_places *places) {
    return za_not_null("cache", cache) && za_not_null("call", call) && za_not_null("places", places) &&
           za_within(cache->attn->device, run_at(cache, layer, call, places));
}
