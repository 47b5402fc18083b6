/* za_attn: the numbers of a shape, the pipelines, and the memory of calls that wait. */
#include "attn.h"

#include <stdlib.h>

#include "error.h"
#include "primitives.h"

/* Check that the device can run the workgroups of pass 1. */
static bool check_device(const struct za_device *device) {
    const VkPhysicalDeviceLimits *limits = &device->properties.limits;
    static const char *const names[] = {"WorkGroupInvocations", "WorkGroupSize[0]", "SharedMemorySize"};
    static const uint32_t least[] = {LEAVES_PER_NODE * WAVE, LEAVES_PER_NODE * WAVE, LEAST_SHARED_BYTES};
    const uint32_t got[] = {limits->maxComputeWorkGroupInvocations, limits->maxComputeWorkGroupSize[0],
                            limits->maxComputeSharedMemorySize};
    for (int i = 0; i < 3; ++i)
        if (got[i] < least[i])
            return za_fail_as(ZA_UNSUPPORTED, "%s: its maxCompute%s is %u, expected %u or more",
                              device->properties.deviceName, names[i], got[i], least[i]);
    return true;
}

static bool open_parts(struct za_attn *attn, const struct za_options *options) {
    struct za_device *device = attn->device;
    const struct registers registers = za_device_registers(device);
    if (options->arithmetic == ZA_INTEGER) attn->arithmetic = INTEGER_SUMS;
    if (!za_shape(options, za_device_info(device).cpu, registers, &attn->shape) || !check_device(device) ||
        !za_primitives_check(device) ||
        (options->arithmetic == ZA_FUSED && !za_fused_choose(device, &attn->arithmetic)))
        return false;
    const struct za_units mat = device->units;
    attn->units = attn->arithmetic == INTEGER_SUMS && za_kernels[KERNEL_ATTEND_UNITS].code_bytes > 4 &&
                  za_units_attend(mat) && mat.subgroup >= 4 && /* four lanes share a vector */
                  za_units_vectors(&attn->shape.sizes, &device->properties.limits, mat.m, 1);
    return true;
}

struct za_attn *za_open(struct za_device *device, const struct za_options *options) {
    if (!za_not_null("device", device) || !za_not_null("options", options) || !za_enter(device)) return NULL;
    struct za_attn *attn = calloc(1, sizeof *attn);
    if (attn) attn->device = device, ++device->used_by;
    if (za_leave(device, attn ? open_parts(attn, options) : za_no_memory())) return attn;
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
    free(attn);
    return true;
}

struct za_info za_info(const struct za_attn *attn) {
    const struct shape *s = &attn->shape;
    return (struct za_info){
        .page_size = s->page_size,
        .k_dim = s->k_dim,
        .v_dim = s->v_dim,
        .row_words = s->sizes.token_words / s->kv_heads,
        .k_page_bytes = s->k_page_bytes,
        .v_page_bytes = s->v_page_bytes,
    };
}

struct za_trace za_trace(const struct za_attn *attn) { return attn->trace; }

/* --- what a call needs ------------------------------------------------------------------------------- */

static uint32_t shared_bytes(const struct za_attn *attn) {
    return attn->device->properties.limits.maxComputeSharedMemorySize;
}

int za_attend_of(const struct za_attn *attn, const struct counts *counts, bool softcap) {
    uint32_t heads = za_heads_together(&attn->shape.sizes, counts->items, shared_bytes(attn));
    return ATTEND + (softcap ? CAPPED : 0) + (int)(BIASED * counts->biases) +
           (heads > MAX_HEADS_PER_WORKGROUP ? MANY_HEADS : 0) + (counts->walks ? WALKS : 0) +
           (counts->masks ? MASKED : 0);
}

int za_shared_of(int attend) { return ((attend - ATTEND) & ~WALKS) + ATTEND + TOGETHER; }

int za_attend_by_units(const struct counts *counts, bool softcap, uint32_t vectors) {
    int doubled = 0;
    while ((uint32_t)LEAST_VECTORS << doubled < vectors) ++doubled;
    return UNITS + (softcap ? CAPPED : 0) + (counts->masks ? MASKED : 0) + DOUBLED * doubled +
           (int)(UNITS_BIASED * counts->biases);
}

uint32_t za_vectors_of(const struct za_attn *attn, int attend) {
    const int flags = attend - ATTEND;
    if (attend >= UNITS) return LEAST_VECTORS << (attend - UNITS) / DOUBLED % (UNITS_BIASED / DOUBLED);
    if (flags & TOGETHER) return attn->shape.sizes.group * za_rows_together(&attn->shape.sizes, shared_bytes(attn));
    return za_heads_together(&attn->shape.sizes, flags & MANY_HEADS ? UINT32_MAX : 0, shared_bytes(attn));
}

