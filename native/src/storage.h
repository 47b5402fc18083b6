/* The storage types: what every value and every block of each has. */
#ifndef STORAGE_H
#define STORAGE_H

#include <stdint.h>

#include "zinc_attn.h"

enum { BLOCK = 32 }; /* head dimensions that share a scale in block types */

struct storage_type {
    const char *name;
    uint32_t bits;       /* of a value, without its fifth bit */
    uint32_t halves;     /* float16 numbers of a block: a scale, or a scale and a minimum; 0: no block type */
    uint32_t fifth_bits; /* 1: a block has a word of them, bit i its value i's */
    uint32_t head_scale; /* 1: a value is multiplied by the scale of its head */
    double most;         /* largest magnitude of a row; 0: see struct storage_limits, or the manifest's MAX_INPUT */
};

struct storage_limits {
    double growth;                  /* a stored magnitude is at most so many times the given one: block types, fp8 */
    double fp8_unit;                /* what the kernels' scales of fp8_e4m3 are multiplied by, which is exact */
    double fp8_most;                /* fp8_e4m3's largest value */
    double least_scale, most_scale; /* of a head */
};

extern const struct storage_type za_storage[ZA_DTYPES]; /* by enum za_dtype; ZA_AS_K has no name */
extern const float za_iq4_nl[16];
extern const struct storage_limits za_storage_limits;

#endif
