/* The library: the device with its pipelines, caches of K and V, and the submission of a call. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "error.h"
#include "floats.h"
#include "gpu.h"
#include "manifest.h"
#include "primitives.h"
#include "rows.h"
#include "storage.h"
#include "work.h"
#include "zinc_attn.h"

/* Pass 1 has a pipeline for each sum of the flags: the build, and what becomes of scores. */
enum { LOOP = 1, CAPPED = 2, SLOPED = 4, MASKED = 8, VARIANTS = 16 };
enum { APPEND, MERGE, COPY, ATTEND, PIPELINES = ATTEND + VARIANTS };
enum { WORK, Q, ROWS, STATES, OUT, SCRATCH };
static const char *const SCRATCH_NAMES[SCRATCH] = {"work", "q", "rows", "states", "out"};

struct za_attn {
    struct manifest manifest;
    struct shape shape;
    bool cpu;
    struct gpu gpu;
    struct pipeline pipelines[PIPELINES];
    struct buffer scratch[SCRATCH]; /* of a call; they grow */
    struct za_trace trace;
};

struct za_cache {
    uint32_t layers, pages; /* pages of a layer */
    struct buffer k, v;     /* (layers, pages, words of a page); no v where the shape is latent */
    float *scales;          /* (layers, 2, kv_heads), K's and V's; NULL where no type has them */
    double largest_k;
};

/* --- opening ----------------------------------------------------------------------------------------- */

static bool known(enum za_dtype dtype) { return dtype > ZA_AS_K && dtype < ZA_DTYPES; }

static bool check_options(const struct za_options *o) {
    if (!o->q_heads || !o->kv_heads || !o->head_dim)
        return za_fail("options: got shape %u/%u/%u, expected numbers from 1 on", o->q_heads, o->kv_heads, o->head_dim);
    if (!known(o->dtype) || !known(o->v_dtype))
        return za_fail("options: got dtype %d and v_dtype %d, expected a za_dtype, %d to %d; v_dtype 0 is K's",
                       (int)o->dtype, (int)o->v_dtype, ZA_AS_K + 1, ZA_DTYPES - 1);
    if (o->latent && o->dtype != o->v_dtype)
        return za_fail("options: got dtype %s and v_dtype %s for a latent shape, expected one type, since its V is "
                       "part of its K", za_storage[o->dtype].name, za_storage[o->v_dtype].name);
    if (o->latent && o->v_head_dim > o->head_dim)
        return za_fail("options: got v_head_dim %u for a latent shape, expected at most head_dim = %u, since its V is "
                       "the begin of its K", o->v_head_dim, o->head_dim);
    return true;
}

static bool open_parts(struct za_attn *attn, struct za_options options) {
    if (!options.v_head_dim) options.v_head_dim = options.head_dim;
    if (options.v_dtype == ZA_AS_K) options.v_dtype = options.dtype;
    if (!check_options(&options) || !za_manifest_open(&attn->manifest, options.manifest) ||
        !za_gpu_open(&attn->gpu, options.device))
        return false;
    attn->cpu = attn->gpu.properties.deviceType == VK_PHYSICAL_DEVICE_TYPE_CPU;
    return za_manifest_shape(&attn->manifest, &options, attn->cpu ? "cpu" : "gpu", &attn->shape) &&
           za_primitives_check(&attn->gpu, &attn->manifest, &attn->shape);
}

struct za_attn *za_open(const struct za_options *options) {
    struct za_attn *attn = calloc(1, sizeof *attn);
    if (!attn) za_fail("out of memory");
    if (attn && open_parts(attn, *options)) return attn;
    za_close(attn);
    return NULL;
}

void za_close(struct za_attn *attn) {
    if (!attn) return;
    if (attn->gpu.device) {
        for (int i = 0; i < SCRATCH; ++i) za_buffer_free(&attn->gpu, &attn->scratch[i]);
        for (int i = 0; i < PIPELINES; ++i) za_pipeline_free(&attn->gpu, &attn->pipelines[i]);
    }
    za_gpu_close(&attn->gpu);
    za_manifest_close(&attn->manifest);
    free(attn);
}

struct za_info za_info(const struct za_attn *attn) {
    return (struct za_info){attn->gpu.properties.deviceName, attn->cpu, attn->gpu.wave32, attn->shape.page_size};
}

struct za_trace za_trace(const struct za_attn *attn) { return attn->trace; }

