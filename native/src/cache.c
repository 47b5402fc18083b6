/* Caches of K and V, and the copy of a page in all layers. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "check.h"
#include "error.h"
#include "record.h"
#include "zinc_contract.h"

/* --- scales of heads --------------------------------------------------------------------------------- */

/* Check scales `source` (layers, kv_heads) of K or V; copy them to every second row of `scales` (layers, 2, heads). */
static bool take_scales(const struct shape *shape, const char *name, enum za_dtype dtype, const float *source,
                        uint32_t layers, float *scales) {
    size_t heads = shape->kv_heads;
    if (source && !za_storage[dtype].head_scale)
        return za_fail("%s: got some for %s, expected NULL; only fp8_e4m3 has scales of heads", name,
                       za_storage[dtype].name);
    if (!source && za_storage[dtype].head_scale)
        return za_fail("%s: got NULL, expected (%u, %zu) scales of layers and KV heads for fp8_e4m3; 1 suits values up "
                       "to %g", name, layers, heads, FP8_MAX);
    for (size_t i = 0; i < layers * heads; ++i) {
        float scale = source ? source[i] : 1;
        if (!((double)scale >= LEAST_SCALE && (double)scale <= MOST_SCALE)) /* also where it is NaN */
            return za_fail("%s[%zu, %zu]: got %g, expected a scale from 2**%d to 2**%d", name, i / heads, i % heads,
                           (double)scale, ilogb(LEAST_SCALE), ilogb(MOST_SCALE));
        if (scales) scales[i / heads * 2 * heads + i % heads] = scale;
    }
    return true;
}

static bool make_scales(struct za_cache *cache, const float *k, const float *v) {
    const struct shape *shape = &cache->attn->shape;
    if (shape->latent && v)
        return za_fail("v_scales: got some for a latent shape, expected NULL; its V is part of its K");
    if (shape->scale_words && !(cache->scales = calloc(cache->layers, 4 * (size_t)shape->scale_words)))
        return za_no_memory();
    float *v_scales = cache->scales ? cache->scales + shape->kv_heads : NULL;
    return take_scales(shape, "k_scales", shape->k.dtype, k, cache->layers, cache->scales) &&
           take_scales(shape, "v_scales", shape->v.dtype, shape->latent ? k : v, cache->layers, v_scales);
}

/* --- steps of rows ----------------------------------------------------------------------------------- */

static bool take_steps(struct za_cache *cache, const struct za_cache_places *places) {
    const struct shape *shape = &cache->attn->shape;
    cache->steps = (struct row_steps){places->token_rows, places->head_rows};
    if (!places->token_rows && !places->head_rows && shape->k.stride)
        cache->steps = (struct row_steps){shape->kv_heads, 1};
    uint64_t token = cache->steps.token, head = cache->steps.head, page_size = shape->page_size;
    bool apart = token && (shape->kv_heads == 1 || (head && (page_size == 1 || token >= head * shape->kv_heads ||
                                                             head >= token * page_size)));
    if (shape->k.stride ? apart : !places->token_rows && !places->head_rows) return true;
    return za_fail("token_rows, head_rows: got %u and %u, expected %s", places->token_rows, places->head_rows,
                   !shape->k.stride ? "0, since K and V lie in tiles"
                                    : "numbers from 1 on, token_rows at least head_rows * kv_heads or head_rows at "
                                      "least token_rows * page_size, or 0 and 0");
}

/* --- caches ------------------------------------------------------------------------------------------ */

/* The bytes of K or of V, whichever are more. */
static uint64_t most_bytes(const struct za_cache *cache, uint64_t pages) {
    uint64_t k = za_pages_bytes(cache, false, pages), v = za_pages_bytes(cache, true, pages);
    return k > v ? k : v;
}

/* Check that a storage buffer of the device can hold K, and another one V. */
static bool check_size(const struct za_cache *cache) {
    const VkPhysicalDeviceProperties *properties = &cache->attn->device->properties;
    uint64_t limit = properties->limits.maxStorageBufferRange;
    uint32_t layers = cache->layers, pages = cache->pages;
    if (!layers || !pages) return za_fail("layers, pages: got %u and %u, expected numbers from 1 on", layers, pages);
    uint64_t bytes = most_bytes(cache, pages);
    if (layers <= UINT32_MAX / pages && most_bytes(cache, (uint64_t)layers * pages) <= limit) return true;
    return za_fail("layers, pages: got %u and %u, %llu bytes of K or V a layer, but %s takes at most %llu in one "
                   "storage buffer; make several caches of fewer layers or pages", layers, pages,
                   (unsigned long long)bytes, properties->deviceName, (unsigned long long)limit);
}

/* Pages from a layer to the next. If there is room, each layer begins at an offset at which a buffer can be bound. */
static uint32_t stride_of(const struct za_cache *cache) {
    const VkPhysicalDeviceLimits *limits = &cache->attn->device->properties.limits;
    uint64_t unit = limits->minStorageBufferOffsetAlignment, stride = cache->pages, layers = cache->layers;
    while (stride * za_page_step(cache, false) % unit || stride * za_page_step(cache, true) % unit) ++stride;
    bool fits = stride * layers <= UINT32_MAX && most_bytes(cache, stride * layers) <= limits->maxStorageBufferRange;
    return layers > 1 && fits ? (uint32_t)stride : cache->pages;
}

