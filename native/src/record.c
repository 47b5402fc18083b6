/* The recording of a call's commands, and the places that they use. */
#include "record.h"

#include "check.h"
#include "error.h"
#include "levels.h"

enum { COPIES = 64 }; /* regions of a copy command */

enum { COMPUTE = VK_PIPELINE_STAGE_COMPUTE_SHADER_BIT, COPY_STAGE = VK_PIPELINE_STAGE_TRANSFER_BIT };

/* --- copies ------------------------------------------------------------------------------------------ */

void za_copy_rows(const struct za_device *device, VkCommandBuffer commands, struct za_place from, uint64_t from_step,
                  struct za_place to, uint64_t to_step, uint64_t bytes, uint64_t n) {
    VkBufferCopy regions[COPIES];
    if (from_step == bytes && to_step == bytes) bytes *= n, n = n ? 1 : 0;
    for (uint64_t i = 0; i < n;) {
        uint32_t count = 0;
        for (; count < COPIES && i < n; ++count, ++i)
            regions[count] = (VkBufferCopy){from.offset + i * from_step, to.offset + i * to_step, bytes};
        device->vk.CmdCopyBuffer(commands, from.buffer, to.buffer, count, regions);
    }
}

/* Copy q (rows, q_heads, head_dim) to (rows, q_heads, k_dim), with zeros after head_dim. */
static void record_fill(const struct za_attn *attn, VkCommandBuffer commands, uint64_t rows, const struct za_place *q,
                        const struct za_place *filled) {
    const struct shape *shape = &attn->shape;
    const struct za_device *device = attn->device;
    device->vk.CmdFillBuffer(commands, filled->buffer, filled->offset, filled->size, 0);
    za_barrier(device, commands, COPY_STAGE, VK_ACCESS_TRANSFER_WRITE_BIT, COPY_STAGE, VK_ACCESS_TRANSFER_WRITE_BIT);
    za_copy_rows(device, commands, *q, 4 * (uint64_t)shape->head_dim, *filled, 4 * (uint64_t)shape->k_dim,
                 4 * (uint64_t)shape->head_dim, rows * shape->q_heads);
    za_barrier(device, commands, COPY_STAGE, VK_ACCESS_TRANSFER_WRITE_BIT, COMPUTE, VK_ACCESS_SHADER_READ_BIT);
}

/* Copy out (rows, q_heads, v_dim) and lse after it to the host's places. */
static void record_results(const struct za_attn *attn, VkCommandBuffer commands, uint64_t rows,
                           const struct za_place *result, const struct za_places *places) {
    const struct shape *shape = &attn->shape;
    const struct za_device *device = attn->device;
    uint64_t n = rows * shape->q_heads, size = 4 * (uint64_t)shape->v_head_dim, filled = 4 * (uint64_t)shape->v_dim;
    struct za_place lse = {.buffer = result->buffer, .offset = result->offset + n * filled};
    za_barrier(device, commands, COMPUTE, VK_ACCESS_SHADER_WRITE_BIT, COPY_STAGE, VK_ACCESS_TRANSFER_READ_BIT);
    za_copy_rows(device, commands, *result, filled, places->out, size, size, n);
    if (places->lse.buffer) za_copy_rows(device, commands, lse, 4, places->lse, 4, 4, n);
}

/* --- a call ------------------------------------------------------------------------------------------ */

bool za_record_call(struct za_attn *attn, VkCommandBuffer commands, struct sets *sets, const struct laid *laid,
                    const struct bindings *b, const struct za_places *places) {
    struct za_device *device = attn->device;
    const uint64_t rows = laid->counts.rows;
    const bool rounds = rows && attn->arithmetic == INTEGER_SUMS;
    struct za_command list[1 + CALL_COMMANDS];
    int n = rounds;
    if (rounds) list[0] = za_round_q(attn, rows, b->unrounded_q, b->q);
    n += za_laid_commands(attn, laid, b, list + n);
    za_barrier_before(device, commands);
    if (rows && !rounds && places && places->q.buffer != b->q.buffer)
        record_fill(attn, commands, rows, &places->q, &b->q);
    struct levels levels = {0};
    bool ok = true;
    for (int i = 0; i < n && ok; ++i) {
        const uint32_t last = levels.last;
        ok = za_level(&levels, &list[i], last);
        if (list[i].level > last) za_barrier_between(device, commands, &list[i]);
        ok = ok && za_dispatch(device, commands, sets, &list[i]);
    }
    za_levels_free(&levels);
    if (!ok) return false;
    if (rows && places && places->out.buffer != b->out.buffer) record_results(attn, commands, rows, &b->out, places);
    za_barrier_after(device, commands);
    return true;
}

/* --- places ------------------------------------------------------------------------------------------ */

bool za_check_places(const struct za_cache *cache, const struct za_places *places, uint64_t rows, uint64_t new_rows,
                     bool *filled, bool *result) {
    const struct shape *shape = &cache->attn->shape;
    const struct za_device *device = cache->attn->device;
    const bool rounded = cache->attn->arithmetic == INTEGER_SUMS;
    static const char *const names[] = {"rows", "q", "out", "lse", "k", "v"};
    const struct za_place *const all[] = {&places->rows, &places->q, &places->out, &places->lse, &cache->k, &cache->v};
    uint64_t n = rows * shape->q_heads, out = 4 * n * shape->v_head_dim, lse = places->lse.buffer ? 4 * n : 0;
    const uint64_t bytes[] = {za_rows_bytes(shape, new_rows), 4 * n * shape->head_dim, out, lse, cache->k.size,
                              shape->latent ? 0 : cache->v.size};
    *filled = rounded || shape->k_dim != shape->head_dim;
    *result = shape->v_dim != shape->v_head_dim || places->lse.buffer != places->out.buffer ||
              places->lse.offset != places->out.offset + out ||
              out + lse > device->properties.limits.maxStorageBufferRange;
    if (new_rows && !za_check_place(device, "rows", &places->rows, bytes[0], true)) return false;
    if (!rows) return za_check_apart(names, all, bytes, 6);
    return za_check_place(device, "q", &places->q, bytes[1], rounded || !*filled) &&
           za_check_place(device, "out", &places->out, out, !*result) &&
           (!lse || za_check_place(device, "lse", &places->lse, lse, false)) &&
           za_check_apart(names, all, bytes, 6);
}

struct bindings za_bound(const struct za_attn *attn, const struct za_places *places, uint64_t rows, uint64_t new_rows) {
    struct bindings b = {.rows = places->rows, .q = places->q, .out = places->out, .unrounded_q = places->q};
    b.rows.size = za_rows_bytes(&attn->shape, new_rows);
    b.unrounded_q.size = 4 * rows * attn->shape.q_heads * attn->shape.head_dim;
    b.q.size = za_q_bytes(&attn->shape, rows);
    b.out.size = za_out_bytes(&attn->shape, rows);
    return b;
}
