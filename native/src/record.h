/* The recording of a call, which za_run and prepared calls share, and the places that it uses. */
#pragma once
#include "attn.h"
#include "laid.h"

/* Record a call with barriers before, between and behind its commands: what lays out q as the kernels take it (where
   b->q is not the host's place), append, attend, merge, and copies to the host's places (where b->out is not its place;
   places NULL: none). `laid` says what the dispatches are for; the pipelines are there. */
bool za_record_call(struct za_attn *attn, VkCommandBuffer commands, struct sets *sets, const struct laid *laid,
                    const struct bindings *b, const struct za_places *places);

/* Check the places of a call on a cache, and say where kernels cannot use them as they are: *filled for q and
   *result for out and lse, which are then in memory of the library's, of za_q_bytes and za_out_bytes. */
bool za_check_places(const struct za_cache *cache, const struct za_places *places, uint64_t rows, uint64_t new_rows,
                     bool *filled, bool *result);

/* What kernels bind where they use rows, q and out as they are. */
struct bindings za_bound(const struct za_attn *attn, const struct za_places *places, uint64_t rows, uint64_t new_rows);

/* Copy n rows of `bytes` each, from_step and to_step apart. */
void za_copy_rows(const struct za_device *device, VkCommandBuffer commands, struct za_place from, uint64_t from_step,
                  struct za_place to, uint64_t to_step, uint64_t bytes, uint64_t n);