static bool make_attend(struct za_attn *attn, int attend, struct pipeline *pipeline) {
    struct attend_constants constants = za_attend_constants(&attn->shape.sizes);
    const int flags = attend - ATTEND;
    constants.vectors = za_vectors_of(attn, attend);
    constants.workgroup_size = LEAVES_PER_NODE * za_lanes(&attn->shape.sizes, constants.vectors);
    constants.subgroups = attn->device->wave32;
    constants.walks = (flags & WALKS) != 0;
    constants.rows_shared = flags & TOGETHER ? constants.vectors / attn->shape.sizes.group : 1;
    constants.softcap = (flags & CAPPED) != 0;
    constants.biases = (uint32_t)flags / BIASED;
    constants.mask = (flags & MASKED) != 0;
    constants.arithmetic = attn->arithmetic;
    return za_pipeline_make(attn->device, &za_kernels[KERNEL_ATTEND], &constants, pipeline);
}

static bool make_units(struct za_attn *attn, int which, struct pipeline *pipeline) {
    struct attend_units_constants constants = za_attend_units_constants(&attn->shape.sizes);
    const int flags = which - UNITS;
    constants.vectors = za_vectors_of(attn, which);
    constants.mat_m = attn->device->units.m;
    constants.mat_n = attn->device->units.n;
    constants.mat_k = attn->device->units.k;
    constants.workgroup_size = (uint32_t)za_units_size(&attn->shape.sizes, constants.vectors, constants.mat_m);
    constants.softcap = (flags & CAPPED) != 0;
    constants.biases = (uint32_t)flags / UNITS_BIASED;
    constants.mask = (flags & MASKED) != 0;
    return za_pipeline_make(attn->device, &za_kernels[KERNEL_ATTEND_UNITS], &constants, pipeline);
}

bool za_need_pipeline(struct za_attn *attn, int which) {
    struct za_device *device = attn->device;
    struct pipeline *pipeline = &attn->pipelines[which];
    const struct append_constants append = za_append_constants(&attn->shape.sizes);
    const struct merge_constants merge = za_merge_constants(&attn->shape.sizes);
    const struct round_q_constants round = za_round_q_constants(&attn->shape.sizes);
    if (pipeline->handle) return true;
    if (which == APPEND) return za_pipeline_make(device, &za_kernels[KERNEL_APPEND], &append, pipeline);
    if (which == MERGE) return za_pipeline_make(device, &za_kernels[KERNEL_MERGE], &merge, pipeline);
    if (which == ROUND) return za_pipeline_make(device, &za_kernels[KERNEL_ROUND_Q], &round, pipeline);
    return which >= UNITS ? make_units(attn, which, pipeline) : make_attend(attn, which, pipeline);
}

bool za_need_buffer(struct za_attn *attn, int which, uint64_t bytes) {
    static const char *const names[SCRATCH] = {"work", "q", "rows", "out", "states", "q", "out"};
    struct buffer *buffer = &attn->scratch[which];
    uint64_t limit = attn->device->properties.limits.maxStorageBufferRange, size = 256;
    if (bytes <= buffer->size && buffer->handle) return true;
    while (size < bytes) size *= 2;
    if (bytes <= limit && limit < size) size = limit / 4 * 4;
    za_buffer_free(attn->device, buffer);
    return za_buffer_make(attn->device, size, which < STATES, names[which], buffer);
}

/* --- where pages lie --------------------------------------------------------------------------------- */

/* Bytes from a row to the next; 0 of tiles. */
static uint32_t stride_bytes(const struct za_cache *cache, bool of_v) {
    const struct shape *shape = &cache->attn->shape;
    return of_v && !shape->latent ? shape->v.stride : shape->k.stride;
}

uint64_t za_page_step(const struct za_cache *cache, bool of_v) {
    const struct shape *shape = &cache->attn->shape;
    uint64_t stride = stride_bytes(cache, of_v);
    if (stride) return stride * shape->page_size * cache->steps.token;
    return of_v && !shape->latent ? shape->v_page_bytes : shape->k_page_bytes;
}

/* The product. A product that is too large for a uint64 becomes a quarter of the largest uint64, or more. */
static uint64_t times(uint64_t a, uint64_t b) { return a && b > UINT64_MAX / 4 / a ? UINT64_MAX / 4 : a * b; }

uint64_t za_pages_bytes(const struct za_cache *cache, bool of_v, uint64_t pages) {
    const struct shape *shape = &cache->attn->shape;
    uint32_t stride = stride_bytes(cache, of_v);
    if (!stride) return times(pages, za_page_step(cache, of_v));
    uint64_t rows = times(pages * shape->page_size - 1, cache->steps.token) +
                    (uint64_t)(shape->kv_heads - 1) * cache->steps.head + 1;
    return (times(rows, stride) + 3) / 4 * 4;
}

struct layer za_layer_of(const struct za_cache *cache, uint32_t layer) {
    return (struct layer){
        .first_page = layer * cache->stride,
        .steps = cache->steps,
        .scales = cache->scales ? cache->scales + (size_t)layer * cache->attn->shape.scale_words : NULL,
    };
}
