#include "shape.h"

#include "error.h"

enum { PAGE_SIZE = 256, COMPUTE_UNITS = 64, MAX_STRIDE = 1 << 16 };

/* --- what is refused --------------------------------------------------------------------------------- */

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
    if ((uint32_t)o->arithmetic > ZA_INTEGER)
        return za_fail("options: got arithmetic %d, expected a za_arithmetic, %d to %d", (int)o->arithmetic,
                       ZA_CANONICAL, ZA_INTEGER);
    const struct storage_type *k = &za_storage[o->dtype], *v = &za_storage[o->v_dtype];
    return o->arithmetic != ZA_INTEGER || (k->halves == 1 && v->halves == 1) ||
           za_fail("options: got dtype %s and v_dtype %s with ZA_INTEGER, expected q8_0, q5_0, q4_0 or iq4_nl, whose "
                   "values are an integer times the scale of a block", k->name, v->name);
}

static bool check_limits(const struct za_options *o) {
    uint32_t page = o->page_size;
    if (page > MAX_PAGE_SIZE || (page & (page - 1)))
        return za_fail("options.page_size: got %u, expected a power of two up to %d", page, MAX_PAGE_SIZE);
    if (o->q_heads <= MAX_Q_HEADS && o->q_heads % o->kv_heads == 0 && o->head_dim <= MAX_HEAD_DIM &&
        o->v_head_dim <= MAX_HEAD_DIM)
        return true;
    return za_fail("options: got shape %u/%u/%u/%u, expected at most %d query heads, a multiple of the KV heads, and "
                   "head sizes up to %d", o->q_heads, o->kv_heads, o->head_dim, o->v_head_dim, MAX_Q_HEADS,
                   MAX_HEAD_DIM);
}

/* rows: K and V lie in rows. A stride of 0 in the options means rows without gaps. */
static struct sizes sizes_of(const struct za_options *o, bool cpu, struct registers registers, bool rows) {
    struct sizes s = {
        .q_heads = o->q_heads,
        .kv_heads = o->kv_heads,
        .head_dim = o->head_dim,
        .v_head_dim = o->v_head_dim,
        .latent = o->latent,
        .page_size = o->page_size,
        .k_storage = o->dtype - 1,
        .v_storage = o->v_dtype - 1,
        .nhd = rows,
        .compute_units = o->compute_units,
        .cpu = cpu,
        .lanes = registers.lanes,
        .chunks = registers.chunks,
        .rows_ahead = registers.rows_ahead,
        .pass_sums = registers.pass_sums,
        .sums = registers.sums,
        .k_stride = o->k_stride,
        .v_stride = o->v_stride,
    };
    za_sizes(&s);
    return s;
}

static bool check_stride(const char *name, enum za_dtype dtype, uint64_t least, uint32_t stride) {
    if (stride >= least && stride <= MAX_STRIDE && stride % 2 == 0) return true;
    return za_fail("options.%s: got %u, expected a multiple of 2 from %llu, the bytes of a row of %s, to %d", name,
                   stride, (unsigned long long)least, za_storage[dtype].name, MAX_STRIDE);
}

static bool check_strides(const struct za_options *o) {
    struct za_options without_gaps = *o;
    without_gaps.k_stride = without_gaps.v_stride = 0;
    const struct sizes least = sizes_of(&without_gaps, false, (struct registers){0}, true);
    if (o->latent && o->v_stride != o->k_stride)
        return za_fail("options.v_stride: got %u for a latent shape, expected 0, since its V is part of its K",
                       o->v_stride);
    return (!o->k_stride && !o->v_stride) || (check_stride("k_stride", o->dtype, least.k_stride, o->k_stride) &&
                                              check_stride("v_stride", o->v_dtype, least.v_stride, o->v_stride));
}

/* --- the numbers ------------------------------------------------------------------------------------- */

