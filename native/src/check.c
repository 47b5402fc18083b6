#include "check.h"

#include <math.h>

#include "error.h"

static bool check_floats(const char *name, const float *values, size_t n) {
    for (size_t i = 0; i < n; ++i) {
        if (!(fabsf(values[i]) <= MAX_INPUT)) /* also where it is NaN */
            return za_fail("%s[%zu]: got %g, expected at most 2**%d", name, i, (double)values[i], ilogbf(MAX_INPUT));
    }
    return true;
}

/* --- calls ------------------------------------------------------------------------------------------- */

/* A mask's values are finite, or -inf for a key that a row does not see. */
static bool check_mask(uint32_t number, const struct za_request *r) {
    size_t n = (size_t)r->q_len * r->mask_keys;
    if (r->mask && !r->mask_keys)
        return za_fail("request[%u].mask_keys: got 0 with a mask, expected its keys; mask NULL for none", number);
    if (r->mask_keys > r->tokens)
        return za_fail("request[%u].mask_keys: got %u, expected at most the %u tokens", number, r->mask_keys,
                       r->tokens);
    if (r->mask_keys && !r->mask)
        return za_fail("request[%u].mask: got NULL, expected q_len * mask_keys = %zu numbers", number, n);
    for (size_t i = 0; i < n; ++i) {
        if (!(fabsf(r->mask[i]) <= MAX_INPUT) && r->mask[i] != -INFINITY)
            return za_fail("request[%u].mask[%zu, %zu]: got %g, expected at most 2**%d, or -INFINITY for a key that "
                           "the row does not see", number, i / r->mask_keys, i % r->mask_keys, (double)r->mask[i],
                           ilogbf(MAX_INPUT));
    }
    return true;
}

static bool check_request(const struct shape *shape, const struct za_call *call, uint32_t number, uint32_t pages) {
    const struct za_request *r = &call->request[number];
    if (r->tokens > MAX_CONTEXT)
        return za_fail("request[%u].tokens: got %u, expected at most %u", number, r->tokens, MAX_CONTEXT);
    if (r->new_rows > r->tokens)
        return za_fail("request[%u].new_rows: got %u, expected at most the %u tokens", number, r->new_rows, r->tokens);
    if (r->q_len > MAX_CONTEXT || (uint64_t)r->q_len * call->splits > MAX_CONTEXT)
        return za_fail("request[%u].q_len, splits: got %u and %u, expected a product of at most %u", number, r->q_len,
                       call->splits, MAX_CONTEXT);
    uint32_t used = za_ceil_div(r->tokens, shape->page_size);
    if (r->pages < used)
        return za_fail("request[%u].pages: got %u, expected at least %u for %u tokens in pages of %u", number, r->pages,
                       used, r->tokens, shape->page_size);
    if (used && !r->page_table) return za_fail("request[%u].page_table: got NULL, expected %u pages", number, used);
    for (uint32_t i = 0; i < used; ++i) {
        if (r->page_table[i] >= pages)
            return za_fail("request[%u].page_table[%u]: got %u, expected a page below %u", number, i, r->page_table[i],
                           pages);
    }
    return check_mask(number, r);
}

/* The largest magnitude of n numbers; -infinity, which hides a key, counts as none. */
static double largest(const float *values, size_t n) {
    double most = 0;
    for (size_t i = 0; i < n; ++i)
        if (values[i] != -INFINITY) most = fmax(most, fabs((double)values[i]));
    return most;
}

/* The most that biases and masks may add to a score, in log2 units. */
static double added_most(const struct shape *shape, const struct za_call *call) {
    const double factor = call->mask_slopes ? largest(call->mask_slopes, shape->q_heads) : 1;
    double distance = 0, slope = 0, mask = 0;
    for (uint32_t i = 0; i < call->requests; ++i) {
        const struct za_request *r = &call->request[i];
        distance = fmax(distance, r->tokens > r->q_len ? r->tokens : r->q_len);
        mask = fmax(mask, largest(r->mask, (size_t)r->q_len * r->mask_keys));
    }
    for (int i = 0; i < BIASES; ++i)
        if (za_slopes(call, i)) slope += largest(za_slopes(call, i), shape->q_heads);
    return LOG2E * (mask * factor + slope * distance);
}

