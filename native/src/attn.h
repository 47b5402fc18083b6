/* What the library's objects hold, and the recording of a call, which za_run and prepared calls share. */
#ifndef ATTN_H
#define ATTN_H

#include "device.h"
#include "laid.h"
#include "shape.h"
#include "objects.h"
#include "work.h"
#include "zinc_attn.h"

/* Pass 1 has a pipeline for each sum of the flags: what becomes of scores, whether a workgroup has more than
   MAX_HEADS_PER_WORKGROUP heads, or several rows, and whether some item has several nodes. */
enum { CAPPED = 1, MASKED = 2, MANY_HEADS = 4, TOGETHER = 8, WALKS = 16, BIASED = 32 }; /* BIASED * biases */
enum { APPEND, MERGE, ATTEND, PIPELINES = ATTEND + (BIASED << BIASES) };

/* Memory of a call. The host fills or reads the first ones of za_run; FILLED and RESULT take q and results where they
   are laid out otherwise in the host's places. */
enum { WORK, Q, ROWS, OUT, STATES, FILLED, RESULT, SCRATCH };

struct za_attn {
    struct za_device *device;
    struct shape shape;
    uint32_t arithmetic; /* attend's constant */
    struct pipeline pipelines[PIPELINES];
    struct buffer scratch[SCRATCH]; /* of a call that waits; they grow */
    struct sets sets;               /* of its dispatches */
    struct za_trace trace;
    atomic_uint caches, prepared; /* that were made from it and are not freed */
};

struct za_cache {
    struct za_attn *attn;
    uint32_t layers, pages, stride; /* pages of a layer, and from a layer to the next */
    struct row_steps steps;         /* of rows; 0 of tiles */
    struct za_place k, v;           /* (layers, stride, words of a page); v is k where the shape is latent */
    struct buffer own_k, own_v;     /* memory of the library's */
    float *scales;                  /* (layers, 2, kv_heads), K's and V's; NULL where no type has them */
    double largest_k;               /* of what za_run appended */
};

/* Record a call with barriers before, between and behind its commands: what lays out q as the kernels take it (where
   b->q is not the host's place), append, attend, merge, and copies to the host's places (where b->out is not its place;
   places NULL: none). `laid` says what the dispatches are for; the pipelines are there. */
bool za_record_call(struct za_attn *attn, VkCommandBuffer commands, struct sets *sets, const struct laid *laid,
                    const struct bindings *b, const struct za_places *places);

/* Bytes of a call's buffers, by rows and new rows. */
uint64_t za_q_bytes(const struct shape *shape, uint64_t rows);       /* as the kernels take it */
uint64_t za_out_bytes(const struct shape *shape, uint64_t rows);     /* out, then lse, as they write them */
uint64_t za_rows_bytes(const struct shape *shape, uint64_t new_rows);

/* Check the places of a call on a cache, and say where kernels cannot use them as they are: *filled for q and
   *result for out and lse, which are then in memory of the library's, of za_q_bytes and za_out_bytes. */
bool za_check_places(const struct za_cache *cache, const struct za_places *places, uint64_t rows, uint64_t new_rows,
                     bool *filled, bool *result);

/* What kernels bind where they use rows, q and out as they are. */
struct bindings za_bound(const struct za_attn *attn, const struct za_places *places, uint64_t rows, uint64_t new_rows);

/* The pipeline of pass 1 for a call, and that of its shared items. */
int za_attend_of(const struct za_attn *attn, const struct counts *counts, bool softcap);
int za_shared_of(int attend);
uint32_t za_vectors_of(const struct za_attn *attn, int attend); /* query vectors of its workgroups */
bool za_need_pipeline(struct za_attn *attn, int which);

/* A buffer of at least `bytes`: the next power of two, so that calls that grow need few. host: see za_buffer_make. */
bool za_need_buffer(struct za_attn *attn, int which, uint64_t bytes);

/* Where a layer's calls find its values, in the buffers of the whole cache. */
struct layer za_layer_of(const struct za_cache *cache, uint32_t layer);

/* Bytes of K (or V) from a page to the next, and of `pages` pages that follow each other. */
uint64_t za_page_step(const struct za_cache *cache, bool of_v);
uint64_t za_pages_bytes(const struct za_cache *cache, bool of_v, uint64_t pages);

/* Copy n rows of `bytes` each, from_step and to_step apart. */
void za_copy_rows(const struct za_device *device, VkCommandBuffer commands, struct za_place from, uint64_t from_step,
                  struct za_place to, uint64_t to_step, uint64_t bytes, uint64_t n);

#endif
