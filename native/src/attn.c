/* za_attn: the manifest's numbers for a shape, the pipelines, and the memory of calls that wait. */
#include "attn.h"

#include <stdlib.h>

#include "error.h"
#include "primitives.h"
#include "storage.h"

enum { MAX_STRIDE = 1 << 16 };

static bool known(enum za_dtype dtype) { return dtype > ZA_AS_K && dtype < ZA_DTYPES; }

static bool check_stride(const char *name, enum za_dtype dtype, uint32_t dims, uint32_t stride) {
    uint64_t least = (za_row_bytes(dtype, dims) + 1) / 2 * 2;
    if (stride >= least && stride <= MAX_STRIDE && stride % 2 == 0) return true;
    return za_fail("options.%s: got %u, expected a multiple of 2 from %llu, the bytes of a row of %s, to %d", name,
                   stride, (unsigned long long)least, za_storage[dtype].name, MAX_STRIDE);
}

static bool check_options(const struct za_options *o) {
    if (!o->manifest) return za_fail("options.manifest: got NULL, expected the folder of `zinc-attn export`");
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
    return o->arithmetic == ZA_CANONICAL || o->arithmetic == ZA_FUSED ||
           za_fail("options: got arithmetic %d, expected ZA_CANONICAL or ZA_FUSED", (int)o->arithmetic);
}

/* Of head sizes within the limits. */
static bool check_strides(const struct za_options *o) {
    if (o->latent && o->v_stride != o->k_stride)
        return za_fail("options.v_stride: got %u for a latent shape, expected 0, since its V is part of its K",
                       o->v_stride);
    return (!o->k_stride && !o->v_stride) || (check_stride("k_stride", o->dtype, o->head_dim, o->k_stride) &&
                                              check_stride("v_stride", o->v_dtype, o->v_head_dim, o->v_stride));
}

static bool open_parts(struct za_attn *attn, struct za_options options) {
    if (!options.v_head_dim) options.v_head_dim = options.head_dim;
    if (options.v_dtype == ZA_AS_K) options.v_dtype = options.dtype;
    if (options.latent && !options.v_stride) options.v_stride = options.k_stride;
    return check_options(&options) && za_manifest_open(&attn->manifest, options.manifest) &&
           za_manifest_limits(&attn->manifest, &options) && check_strides(&options) &&
           za_manifest_shape(&attn->manifest, &options, za_device_info(attn->device).cpu, &attn->shape) &&
           za_primitives_check(attn->device, &attn->manifest, &attn->shape) &&
           (options.arithmetic == ZA_CANONICAL ||
            za_fused_choose(attn->device, &attn->manifest, &attn->shape, &attn->fused));
}

struct za_attn *za_open(struct za_device *device, const struct za_options *options) {
    if (!za_given("device", device) || !za_given("options", options) || !za_enter(device)) return NULL;
    struct za_attn *attn = calloc(1, sizeof *attn);
    if (!attn) za_no_memory();
    if (attn) attn->device = device;
    if (attn) ++device->used_by;
    if (za_leave(device, attn && open_parts(attn, *options))) return attn;
    za_close(attn);
    return NULL;
}

bool za_close(struct za_attn *attn) {
    if (!attn) return true;
    if (attn->caches || attn->prepared)
        return za_fail("attn: got one with %u caches and %u prepared calls, expected none; free them first",
                       attn->caches, attn->prepared);
    --attn->device->used_by;
    for (int i = 0; i < SCRATCH; ++i) za_buffer_free(attn->device, &attn->scratch[i]);
    for (int i = 0; i < PIPELINES; ++i) za_pipeline_free(attn->device, &attn->pipelines[i]);
    za_sets_free(attn->device, &attn->sets);
    za_manifest_close(&attn->manifest);
    free(attn);
    return true;
}

struct za_info za_info(const struct za_attn *attn) {
    const struct shape *s = &attn->shape;
    return (struct za_info){
        .page_size = s->page_size,
        .k_dim = s->k_dim,
        .v_dim = s->v_dim,
        .row_words = s->token_words / s->kv_heads,
        .k_page_bytes = s->k_page_bytes,
        .v_page_bytes = s->v_page_bytes,
    };
}

struct za_trace za_trace(const struct za_attn *attn) { return attn->trace; }

/* --- what a call needs ------------------------------------------------------------------------------- */

int za_attend_of(const struct counts *counts, bool softcap) {
    return ATTEND + (counts->loop ? LOOP : 0) + (softcap ? CAPPED : 0) + (counts->alibi ? SLOPED : 0) +
           (!counts->masks ? 0 : counts->mask_slopes ? MASKED_BY_SLOPE : MASKED);
}

bool za_need_pipeline(struct za_attn *attn, int which) {
    if (attn->pipelines[which].handle) return true;
    static const char *const names[ATTEND] = {"append", "merge"};
    int flags = which < ATTEND ? 0 : which - ATTEND;
    const char *name = which < ATTEND ? names[which] : flags & LOOP ? "attend_loop" : "attend_single";
    bool few = which == MERGE && attn->device->properties.limits.maxComputeWorkGroupInvocations < 8 * WAVE;
    struct kernel kernel;
    bool ok = za_kernel_load(&attn->manifest, &attn->shape, name, &kernel) &&
              (!(flags & CAPPED) || za_kernel_set(&kernel, "softcap", 1)) &&
              (!(flags & SLOPED) || za_kernel_set(&kernel, "alibi", 1)) &&
              (!(flags & (MASKED | MASKED_BY_SLOPE)) ||
               za_kernel_set(&kernel, "mask", flags & MASKED ? 1 : 2)) &&
              (which < ATTEND || !attn->fused || za_kernel_set(&kernel, "fused", attn->fused)) &&
              (!few || za_kernel_set(&kernel, "workgroup_size", WAVE)) &&
              za_pipeline_make(attn->device, &kernel, &attn->pipelines[which]);
    za_kernel_free(&kernel);
    return ok;
}

bool za_need_buffer(struct za_attn *attn, int which, uint64_t bytes) {
    static const char *const names[SCRATCH] = {"work", "q", "rows", "out", "states", "q", "out"};
    struct buffer *buffer = &attn->scratch[which];
    uint64_t limit = attn->device->properties.limits.maxStorageBufferRange, size = 256;
    if (bytes <= buffer->size && buffer->handle) return true;
    while (size < bytes) size *= 2;
    if (bytes <= limit && limit < size) size = limit / 4 * 4;
    za_buffer_free(attn->device, buffer);
    if (za_buffer_make(attn->device, size, which < STATES, names[which], buffer)) return true;
    za_buffer_free(attn->device, buffer);
    return false;
}
