/* The recording of a call, which za_run and prepared calls share, and its places. */
#pragma once
#include "attn.h"
#include "laid.h"

/* Record a call, with barriers before, between and after its commands. If b->q is not the host's place, q is first
   copied or rounded there. Then come append, attend and merge. If b->out is not the host's place, the results are
   copied there. places NULL: nothing is copied. `laid` is the call's layout, whose pipelines exist. */
bool za_record_call(struct za_attn *attn, VkCommandBuffer commands, struct sets *sets, const struct laid *laid,
                    const struct bindings *b, const struct za_places *places);

/* Check the places of a call on a cache. *filled: kernels cannot read q in the host's place, and need za_q_bytes of the
   library's memory. *result: kernels cannot write out and lse in the host's places, and need za_out_bytes. */
bool za_check_places(const struct za_cache *cache, const struct za_places *places, uint64_t rows, uint64_t new_rows,
                     bool *filled, bool *result);

/* The places that kernels bind if they use the host's rows, q and out. */
struct bindings za_bound(const struct za_attn *attn, const struct za_places *places, uint64_t rows, uint64_t new_rows);

/* Copy n rows of `bytes` each, from_step and to_step apart. */
void za_copy_rows(const struct za_device *device, VkCommandBuffer commands, struct za_place from, uint64_t from_step,
                  struct za_place to, uint64_t to_step, uint64_t bytes, uint64_t n);