/* --- caches ------------------------------------------------------------------------------------------ */

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

static bool make_scales(const struct za_attn *attn, struct za_cache *cache, const float *k, const float *v) {
    const struct shape *shape = &attn->shape;
    if (shape->latent && v)
        return za_fail("v_scales: got some for a latent shape, expected NULL; its V is part of its K");
    if (shape->scale_words && !(cache->scales = calloc(cache->layers, 4 * (size_t)shape->scale_words)))
        return za_fail("out of memory");
    float *v_scales = cache->scales ? cache->scales + shape->kv_heads : NULL;
    return take_scales(shape, "k_scales", shape->k.dtype, k, cache->layers, cache->scales) &&
           take_scales(shape, "v_scales", shape->v.dtype, shape->latent ? k : v, cache->layers, v_scales);
}

/* That a storage buffer of the device holds K, and one V. */
static bool check_cache(const struct za_attn *attn, uint32_t layers, uint32_t pages) {
    uint64_t k_bytes = 4 * (uint64_t)attn->shape.k_page_words * pages, limit;
    uint64_t v_bytes = 4 * (uint64_t)attn->shape.v_page_words * pages, bytes = k_bytes > v_bytes ? k_bytes : v_bytes;
    limit = attn->gpu.properties.limits.maxStorageBufferRange;
    if (layers && pages && layers <= UINT32_MAX / pages && bytes <= limit && layers <= limit / bytes) return true;
    return za_fail("cache: got %u layers of %u pages, %llu bytes of K or V a layer; %s takes %llu bytes in one storage "
                   "buffer, so make a cache of at most %llu layers, and others for the rest", layers, pages,
                   (unsigned long long)bytes, attn->gpu.properties.deviceName, (unsigned long long)limit,
                   (unsigned long long)(bytes ? limit / bytes : 0));
}

struct za_cache *za_cache_make(struct za_attn *attn, uint32_t layers, uint32_t pages, const float *k_scales,
                               const float *v_scales) {
    const struct shape *shape = &attn->shape;
    uint64_t all = (uint64_t)layers * pages;
    if (!check_cache(attn, layers, pages)) return NULL;
    struct za_cache *cache = calloc(1, sizeof *cache);
    if (!cache) za_fail("out of memory");
    if (!cache) return NULL;
    *cache = (struct za_cache){.layers = layers, .pages = pages};
    if (make_scales(attn, cache, k_scales, v_scales) &&
        za_buffer_make(&attn->gpu, 4 * all * shape->k_page_words, false, "k", &cache->k) &&
        (shape->latent || za_buffer_make(&attn->gpu, 4 * all * shape->v_page_words, false, "v", &cache->v)))
        return cache;
    za_cache_free(attn, cache);
    return NULL;
}

void za_cache_free(struct za_attn *attn, struct za_cache *cache) {
    if (!cache) return;
    za_buffer_free(&attn->gpu, &cache->k);
    za_buffer_free(&attn->gpu, &cache->v);
    free(cache->scales);
    free(cache);
}

/* The buffer that a kernel reads V from. */
static const struct buffer *v_of(const struct za_attn *attn, const struct za_cache *cache) {
    return attn->shape.latent ? &cache->k : &cache->v;
}

static const float *scales_of(const struct za_attn *attn, const struct za_cache *cache, uint32_t layer) {
    return cache->scales ? cache->scales + (size_t)layer * attn->shape.scale_words : NULL;
}

/* --- what a call needs ------------------------------------------------------------------------------- */

static bool need_pipeline(struct za_attn *attn, int which) {
    if (attn->pipelines[which].handle) return true;
    static const char *const names[ATTEND] = {"append", "merge", "copy"};
    int flags = which < ATTEND ? 0 : which - ATTEND;
    const char *name = which < ATTEND ? names[which] : flags & LOOP ? "attend_loop" : "attend_single";
    bool few = which == MERGE && attn->gpu.properties.limits.maxComputeWorkGroupInvocations < 8 * WAVE;
    struct kernel kernel;
    bool ok = za_kernel_load(&attn->manifest, &attn->shape, name, &kernel) &&
              (!(flags & CAPPED) || za_kernel_set(&kernel, "softcap", 1)) &&
              (!(flags & SLOPED) || za_kernel_set(&kernel, "alibi", 1)) &&
              (!(flags & MASKED) || za_kernel_set(&kernel, "mask", 1)) &&
              (!few || za_kernel_set(&kernel, "workgroup_size", WAVE)) &&
              za_pipeline_make(&attn->gpu, &kernel, &attn->pipelines[which]);
    za_kernel_free(&kernel);
    return ok;
}

