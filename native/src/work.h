/* The layout of a call, and the words of its work buffer: header, item records, row records, append records, page ids,
   head records, masks. docs/c-hosts.md goes through them with numbers. */
#pragma once
#include "shape.h"
#include "zinc_attn.h"

/* How a request is divided; the division does not change the bits. A split is whole nodes, and a row has a state for
   each node. first_node: the lowest node that some row sees; nodes: the number of nodes from first_node on. */
struct layout {
    uint32_t splits, first_node, nodes;
};

/* Numbers of records and of table words that a call has, or has room for. */
struct counts {
    uint64_t items, shared; /* shared: items of several rows (at most rows_each), or by matrix units */
    uint64_t rows, new_rows, pages, masks, states; /* pages, masks: words */
    uint64_t keys; /* keys that rows see, summed over all rows; by matrix units MATRIX_GAIN keys count as one */
    uint32_t rows_each;
    uint32_t biases;  /* attend's constant */
    bool lse;         /* lse is written after out */
    bool single_pass; /* every row has one state, or one workgroup for all of its keys: pass 1 writes the output */
    bool walks;       /* some item has several nodes */
};

/* The words at which the parts of a work buffer begin. Shared items and their header come first and take `base` words.
   The words of the other parts count from `base`. */
struct parts {
    uint64_t base, rows, appends, pages, heads, mask, end;
};

/* How a call, or every step of a prepared call, is laid out. */
struct rule {
    uint32_t fixed_splits; /* the most splits of a request of a prepared call; 0: the split rule decides */
    uint32_t rows_each;    /* how many rows may attend keys together; 0 and 1: each row attends alone */
    uint32_t most_shared;  /* the most items of such rows */
    bool fused;            /* the arithmetic */
    uint32_t units;        /* query vectors of a workgroup with matrix units; 0: no request is for them */
    bool whole;            /* each item has all keys of its rows, because such items are enough workgroups */
};

/* For K and V in rows: rows from a token to the next, and from a KV head to the next. */
struct row_steps {
    uint32_t token, head;
};

/* The numbers of a layer in the words: where the layer begins in the bound buffers, and the scales of its heads
   (2, kv_heads), K's and V's. scales NULL: no type has scales of heads. */
struct layer {
    uint32_t first_page;
    struct row_steps steps; /* 0 of tiles */
    const float *scales;
};

double za_scale(const struct shape *shape, const struct za_call *call); /* of the scores */
const float *za_slopes(const struct za_call *call, int bias);           /* (q_heads) of a bias, NULL: none */

/* Whether a request has enough rows for matrix units, and a call enough workgroups by units for `rule.whole`. */
bool za_many(const struct shape *shape, const struct za_request *request);
bool za_walks(const struct shape *shape, const struct za_call *call, struct rule rule);

/* The rows, new rows, pages and masks of a call. The other counts need a layout and stay 0. */
struct counts za_totals(const struct shape *shape, const struct za_call *call);
struct counts za_counts(const struct shape *shape, const struct za_call *call, struct rule rule);
struct parts za_parts(const struct shape *shape, const struct counts *counts);
struct layout za_layout(const struct shape *shape, const struct za_call *call, const struct za_request *request,
                        struct rule rule);

/* Write a call's words into parts that have room for it. The recorded dispatches are for `room`: results are laid
   out for its rows, and records after the call's own records do nothing. */
void za_work_write(const struct shape *shape, const struct za_call *call, struct rule rule, const struct counts *room,
                   const struct layer *layer, uint32_t *work);