static bool check_options(const struct shape *shape, const struct za_call *call) {
    if (call->softcap != 0 && !(call->softcap >= (double)MIN_INPUT && call->softcap <= (double)MAX_INPUT))
        return za_fail("softcap: got %g, expected 2**%d to 2**%d, or 0 for none", call->softcap,
                       ilogbf(MIN_INPUT), ilogbf(MAX_INPUT));
    double scale = fabs(call->scale);
    if (scale != 0 && !(scale >= 0x1p-126 && scale <= 0x1p126)) /* also where it is NaN */
        return za_fail("scale: got %g, expected a magnitude from 2**-126 to 2**126, or 0 for 1 / sqrt(head_dim)",
                       call->scale);
    if ((call->sinks && !check_floats("sinks", call->sinks, shape->q_heads)) ||
        (call->mask_slopes && !check_floats("mask_slopes", call->mask_slopes, shape->q_heads)))
        return false;
    for (int i = 0; i < BIASES; ++i)
        if (za_slopes(call, i) && !check_floats(za_biases[i].name, za_slopes(call, i), shape->q_heads)) return false;
    return added_most(shape, call) <= MAX_SCORE ||
           za_fail("mask, mask_slopes: got values and slopes whose products add up to %g to a score, expected at most "
                   "2**%d", added_most(shape, call), ilogb(MAX_SCORE));
}

bool za_check_call(const struct shape *shape, const struct za_call *call, uint32_t pages) {
    if (call->requests && !call->request) return za_fail("request: got NULL, expected %u requests", call->requests);
    for (uint32_t i = 0; i < call->requests; ++i)
        if (!check_request(shape, call, i, pages)) return false;
    struct counts all = za_totals(shape, call);
    if (all.rows > MAX_CONTEXT || all.new_rows > MAX_CONTEXT || all.masks > UINT32_MAX || all.pages > UINT32_MAX)
        return za_fail("request: got %llu query rows, %llu new rows, masks of %llu numbers and %llu pages in all, "
                       "expected at most %u rows and 2**32 - 1 words; make several calls", (unsigned long long)all.rows,
                       (unsigned long long)all.new_rows, (unsigned long long)all.masks, (unsigned long long)all.pages,
                       MAX_CONTEXT);
    if (call->mask_slopes && all.rows && !all.masks)
        return za_fail("mask_slopes: got slopes for a call whose requests have no mask, expected NULL; alibi takes the "
                       "slopes of distances");
    return check_options(shape, call);
}

bool za_check_data(const struct shape *shape, const struct za_data *data, const struct counts *counts) {
    if (shape->latent && data->v && counts->new_rows)
        return za_fail("v: got an array, expected NULL; V of a latent shape is part of k");
    if (counts->rows && (!data->q || !data->out))
        return za_fail("%s: got NULL, expected (%llu, %u, %u) floats", data->q ? "out" : "q",
                       (unsigned long long)counts->rows, shape->q_heads, data->q ? shape->v_head_dim : shape->head_dim);
    return true;
}

bool za_check_scores(const struct shape *shape, const struct za_call *call, const float *q, uint64_t rows,
                     double largest_k) {
    size_t heads = shape->q_heads, dims = shape->head_dim, n = (size_t)rows * heads * dims;
    double largest_q = 0;
    for (size_t i = 0; i < n; ++i) {
        if (!(fabsf(q[i]) <= MAX_INPUT)) /* also where it is NaN */
            return za_fail("q[%zu, %zu, %zu]: got %g, expected at most 2**%d", i / (heads * dims), i / dims % heads,
                           i % dims, (double)q[i], ilogbf(MAX_INPUT));
        largest_q = fmax(largest_q, fabs((double)q[i]));
    }
    double scale = fabs(za_scale(shape, call)), most = fmax(1, 1.5 * scale), added = added_most(shape, call);
    if (call->softcap != 0) most = fmax(most, scale / call->softcap);
    if (largest_q * largest_k * shape->head_dim * most + added <= MAX_SCORE) return true;
    return za_fail("q, k: got max|q| = %g, max|k| = %g, scale = %g and %g that biases and masks add, whose scores may "
                   "overflow", largest_q, largest_k, za_scale(shape, call), added);
}

