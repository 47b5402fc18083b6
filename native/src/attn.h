/* The members of the library's objects. */
#pragma once
#include "objects.h"
#include "work.h"

/* Pass 1 has a pipeline for each sum of these flags. They say how scores are changed, whether a workgroup has more than
   MAX_HEADS_PER_WORKGROUP heads or has several rows, and whether some item has several nodes. */
enum { CAPPED = 1, MASKED = 2, MANY_HEADS = 4, TOGETHER = 8, WALKS = 16, BIASED = 32 }; /* BIASED * biases */
enum { APPEND, MERGE, ROUND, ATTEND, UNITS = ATTEND + (BIASED << BIASES) };
/* By matrix units it has one for each sum of CAPPED, MASKED, the doublings of LEAST_VECTORS and the biases. */
enum { DOUBLED = 4, UNITS_BIASED = 16, PIPELINES = UNITS + (UNITS_BIASED << BIASES) };

/* Buffers of a call. In za_run the host fills or reads WORK, Q, ROWS and OUT. FILLED and RESULT hold q and the
   results if the host's places have another layout. FILLED also holds the rounded q of ZA_INTEGER. */
enum { WORK, Q, ROWS, OUT, STATES, FILLED, RESULT, SCRATCH };

struct za_attn {
    struct za_device *device;
    struct shape shape;
    uint32_t arithmetic; /* attend's constant */
    bool units;          /* matrix units attend many rows */
    struct pipeline pipelines[PIPELINES];
    struct buffer scratch[SCRATCH]; /* of a call that waits; they grow */
    struct sets sets;               /* of its dispatches */
    struct za_trace trace;
    atomic_uint caches, prepared; /* numbers of caches and prepared calls that are not freed */
};

struct za_cache {
    struct za_attn *attn;
    uint32_t layers, pages, stride; /* pages of a layer, and from a layer to the next */
    struct row_steps steps;         /* of rows; 0 of tiles */
    struct za_place k, v;           /* (layers, stride, words of a page); v is k where the shape is latent */
    struct buffer own_k, own_v;     /* memory of the library's */
    float *scales;                  /* (layers, 2, kv_heads), K's and V's; NULL where no type has them */
    double largest_k;               /* the largest magnitude of K that za_run appended */
};

/* The numbers of the pipelines of pass 1 for a call, for its shared items, and for items by matrix units. */
int za_attend_of(const struct za_attn *attn, const struct counts *counts, bool softcap);
int za_shared_of(int attend);
int za_attend_by_units(const struct counts *counts, bool softcap, uint32_t vectors);
uint32_t za_vectors_of(const struct za_attn *attn, int attend); /* query vectors of its workgroups */
bool za_need_pipeline(struct za_attn *attn, int which);

/* A buffer of at least `bytes`: the next power of two, so that calls that grow need few. host: see za_buffer_make. */
bool za_need_buffer(struct za_attn *attn, int which, uint64_t bytes);

/* Where a layer's K and V lie in the buffers of the whole cache. */
struct layer za_layer_of(const struct za_cache *cache, uint32_t layer);

/* Bytes of K (or V) from a page to the next, and bytes of `pages` consecutive pages. */
uint64_t za_page_step(const struct za_cache *cache, bool of_v);
uint64_t za_pages_bytes(const struct za_cache *cache, bool of_v, uint64_t pages);
