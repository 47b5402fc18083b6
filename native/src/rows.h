/* The codec of K and V: the values of new tokens become rows, as the append kernel takes them.

   A row is one token's K and V of one KV head, in uint32 words: K values, V values, K scales, V scales. Values follow
   each other in their storage type, the first in the lowest bits. The scales are the float16 numbers of all blocks of
   the row, padded to a word, and then a word of fifth bits per block, if the type has fifth bits. Dimensions after
   head_dim count as 0. A cache in rows has other rows: the bytes of a row of K, padded to words, then the bytes of a
   row of V. These are values, or ggml's blocks.

   Values have magnitudes up to 2**60, and magnitudes below 2**-40 count as 0; f16 takes every finite float16, block
   types what za_storage says, fp8_e4m3 up to 448 times the scale of the head. The codec is rows.c, blocks.c and
   floats.c, which depend on nothing but the contract and error.h. */
#pragma once
#include <stdbool.h>
#include <stdint.h>

#include "zinc_attn.h"

/* K, or V, of a row. A latent shape has no V: all numbers are 0. */
struct row_part {
    enum za_dtype dtype;
    uint32_t dims, stored; /* dimensions of the host's values, and of tiles, which are padded with zeros */
    uint32_t value_words, scale_words;
    uint32_t stride; /* bytes from a row to the next; 0: tiles */
};

struct row_format {
    uint32_t kv_heads;
    struct row_part k, v;
};

/* New tokens. values: (tokens, kv_heads, dims), see struct za_call; scales: (kv_heads) of fp8_e4m3. */
struct new_rows {
    uint32_t tokens;
    bool encoded;
    const void *k, *v;
    const float *k_scales, *v_scales;
};

/* Write tokens times kv_heads rows to `out`. *largest_k becomes at least the largest magnitude of k. False: the type
   does not take a value. */
bool za_rows_encode(const struct row_format *format, const struct new_rows *rows, uint32_t *out, double *largest_k);
