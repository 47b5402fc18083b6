/* The codec of K and V: the values of new tokens become rows, as the append kernel takes them.

   A row is one token's K and V of one KV head, in uint32 words: K values, V values, K scales, V scales. Values lie one
   behind the other in their storage type, the first in the lowest bits. Scales exist for q8_0 alone: a float16 for each
   32 head dimensions, two a word, the last word filled up with 0.

   q8_0: of the 32 values x of a block, step = max|x| / 127; q is x * (1 / step) to the nearest, ties away from zero,
   and 0 where step is 0; d is step as float16, to the nearest, ties to even. Every operation rounds to float32, and a
   stored value is q * d: equal rows give ggml's bytes.

   Values: f32, bf16 and q8_0 take magnitudes up to 2**60, those below 2**-40 count as 0; q8_0 takes at most
   127 * 65504; f16 takes every finite float16. This file and rows.c depend on nothing but error.h. */
#ifndef ROWS_H
#define ROWS_H

#include <stdbool.h>
#include <stdint.h>

#include "zinc_attn.h"

/* K, or V, of a row. */
struct row_part {
    uint32_t dims, value_words, scale_words;
};

struct row_format {
    enum za_dtype dtype;
    uint32_t kv_heads;
    struct row_part k, v;
    float min_input, max_input;        /* 2**-40 and 2**60 */
};

/* A float as the kernels take it: a magnitude below min_input becomes +0. */
float za_flushed(float min_input, float x);

/* The words that K (or V) of a row has by its dtype and size; false where the dtype does not take the size. */
bool za_row_words(enum za_dtype dtype, uint32_t dims, struct row_part *part);

/* Write `tokens` times kv_heads rows to `out`. k, v: (tokens, kv_heads, dims), float for f32 and q8_0, uint16_t for
   f16 and bf16, the bits of the values. `largest_k` becomes at least the largest magnitude of k. False for a value
   that is not taken. */
bool za_rows_encode(const struct row_format *format, const void *k, const void *v, uint32_t tokens, uint32_t *out,
                    double *largest_k);

#endif
