/* What a call may be. Every function that returns false has said why, see error.h. */
#ifndef CHECK_H
#define CHECK_H

#include "gpu.h"
#include "manifest.h"
#include "zinc_attn.h"

/* The numbers of a call, its page table, and the values of q, sinks, slopes and masks. layers, pages: of the cache. */
bool za_check_call(const struct manifest *m, const struct shape *shape, const struct za_call *call, uint32_t layers,
                   uint32_t pages);

/* That no score overflows float32. largest_k: magnitude of any K that the cache was given. */
bool za_check_scores(const struct manifest *m, const struct shape *shape, const struct za_call *call,
                     double largest_k);

/* That the device takes as many workgroups. items: item records. */
bool za_check_groups(const struct gpu *gpu, const struct za_call *call, uint32_t items);

#endif
