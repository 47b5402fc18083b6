#include "blocks.h"

#include <math.h>
#include <string.h>

#include "floats.h"

static float inverse_of(float d) { return d != 0 ? 1.0F / d : 0; }

/* The first value of the largest magnitude, and +0 where all are zeros of either sign. */
static float extreme_of(const float x[BLOCK]) {
    float extreme = 0;
    for (int i = 0; i < BLOCK; ++i)
        if (fabsf(x[i]) > fabsf(extreme)) extreme = x[i];
    return extreme;
}

/* q4_1 and q5_1. */
static void with_minimum(const float x[BLOCK], int levels, struct block *block) {
    float least = x[0], most = x[0];
    for (int i = 1; i < BLOCK; ++i) {
        if (x[i] < least) least = x[i];
        if (x[i] > most) most = x[i];
    }
    float d = (most - least) / (float)levels, inverse = inverse_of(d);
    for (int i = 0; i < BLOCK; ++i) {
        float scaled = (x[i] - least) * inverse;
        scaled += 0.5F;
        block->q[i] = (uint8_t)fminf(scaled, (float)levels);
    }
    block->halves[0] = za_half_bits(d);
    block->halves[1] = za_half_bits(least);
}

/* q4_0 and q5_0. */
static void with_offset(const float x[BLOCK], int levels, struct block *block) {
    float half = (float)(levels / 2 + 1), d = extreme_of(x) / -half, inverse = inverse_of(d);
    for (int i = 0; i < BLOCK; ++i) {
        float scaled = x[i] * inverse;
        scaled += half + 0.5F;
        block->q[i] = (uint8_t)fminf(scaled, (float)levels);
    }
    block->halves[0] = za_half_bits(d);
}

static void with_signs(const float x[BLOCK], struct block *block) {
    float d = fabsf(extreme_of(x)) / 127.0F, inverse = inverse_of(d);
    for (int i = 0; i < BLOCK; ++i) block->q[i] = (uint8_t)(int8_t)roundf(x[i] * inverse); /* ties away from zero */
    block->halves[0] = za_half_bits(d);
}

/* iq4_nl. */
static void with_table(const float x[BLOCK], struct block *block) {
    float extreme = extreme_of(x), inverse = inverse_of(extreme / za_iq4_nl[0]), above = 0, below = 0;
    for (int i = 0; i < BLOCK; ++i) {
        float scaled = x[i] * inverse, twice = scaled + scaled;
        int q = 0;
        while (q < 15 && twice >= za_iq4_nl[q] + za_iq4_nl[q + 1]) ++q;
        float entry = za_iq4_nl[q], weighted = x[i] * x[i] * entry;
        float product = weighted * x[i], square = weighted * entry;
        above += product;
        below += square;
        block->q[i] = (uint8_t)(extreme != 0 ? q : 0); /* a block of zeros is zero, whatever they are */
    }
    block->halves[0] = za_half_bits(extreme != 0 && below > 0 ? above / below : 0);
}

void za_block_quantize(enum za_dtype dtype, const float x[BLOCK], struct block *block) {
    const struct storage_type *type = &za_storage[dtype];
    int levels = type->fifth_bits ? 31 : 15;
    *block = (struct block){0};
    if (dtype == ZA_IQ4_NL) {
        with_table(x, block);
    } else if (dtype == ZA_Q8_0) {
        with_signs(x, block);
    } else if (type->halves == 2) {
        with_minimum(x, levels, block);
    } else {
        with_offset(x, levels, block);
    }
}

float za_block_value(enum za_dtype dtype, const struct block *block, int i) {
    const struct storage_type *type = &za_storage[dtype];
    float d = za_half_value(block->halves[0]), q = (float)block->q[i];
    if (dtype == ZA_IQ4_NL) return za_iq4_nl[block->q[i]] * d;
    if (dtype == ZA_Q8_0) return (float)(int8_t)block->q[i] * d;
    if (type->halves == 1) return (q - (type->fifth_bits ? 16 : 8)) * d;
    float product = q * d;
    return product + za_half_value(block->halves[1]);
}

size_t za_block_bytes(enum za_dtype dtype) {
    const struct storage_type *type = &za_storage[dtype];
    return 2 * type->halves + 4 * type->fifth_bits + BLOCK * type->bits / 8;
}

void za_block_write(enum za_dtype dtype, const struct block *block, uint8_t *bytes) {
    const struct storage_type *type = &za_storage[dtype];
    uint32_t fifth = 0;
    for (int i = 0; i < BLOCK; ++i) fifth |= (uint32_t)(block->q[i] >> 4 & 1) << i;
    memcpy(bytes, block->halves, 2 * (size_t)type->halves);
    bytes += 2 * (size_t)type->halves;
    memcpy(bytes, &fifth, 4 * (size_t)type->fifth_bits);
    bytes += 4 * (size_t)type->fifth_bits;
    for (int i = 0; i < (int)(BLOCK * type->bits / 8); ++i)
        bytes[i] = type->bits == 8 ? block->q[i] : (uint8_t)((block->q[i] & 15) | block->q[i + BLOCK / 2] << 4);
}

bool za_block_read(enum za_dtype dtype, const uint8_t *bytes, struct block *block) {
    const struct storage_type *type = &za_storage[dtype];
    uint32_t fifth = 0;
    *block = (struct block){0};
    memcpy(block->halves, bytes, 2 * (size_t)type->halves);
    bytes += 2 * (size_t)type->halves;
    memcpy(&fifth, bytes, 4 * (size_t)type->fifth_bits);
    bytes += 4 * (size_t)type->fifth_bits;
    for (int i = 0; i < BLOCK; ++i) {
        int low = i % (BLOCK / 2);
        uint8_t q = type->bits == 8 ? bytes[i] : bytes[low] >> (i == low ? 0 : 4) & 15;
        block->q[i] = q | (uint8_t)((fifth >> i & 1) << 4);
    }
    return isfinite(za_half_value(block->halves[0])) && isfinite(za_half_value(block->halves[1]));
}
