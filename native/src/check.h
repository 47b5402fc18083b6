/* Checks of calls, places and rooms. A function that returns false has set za_error (error.h). */
#pragma once
#include "device.h"
#include "shape.h"
#include "work.h"
#include "zinc_attn.h"

/* The numbers of a call, its page tables, and the values of sinks, slopes and masks. pages: of the cache. */
bool za_check_call(const struct shape *shape, const struct za_call *call, uint32_t pages);

/* The arrays of a call are there. counts: the call's. */
bool za_check_data(const struct shape *shape, const struct za_data *data, const struct counts *counts);

/* The values of q are valid, and no score overflows float32. largest_k: the largest magnitude of K in the cache. */
bool za_check_scores(const struct shape *shape, const struct za_call *call, const float *q,
                     uint64_t rows, double largest_k);

/* The device takes as many workgroups, and a uint32 counts as many words. */
bool za_check_counts(const struct za_device *device, const struct counts *counts, const struct parts *parts);

/* A place has `bytes` bytes. bound: a kernel binds it; otherwise it is copied. */
bool za_check_place(const struct za_device *device, const char *name, const struct za_place *place, uint64_t bytes,
                    bool bound);

/* The places, of bytes[i] bytes each, do not overlap. */
bool za_check_apart(const char *const names[], const struct za_place *const places[], const uint64_t bytes[], int n);

/* A step fits into the room of a prepared call. counts: the records and table words of the room. */
bool za_check_step(const struct za_room *room, const struct counts *counts, const struct shape *shape,
                   const struct za_call *call);
