/* Caches of K and V, and the copy of a page in all layers. */
#include <stdlib.h>

#include "attn.h"
#include "check.h"
#include "error.h"
#include "storage.h"

/* --- scales of heads --------------------------------------------------------------------------------- */

/* A layer's scales of K (or V), `given` (layers, kv_heads), to every second row of `scales` (layers, 2, kv_heads). */
static bool take_scales(const struct shape *shape, const char *name, enum za_dtype dtype, const float *given,
                        uint32_t layers, float *scales) {
    const struct storage_limits *limits = &za_storage_limits;
    size_t heads = shape->kv_heads;
    if (given && !za_storage[dtype].head_scale)
        return za_fail("%s: got some for %s, expected NULL; only fp8_e4m3 has scales of heads", name,
                       za_storage[dtype].name);
    if (!given && za_storage[dtype].head_scale)
        return za_fail("%s: got NULL, expected (%u, %zu) scales of layers and KV heads for fp8_e4m3; 1 suits values up "
                       "to %g", name, layers, heads, limits->fp8_most);
    for (size_t i = 0; i < layers * heads; ++i) {
        float scale = given ? given[i] : 1;
        if (!((double)scale >= limits->least_scale && (double)scale <= limits->most_scale)) /* also where it is NaN */
            return za_fail("%s[%zu, %zu]: got %g, expected a scale from %g to %g", name, i / heads, i % heads,
                           (double)scale, limits->least_scale, limits->most_scale);
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

const float *za_scales_of(const struct za_cache *cache, uint32_t layer) {
    return cache->scales ? cache->scales + (size_t)layer * cache->attn->shape.scale_words : NULL;
}

/* --- caches ------------------------------------------------------------------------------------------ */

/* That a storage buffer of the device holds K, and one V. */
static bool check_size(const struct za_attn *attn, uint32_t layers, uint32_t pages) {
    struct za_info info = za_info(attn);
    uint64_t of_page = info.k_page_bytes > info.v_page_bytes ? info.k_page_bytes : info.v_page_bytes;
    uint64_t bytes = of_page * pages, limit = attn->device->properties.limits.maxStorageBufferRange;
    if (layers && pages && layers <= UINT32_MAX / pages && bytes <= limit && layers <= limit / bytes) return true;
    return za_fail("cache: got %u layers of %u pages, %llu bytes of K or V a layer; %s takes %llu bytes in one storage "
                   "buffer, so make a cache of at most %llu layers, and others for the rest", layers, pages,
                   (unsigned long long)bytes, attn->device->properties.deviceName, (unsigned long long)limit,
                   (unsigned long long)(bytes ? limit / bytes : 0));
}

/* Pages from a layer to the next, so that a layer begins where a buffer may be bound, if there is room for it. */
static uint32_t stride_of(const struct za_attn *attn, uint32_t layers, uint32_t pages) {
    struct za_info info = za_info(attn);
    uint64_t unit = attn->device->properties.limits.minStorageBufferOffsetAlignment, stride = pages;
    uint64_t of_page = info.k_page_bytes > info.v_page_bytes ? info.k_page_bytes : info.v_page_bytes;
    while (stride * info.k_page_bytes % unit || stride * info.v_page_bytes % unit) ++stride;
    bool fits = stride * layers * of_page <= attn->device->properties.limits.maxStorageBufferRange;
    return layers > 1 && fits && stride * layers <= UINT32_MAX ? (uint32_t)stride : pages;
}

static bool own_memory(struct za_cache *cache, struct za_info info) {
    struct za_device *device = cache->attn->device;
    uint64_t pages = (uint64_t)cache->layers * cache->stride;
    if (!za_buffer_make(device, pages * info.k_page_bytes, false, "k", &cache->own_k)) return false;
    cache->k = cache->v = za_whole(&cache->own_k);
    if (cache->attn->shape.latent) return true;
    if (!za_buffer_make(device, pages * info.v_page_bytes, false, "v", &cache->own_v)) return false;
    cache->v = za_whole(&cache->own_v);
    return true;
}

static bool host_memory(struct za_cache *cache, struct za_info info, const struct za_cache_places *given) {
    const struct za_device *device = cache->attn->device;
    static const char *const names[] = {"k", "v"};
    const struct za_place *const places[] = {&given->k, &given->v};
    uint64_t pages = (uint64_t)cache->layers * cache->pages;
    const uint64_t bytes[] = {pages * info.k_page_bytes, pages * info.v_page_bytes};
    bool latent = cache->attn->shape.latent;
    if (latent && given->v.buffer) return za_fail("v: got a place, expected none; V of a latent shape is part of k");
    if (!za_check_place(device, "k", &given->k, bytes[0], true) ||
        (!latent && !za_check_place(device, "v", &given->v, bytes[1], true)) ||
        (!latent && !za_check_apart(names, places, bytes, 2)))
        return false;
    cache->k = cache->v = given->k;
    if (!latent) cache->v = given->v;
    cache->k.size = bytes[0];
    cache->v.size = latent ? bytes[0] : bytes[1];
    return true;
}

/* own: in memory of the library's. */
static struct za_cache *make(struct za_attn *attn, const struct za_cache_places *given, bool own) {
    struct za_cache *cache = NULL;
    if (!za_enter(attn->device)) return NULL;
    bool ok = check_size(attn, given->layers, given->pages) && ((cache = calloc(1, sizeof *cache)) || za_no_memory());
    if (ok) {
        *cache = (struct za_cache){.attn = attn, .layers = given->layers, .pages = given->pages};
        cache->stride = own ? stride_of(attn, cache->layers, cache->pages) : cache->pages;
        ok = make_scales(cache, given->k_scales, given->v_scales) &&
             (own ? own_memory(cache, za_info(attn)) : host_memory(cache, za_info(attn), given));
    }
    za_leave(attn->device);
    if (ok) return cache;
    za_cache_free(cache);
    return NULL;
}

struct za_cache *za_cache_make(struct za_attn *attn, uint32_t layers, uint32_t pages, const float *k_scales,
                               const float *v_scales) {
    const struct za_cache_places given = {
        .layers = layers, .pages = pages, .k_scales = k_scales, .v_scales = v_scales};
    return make(attn, &given, true);
}

struct za_cache *za_cache_from(struct za_attn *attn, const struct za_cache_places *places) {
    return make(attn, places, false);
}

void za_cache_free(struct za_cache *cache) {
    if (!cache) return;
    za_buffer_free(cache->attn->device, &cache->own_k);
    za_buffer_free(cache->attn->device, &cache->own_v);
    free(cache->scales);
    free(cache);
}

/* --- copies ------------------------------------------------------------------------------------------ */

static bool copy_page(struct za_cache *cache, uint32_t source, uint32_t target) {
    struct za_attn *attn = cache->attn;
    struct za_device *device = attn->device;
    size_t words = za_copy_words(&attn->manifest, cache->layers);
    if (source >= cache->pages || target >= cache->pages)
        return za_fail("source, target: got pages %u and %u, expected ones below %u", source, target, cache->pages);
    if (!za_need_pipeline(attn, COPY) || !za_need_buffer(attn, WORK, 4 * words)) return false;
    uint32_t *work = attn->scratch[WORK].mapped;
    za_copy_write(&attn->manifest, source, target, cache->stride, cache->layers, work);
    attn->trace = (struct za_trace){.work = work, .work_words = words};
    const struct za_place places[] = {za_whole(&attn->scratch[WORK]), cache->k, cache->v};
    const uint32_t groups[] = {cache->layers, attn->shape.kv_heads, attn->shape.page_tiles};
    if (!za_sets_reset(device, &attn->sets) || !za_commands_begin(device)) return false;
    za_barrier_before(device, device->commands);
    if (!za_dispatch(device, device->commands, &attn->sets, &attn->pipelines[COPY], places, groups)) return false;
    za_barrier_behind(device, device->commands);
    return za_commands_submit(device);
}

bool za_copy_page(struct za_cache *cache, uint32_t source, uint32_t target) {
    if (!za_enter(cache->attn->device)) return false;
    bool ok = copy_page(cache, source, target);
    za_leave(cache->attn->device);
    return ok;
}
