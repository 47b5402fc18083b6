/* Block types: 32 consecutive dimensions that share a scale, quantized as ggml's reference procedure does it.

   Equal rows give ggml's bytes. In each block, d is the scale and x the values, all float with one rounding per
   operation; q is what is stored, and d and m are stored as float16, rounded to nearest even.

       q8_0    d = max|x| / 127                q = x * (1 / d), to nearest, ties away from zero
       q4_0    d = x_e / -8, q5_0 x_e / -16    q = trunc(x * (1 / d) + 8.5 or 16.5), at most 15 or 31
       q4_1    d = (max - min) / 15, q5_1 31   q = trunc((x - min) * (1 / d) + 0.5), m = min
       iq4_nl  d = sum(x**2 * t * x) / sum(x**2 * t * t), ascending, where t = za_iq4_nl[q] is the entry nearest to
               x * (1 / (x_e / za_iq4_nl[0])), the larger one of two

   x_e is the first value of the largest magnitude, min and max the first ones; 1 / d counts as 0 where d is 0. No
   product and sum may be fused: compile with -ffp-contract=off. */
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "zinc_contract.h"

struct block {
    uint8_t q[BLOCK];   /* the stored number of each value, with its fifth bit; of q8_0 an int8 */
    uint16_t halves[2]; /* d, and m where the type has one */
};

/* x: of magnitudes up to the type's `most`. */
void za_block_quantize(enum za_dtype dtype, const float x[BLOCK], struct block *block);

/* The value of number i. */
float za_block_value(enum za_dtype dtype, const struct block *block, int i);

/* The bytes of a block of ggml's: the halves, then 32 fifth bits if the type has them, then the values. Values of 4
   bits take 16 bytes; byte i has value i in its low half and value i + 16 in its high half. */
size_t za_block_bytes(enum za_dtype dtype);

void za_block_write(enum za_dtype dtype, const struct block *block, uint8_t *bytes);

/* Read a block of ggml's. False: d or m is not finite. */
bool za_block_read(enum za_dtype dtype, const uint8_t *bytes, struct block *block);
