/* The layout of a call, and the words of its work buffer: header, item records, row records, append records, page ids,
   sinks, ALiBi slopes, scales of heads, masks. docs/c-hosts.md goes through them with numbers. */
#ifndef WORK_H
#define WORK_H

#include "manifest.h"
#include "zinc_attn.h"

/* Who computes what; never shows in the bits. A unit is the keys of one state: a leaf, or a node of leaves. */
struct layout {
    uint32_t begin;  /* lowest key that some row sees */
    uint32_t splits; /* pieces of the keys from there on, each for a workgroup per row and KV head */
    uint32_t leaves_per_state;
    uint32_t first_leaf, first_unit; /* those that hold key `begin` */
    uint32_t units;                  /* the leaves that some row sees, in units counted from first_leaf */
    uint32_t states_per_row, items;
    bool fixed;       /* the caller chose the number of splits */
    bool single_pass; /* a row has one state, and pass 1 writes the output */
    bool loop;        /* some item has several leaves */
};

/* The layout of a call that attends, on a device of a kind ("gpu" or "cpu"). */
struct layout za_layout(const struct manifest *m, const struct shape *shape, const struct za_call *call, bool cpu);

uint64_t za_work_words(const struct manifest *m, const struct shape *shape, const struct za_call *call,
                       const struct layout *layout);

/* first_page: where the layer begins in K and V. scales: (2, kv_heads) of the layer, K's and V's, NULL where no type
   has them. A call with q_len 0 has the empty layout and appends only. */
void za_work_write(const struct manifest *m, const struct shape *shape, const struct za_call *call,
                   const struct layout *layout, uint32_t first_page, const float *scales, uint32_t *work);

/* The work buffer that copies `pairs` pages: page source[i] of the K and V buffers to page target[i], with step pages
   from one pair to the next. */
uint64_t za_copy_words(const struct manifest *m, uint32_t pairs);
void za_copy_write(const struct manifest *m, uint32_t source, uint32_t target, uint32_t step, uint32_t pairs,
                   uint32_t *work);

#endif