bool za_check_counts(const struct za_device *device, const struct counts *counts, const struct parts *parts) {
    const uint32_t *most = device->properties.limits.maxComputeWorkGroupCount;
    if (za_max(counts->items, counts->shared) <= most[1] && counts->rows <= most[2] && counts->new_rows <= most[0] &&
        parts->base + parts->end <= UINT32_MAX)
        return true;
    return za_fail_as(ZA_UNSUPPORTED, "q_len, new_rows: got %llu and %llu, which make %llu items and %llu words; %s "
                      "takes at most %u rows and %u items or new rows in a call; make several calls",
                      (unsigned long long)counts->rows, (unsigned long long)counts->new_rows,
                      (unsigned long long)za_max(counts->items, counts->shared),
                      (unsigned long long)(parts->base + parts->end), device->properties.deviceName,
                      most[2], (uint32_t)za_min(most[0], most[1]));
}

/* --- places ------------------------------------------------------------------------------------------ */

bool za_check_place(const struct za_device *device, const char *name, const struct za_place *place, uint64_t bytes,
                    bool bound) {
    const VkPhysicalDeviceLimits *limits = &device->properties.limits;
    uint64_t unit = bound ? limits->minStorageBufferOffsetAlignment : 4;
    VkMemoryRequirements needs;
    if (!place->buffer) return za_fail("%s: got no buffer, expected one", name);
    if (place->offset % unit)
        return za_fail("%s.offset: got %llu, expected a multiple of %llu", name, (unsigned long long)place->offset,
                       (unsigned long long)unit);
    if (place->size < bytes)
        return za_fail("%s.size: got %llu bytes, expected at least %llu", name, (unsigned long long)place->size,
                       (unsigned long long)bytes);
    if (bound && bytes > limits->maxStorageBufferRange)
        return za_fail_as(ZA_UNSUPPORTED, "%s: %llu bytes are needed, %s takes at most %u in one storage buffer", name,
                          (unsigned long long)bytes, device->properties.deviceName, limits->maxStorageBufferRange);
    device->vk.GetBufferMemoryRequirements(device->host.device, place->buffer, &needs); /* as large as the buffer */
    if (place->offset <= needs.size && place->size <= needs.size - place->offset) return true;
    return za_fail("%s: got %llu bytes from offset %llu, expected a place within the buffer, which has at most %llu",
                   name, (unsigned long long)place->size, (unsigned long long)place->offset,
                   (unsigned long long)needs.size);
}

bool za_check_apart(const char *const names[], const struct za_place *const places[], const uint64_t bytes[], int n) {
    for (int i = 0; i < n; ++i) {
        for (int j = 0; j < i; ++j) {
            const struct za_place *a = places[i], *b = places[j];
            if (a->buffer != b->buffer || !bytes[i] || !bytes[j] || a->offset >= b->offset + bytes[j] ||
                b->offset >= a->offset + bytes[i])
                continue;
            return za_fail("%s, %s: got places that overlap, expected places apart", names[j], names[i]);
        }
    }
    return true;
}

/* --- steps ------------------------------------------------------------------------------------------- */

static bool at_most(const char *name, uint64_t got, uint64_t most) {
    return got <= most || za_fail("%s: got %llu, expected at most the room's %llu", name, (unsigned long long)got,
                                  (unsigned long long)most);
}

/* A step has the option if and only if its room has it, because pipelines are made for the room. */
static bool as_room(const char *name, bool step, bool room) {
    return step == room || za_fail("%s: got a step %s, expected one %s, as its room says", name,
                                   step ? "that has it" : "without it", room ? "that has it" : "without it");
}

bool za_check_step(const struct za_room *room, const struct counts *counts, const struct shape *shape,
                   const struct za_call *call) {
    struct counts all = za_totals(shape, call);
    if (!at_most("requests", call->requests, room->requests)) return false;
    for (uint32_t i = 0; i < call->requests; ++i)
        if (!at_most("tokens", call->request[i].tokens, room->tokens) ||
            !at_most("mask_keys", call->request[i].mask_keys, room->mask_keys))
            return false;
    for (int i = 0; i < BIASES; ++i)
        if (!as_room(za_biases[i].name, za_slopes(call, i), counts->biases >> i & 1)) return false;
    if (call->splits) return za_fail("splits: got %u, expected 0; a prepared call has its room's", call->splits);
    if (!as_room("softcap", call->softcap != 0, room->softcap) ||
        (call->sinks && !as_room("sinks", true, room->sinks)) ||
        ((call->mask_slopes || all.masks) && !as_room("mask_slopes", call->mask_slopes, room->mask_slopes)))
        return false;
    return at_most("q_len", all.rows, room->rows) && at_most("new_rows", all.new_rows, room->new_rows) &&
           at_most("pages", all.pages, counts->pages);
}