/* A scratch buffer of at least `words` words: the next power of two, so that calls that grow need few. */
static bool need_buffer(struct za_attn *attn, int which, uint64_t words) {
    struct buffer *buffer = &attn->scratch[which];
    uint64_t limit = attn->gpu.properties.limits.maxStorageBufferRange, bytes = 256;
    if (4 * words <= buffer->size) return true;
    while (bytes < 4 * words) bytes *= 2;
    if (4 * words <= limit && limit < bytes) bytes = limit / 4 * 4;
    za_buffer_free(&attn->gpu, buffer);
    return za_buffer_make(&attn->gpu, bytes, which != STATES, SCRATCH_NAMES[which], buffer);
}

static bool need_buffers(struct za_attn *attn, const struct za_call *call, const struct layout *layout) {
    const struct shape *shape = &attn->shape;
    uint64_t words[SCRATCH] = {
        [WORK] = za_work_words(&attn->manifest, shape, call, layout),
        [Q] = (uint64_t)call->q_len * shape->q_heads * shape->k_dim,
        [ROWS] = (uint64_t)call->new_rows * shape->token_words,
        [STATES] = layout->single_pass ? 0 : (uint64_t)call->q_len * layout->states_per_row * shape->state_words,
        [OUT] = (uint64_t)call->q_len * shape->q_heads * (shape->v_dim + 1),
    };
    for (int i = 0; i < SCRATCH; ++i)
        if (!need_buffer(attn, i, words[i] ? words[i] : 1)) return false;
    return true;
}

static int attend_of(const struct layout *layout, const struct za_call *call) {
    return ATTEND + (layout->loop ? LOOP : 0) + (call->softcap != 0 ? CAPPED : 0) + (call->alibi ? SLOPED : 0) +
           (call->mask_keys ? MASKED : 0);
}

/* --- a call ------------------------------------------------------------------------------------------ */

/* Queries (q_len, q_heads, k_dim), 0 from head_dim on. */
static void write_q(const struct za_attn *attn, const struct za_call *call, float *out) {
    const struct shape *shape = &attn->shape;
    size_t n = (size_t)call->q_len * shape->q_heads, dims = shape->head_dim, filled = shape->k_dim;
    for (size_t i = 0; i < n; ++i, out += filled) {
        for (size_t d = 0; d < dims; ++d) out[d] = za_flushed(attn->manifest.min_input, call->q[i * dims + d]);
        memset(out + dims, 0, 4 * (filled - dims));
    }
}

/* The results, whose rows have v_dim values on the device. */
static void read_out(const struct za_attn *attn, const struct za_call *call) {
    const struct shape *shape = &attn->shape;
    size_t n = (size_t)call->q_len * shape->q_heads, dims = shape->v_head_dim, filled = shape->v_dim;
    const float *out = attn->scratch[OUT].mapped;
    for (size_t i = 0; i < n; ++i) memcpy(call->out + i * dims, out + i * filled, 4 * dims);
    if (n && call->lse) memcpy(call->lse, out + n * filled, 4 * n);
}

/* The host's part: work words, new rows and queries. */
static bool fill(struct za_attn *attn, struct za_cache *cache, const struct za_call *call, const struct layout *layout,
                 double *largest_k) {
    const struct manifest *m = &attn->manifest;
    const struct shape *shape = &attn->shape;
    const struct row_format format = {shape->kv_heads, shape->k, shape->v, m->min_input, m->max_input};
    const float *scales = scales_of(attn, cache, call->layer);
    const struct new_rows rows = {
        .tokens = call->new_rows,
        .encoded = call->encoded,
        .k = call->k,
        .v = call->v,
        .k_scales = scales,
        .v_scales = scales ? scales + shape->kv_heads : NULL,
    };
    if (!za_rows_encode(&format, &rows, attn->scratch[ROWS].mapped, largest_k) ||
        !za_check_scores(m, shape, call, *largest_k))
        return false;
    write_q(attn, call, attn->scratch[Q].mapped);
    uint32_t *work = attn->scratch[WORK].mapped;
    za_work_write(m, shape, call, layout, call->layer * cache->pages, scales, work);
    attn->trace = (struct za_trace){work, za_work_words(m, shape, call, layout), layout->splits,
                                    layout->leaves_per_state, layout->loop};
    return true;
}