static void take(const struct za_options *o, const struct sizes *s, struct shape *shape) {
    const uint64_t rows = s->page_size * s->kv_heads;
    const bool scales = za_storage[o->dtype].head_scale || za_storage[o->v_dtype].head_scale;
    *shape = (struct shape){
        .q_heads = o->q_heads,
        .kv_heads = o->kv_heads,
        .head_dim = o->head_dim,
        .v_head_dim = o->v_head_dim,
        .k_dim = (uint32_t)s->k_dim,
        .v_dim = (uint32_t)s->v_dim,
        .page_size = o->page_size,
        .latent = o->latent,
        .scale_words = scales ? 2 * o->kv_heads : 0,
        .k_page_bytes = s->nhd ? rows * s->k_stride : 4 * s->k_page_words,
        .v_page_bytes = o->latent ? 0 : s->nhd ? rows * s->v_stride : 4 * s->v_page_words,
        .k = {o->dtype, o->head_dim, (uint32_t)s->k_dim, (uint32_t)s->k_values, (uint32_t)s->k_scales, o->k_stride},
        .sizes = *s,
    };
    shape->v.dtype = o->v_dtype;
    if (!o->latent)
        shape->v = (struct row_part){o->v_dtype, o->v_head_dim, (uint32_t)s->v_dim, (uint32_t)s->v_values,
                                     (uint32_t)s->v_scales, o->v_stride};
}

bool za_shape(const struct za_options *options, bool cpu, struct registers registers, struct shape *shape) {
    struct za_options o = *options;
    if (!o.v_head_dim) o.v_head_dim = o.head_dim;
    if (o.v_dtype == ZA_AS_K) o.v_dtype = o.dtype;
    if (o.latent && !o.v_stride) o.v_stride = o.k_stride;
    if (!o.page_size) o.page_size = PAGE_SIZE;
    if (!o.compute_units) o.compute_units = COMPUTE_UNITS;
    if (!check_options(&o) || !check_limits(&o) || !check_strides(&o)) return false;
    const struct sizes sizes = sizes_of(&o, cpu, registers, o.k_stride != 0);
    take(&o, &sizes, shape);
    return true;
}

uint64_t za_q_bytes(const struct shape *shape, uint64_t rows) { return 4 * rows * shape->q_heads * shape->k_dim; }

uint64_t za_out_bytes(const struct shape *shape, uint64_t rows) {
    return 4 * rows * shape->q_heads * (shape->v_dim + 1);
}

uint64_t za_rows_bytes(const struct shape *shape, uint64_t new_rows) { return 4 * new_rows * shape->sizes.token_words; }

/* --- workgroups of pass 1 ---------------------------------------------------------------------------- */

/* How many query vectors, at most `most`, have sums that fit in a wave's registers. */
static uint64_t vectors(const struct sizes *s, uint64_t most) {
    return za_min(most, za_max(1, s->sums / WAVE / s->value_slice));
}

uint32_t za_heads_together(const struct sizes *s, uint64_t items, uint32_t shared_bytes) {
    const uint64_t more = vectors(s, SHARED_VECTORS);
    bool pays = s->group > MAX_HEADS_PER_WORKGROUP &&
                items * s->kv_heads * za_ceil_div(s->group, more) >= s->compute_units;
    uint64_t most = pays && za_shared_bytes(s, more) <= shared_bytes ? more : vectors(s, MAX_HEADS_PER_WORKGROUP);
    return (uint32_t)za_ceil_div(s->group, za_ceil_div(s->group, most));
}

uint32_t za_rows_together(const struct sizes *s, uint32_t shared_bytes) {
    /* A CPU keeps the sums of more vectors in memory. */
    const uint64_t most[] = {s->cpu ? MAX_HEADS_PER_WORKGROUP : SHARED_VECTORS, MAX_HEADS_PER_WORKGROUP};
    for (int i = 0; i < 2; ++i) {
        uint64_t rows = za_min(vectors(s, most[i]) / s->group, SHARED_ADDRESSES / (s->group + 1));
        if (rows > 1 && za_shared_bytes(s, rows * s->group) <= shared_bytes) return (uint32_t)rows;
    }
    return 1;
}

uint32_t za_units_vectors(const struct sizes *s, const VkPhysicalDeviceLimits *limits, uint32_t mat_m,
                          uint64_t vectors) {
    const uint64_t invocations = za_min(limits->maxComputeWorkGroupInvocations, limits->maxComputeWorkGroupSize[0]);
    uint32_t most = 0;
    for (uint32_t n = LEAST_VECTORS; n <= MOST_VECTORS && most < vectors; n *= 2)
        if (za_units_fit(s, n, mat_m, limits->maxComputeSharedMemorySize, invocations)) most = n;
    return most;
}

uint32_t za_lanes(const struct sizes *s, uint64_t served) {
    const bool even = s->v_dim / s->value_slice % s->lanes == 0;
    const bool one_pass = served * s->value_slice * WAVE <= s->pass_sums;
    return even && one_pass ? (uint32_t)s->lanes : WAVE;
}
