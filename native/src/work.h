/* The layout of a call, and the words of its work buffer: header, item records, row records, append records, page ids,
   head records, masks. docs/c-hosts.md goes through them with numbers. */
#pragma once
#include "shape.h"
#include "zinc_attn.h"

/* Who computes what of a request; never shows in the bits. A split is whole nodes, and a row has a state for each node.
   first_node: the lowest one that some row sees; nodes: from there on. */
struct layout {
    uint32_t splits, first_node, nodes;
};

/* Records and tables of a call, or room for them. */
struct counts {
    uint64_t items, shared; /* shared: of several rows, at most rows_each */
    uint64_t rows, new_rows, pages, masks, states; /* pages, masks: words */
    uint64_t keys;                                 /* that rows see, over all rows */
    uint32_t rows_each;
    uint32_t biases;  /* attend's constant */
    bool lse;         /* is written behind out */
    bool single_pass; /* every row has one state, and pass 1 writes the output */
    bool walks;       /* some item has several nodes */
};

/* Words where the parts of a work buffer begin. Shared items have a header before them, and both lie before all else,
   in `base` words; the words of the other parts count from there. */
struct parts {
    uint64_t base, rows, appends, pages, heads, mask, end;
};

/* How a call, or every call of a prepared one, is laid out. */
struct rule {
    uint32_t fixed_splits; /* of a prepared call: at most so many, instead of the split rule; 0: it */
    uint32_t rows_each;    /* rows that may attend keys together; 0 and 1: each alone */
    uint32_t most_shared;  /* items that these may have */
    bool fused;            /* the arithmetic */
};

/* Of K and V as rows: from a token to the next, and from a KV head to the next. */
struct row_steps {
    uint32_t token, head;
};

/* What a layer's words have of their own: where it begins in the buffers that are bound, and the scales of its heads
   (2, kv_heads), K's and V's, NULL where no type has them. */
struct layer {
    uint32_t first_page;
    struct row_steps steps; /* 0 of tiles */
    const float *scales;
};

double za_scale(const struct shape *shape, const struct za_call *call); /* of the scores */
const float *za_slopes(const struct za_call *call, int bias);           /* (q_heads) of a bias, NULL: none */

/* Rows, new rows, pages and masks of a call alone, which need no layout. */
struct counts za_totals(const struct shape *shape, const struct za_call *call);
struct counts za_counts(const struct shape *shape, const struct za_call *call,
                        struct rule rule);
struct parts za_parts(const struct shape *shape, const struct counts *counts);
struct layout za_layout(const struct shape *shape, const struct za_call *call,
                        const struct za_request *request, struct rule rule);

/* Write a call's words into parts that have room for it. `room` is what the recorded dispatches are for: results are
   laid out for its rows, and records behind the call's own are made to do nothing. */
void za_work_write(const struct shape *shape, const struct za_call *call, struct rule rule,
                   const struct counts *room, const struct layer *layer, uint32_t *work);