/* Append, attend, merge: one submission. */
static bool submit(struct za_attn *attn, const struct za_cache *cache, const struct za_call *call,
                   const struct layout *layout) {
    struct gpu *gpu = &attn->gpu;
    const struct pipeline *pipelines = attn->pipelines;
    const struct buffer *b = attn->scratch, *k = &cache->k, *v = v_of(attn, cache);
    const struct buffer *target = layout->single_pass ? &b[OUT] : &b[STATES];
    const struct buffer *const appended[] = {&b[WORK], &b[ROWS], k, v};
    const struct buffer *const attended[] = {&b[WORK], &b[Q], k, v, target, target};
    const struct buffer *const merged[] = {&b[WORK], &b[STATES], &b[OUT]};
    uint32_t dims = attn->manifest.merge_dims, heads = attn->shape.kv_heads;
    if (!za_commands_begin(gpu)) return false;
    if (call->new_rows) {
        if (!za_commands_dispatch(gpu, &pipelines[APPEND], appended, call->new_rows, heads, 1)) return false;
        za_commands_barrier(gpu, VK_PIPELINE_STAGE_COMPUTE_SHADER_BIT, VK_ACCESS_SHADER_READ_BIT); /* k, v */
    }
    if (layout->items && !za_commands_dispatch(gpu, &pipelines[attend_of(layout, call)], attended, layout->items, heads,
                                               attn->shape.head_chunks))
        return false;
    if (call->q_len && !layout->single_pass) {
        za_commands_barrier(gpu, VK_PIPELINE_STAGE_COMPUTE_SHADER_BIT, VK_ACCESS_SHADER_READ_BIT); /* states */
        if (!za_commands_dispatch(gpu, &pipelines[MERGE], merged, (attn->shape.v_dim + dims - 1) / dims,
                                  attn->shape.q_heads, call->q_len))
            return false;
    }
    return za_commands_submit(gpu);
}

bool za_run(struct za_attn *attn, struct za_cache *cache, const struct za_call *given) {
    const struct shape *shape = &attn->shape;
    struct za_call scaled = *given;
    if (scaled.scale == 0) scaled.scale = 1 / sqrt(shape->head_dim);
    const struct za_call *call = &scaled;
    if (!za_check_call(&attn->manifest, shape, call, cache->layers, cache->pages)) return false;
    struct layout layout = {0};
    if (call->q_len) layout = za_layout(&attn->manifest, shape, call, attn->cpu);
    double largest_k = cache->largest_k;
    if (!za_check_groups(&attn->gpu, call, layout.items) || !need_buffers(attn, call, &layout) ||
        !fill(attn, cache, call, &layout, &largest_k) || (call->new_rows && !need_pipeline(attn, APPEND)) ||
        (layout.items && !need_pipeline(attn, attend_of(&layout, call))) ||
        (call->q_len && !layout.single_pass && !need_pipeline(attn, MERGE)) || !submit(attn, cache, call, &layout))
        return false;
    cache->largest_k = largest_k;
    read_out(attn, call);
    return true;
}

bool za_copy_page(struct za_attn *attn, struct za_cache *cache, uint32_t source, uint32_t target) {
    if (source >= cache->pages || target >= cache->pages)
        return za_fail("source, target: got pages %u and %u, expected ones below %u", source, target, cache->pages);
    if (!need_pipeline(attn, COPY) || !need_buffer(attn, WORK, za_copy_words(&attn->manifest, cache->layers)))
        return false;
    uint32_t *work = attn->scratch[WORK].mapped;
    za_copy_write(&attn->manifest, source, target, cache->pages, cache->layers, work);
    attn->trace = (struct za_trace){.work = work, .work_words = za_copy_words(&attn->manifest, cache->layers)};
    const struct buffer *const bound[] = {&attn->scratch[WORK], &cache->k, v_of(attn, cache)};
    return za_commands_begin(&attn->gpu) &&
           za_commands_dispatch(&attn->gpu, &attn->pipelines[COPY], bound, cache->layers, attn->shape.kv_heads,
                                attn->shape.page_tiles) &&
           za_commands_submit(&attn->gpu);
}