static bool own_memory(struct za_cache *cache) {
    struct za_device *device = cache->attn->device;
    uint64_t pages = (uint64_t)cache->layers * (cache->stride = stride_of(cache));
    const bool latent = cache->attn->shape.latent;
    if (!za_buffer_make(device, za_pages_bytes(cache, false, pages), false, "k", &cache->own_k) ||
        (!latent && !za_buffer_make(device, za_pages_bytes(cache, true, pages), false, "v", &cache->own_v)))
        return false;
    cache->k = za_whole(&cache->own_k);
    cache->v = latent ? cache->k : za_whole(&cache->own_v);
    return true;
}

static bool host_memory(struct za_cache *cache, const struct za_cache_places *places) {
    const struct za_device *device = cache->attn->device;
    static const char *const names[] = {"k", "v"};
    const struct za_place *const parts[] = {&places->k, &places->v};
    uint64_t pages = (uint64_t)cache->layers * (cache->stride = cache->pages);
    const uint64_t bytes[] = {za_pages_bytes(cache, false, pages), za_pages_bytes(cache, true, pages)};
    bool latent = cache->attn->shape.latent;
    if (latent && places->v.buffer) return za_fail("v: got a place, expected none; V of a latent shape is part of k");
    if (!za_check_place(device, "k", &places->k, bytes[0], true) ||
        (!latent && !za_check_place(device, "v", &places->v, bytes[1], true)) ||
        (!latent && !za_check_apart(names, parts, bytes, 2)))
        return false;
    cache->k = cache->v = places->k;
    if (!latent) cache->v = places->v;
    cache->k.size = bytes[0];
    cache->v.size = bytes[1];
    return true;
}

/* own: K and V lie in the library's memory. */
static bool fill(struct za_cache *cache, const struct za_cache_places *places, bool own) {
    return take_steps(cache, places) && check_size(cache) && make_scales(cache, places->k_scales, places->v_scales) &&
           (own ? own_memory(cache) : host_memory(cache, places));
}

static struct za_cache *make(struct za_attn *attn, const struct za_cache_places *places, bool own) {
    if (!za_not_null("attn", attn) || !za_not_null("places", places) || !za_enter(attn->device)) return NULL;
    struct za_cache *cache = calloc(1, sizeof *cache);
    if (cache) cache->attn = attn, cache->layers = places->layers, cache->pages = places->pages, ++attn->caches;
    if (za_leave(attn->device, cache ? fill(cache, places, own) : za_no_memory())) return cache;
    za_cache_free(cache);
    return NULL;
}

struct za_cache *za_cache_make(struct za_attn *attn, uint32_t layers, uint32_t pages, const float *k_scales,
                               const float *v_scales) {
    const struct za_cache_places places = {
        .layers = layers, .pages = pages, .k_scales = k_scales, .v_scales = v_scales};
    return make(attn, &places, true);
}

struct za_cache *za_cache_from(struct za_attn *attn, const struct za_cache_places *places) {
    return make(attn, places, false);
}

void za_cache_free(struct za_cache *cache) {
    if (!cache) return;
    --cache->attn->caches;
    za_buffer_free(cache->attn->device, &cache->own_k);
    za_buffer_free(cache->attn->device, &cache->own_v);
    free(cache->scales);
    free(cache);
}

/* --- copies ------------------------------------------------------------------------------------------ */

/* Copy the page's bytes of K (or V) in every layer. */
static void copy_part(const struct za_cache *cache, bool of_v, uint32_t source, uint32_t target) {
    const struct za_device *device = cache->attn->device;
    uint64_t bytes = za_page_step(cache, of_v), of_layer = cache->stride * bytes;
    struct za_place from = of_v ? cache->v : cache->k, to = from;
    from.offset += source * bytes;
    to.offset += target * bytes;
    za_copy_rows(device, device->commands, from, of_layer, to, of_layer, bytes, cache->layers);
}

static bool copy_page(struct za_cache *cache, uint32_t source, uint32_t target) {
    struct za_device *device = cache->attn->device;
    const struct shape *shape = &cache->attn->shape;
    if (source >= cache->pages || target >= cache->pages)
        return za_fail("source, target: got pages %u and %u, expected pages below %u", source, target, cache->pages);
    bool neighbors = shape->kv_heads == 1 || cache->steps.head == 1;
    if (shape->k.stride && (cache->steps.token != shape->kv_heads || !neighbors))
        return za_fail_as(ZA_UNSUPPORTED, "cache: got token_rows %u and head_rows %u, expected %u and 1, pages in one "
                          "piece; copy by commands of the host's", cache->steps.token, cache->steps.head,
                          shape->kv_heads);
    if (source == target) return true;
    if (!za_begin(device, device->commands)) return false;
    za_barrier_before(device, device->commands);
    copy_part(cache, false, source, target);
    if (!shape->latent) copy_part(cache, true, source, target);
    za_barrier_after(device, device->commands);
    return za_submit(device, device->commands, true);
}

bool za_copy_page(struct za_cache *cache, uint32_t source, uint32_t target) {
    return za_not_null("cache", cache) && za_within(cache->attn->device, copy_page(cache, source, target));
}
