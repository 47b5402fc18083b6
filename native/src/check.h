/* What calls, places and rooms may be. Every function that returns false has said why, see error.h. */
#pragma once
#include "device.h"
#include "shape.h"
#include "work.h"
#include "zinc_attn.h"

/* The numbers of a call, its page tables, and the values of sinks, slopes and masks. pages: of the cache. */
bool za_check_call(const struct shape *shape, const struct za_call *call, uint32_t pages);

/* That the arrays of a call are there. counts: the call's. */
bool za_check_data(const struct shape *shape, const struct za_data *data, const struct counts *counts);

/* The values of q, and that no score overflows float32. largest_k: magnitude of any K that the cache was given. */
bool za_check_scores(const struct shape *shape, const struct za_call *call, const float *q,
                     uint64_t rows, double largest_k);

/* That the device takes as many workgroups, and a uint32 as many words. */
bool za_check_counts(const struct za_device *device, const struct counts *counts, const struct parts *parts);

/* That a place holds `bytes`; bound: a kernel's buffer, else a copy's. */
bool za_check_place(const struct za_device *device, const char *name, const struct za_place *place, uint64_t bytes,
                    bool bound);

/* That places of `bytes` each lie apart from each other. */
bool za_check_apart(const char *const names[], const struct za_place *const places[], const uint64_t bytes[], int n);

/* What a step may be: at most the room of a prepared call, whose records and table words are `counts`. */
bool za_check_step(const struct za_room *room, const struct counts *counts, const struct shape *shape,
                   const struct za_call *call);
