#include "rows.h"

#include <math.h>
#include <string.h>

#include "blocks.h"
#include "error.h"
#include "floats.h"

/* K, or V, of new tokens. */
struct part {
    const char *name;
    const struct row_part *as;
    const struct storage_type *type;
    const void *values;
    const float *scales; /* (kv_heads), where the type has them */
    bool blocks;         /* values are ggml's blocks, or fp8_e4m3's bytes */
    uint32_t kv_heads;
};

static struct part part_of(const struct row_format *f, const struct new_rows *rows, bool of_k) {
    const struct row_part *as = of_k ? &f->k : &f->v;
    const struct storage_type *type = &za_storage[as->dtype];
    return (struct part){
        .name = of_k ? "k" : "v",
        .as = as,
        .type = type,
        .values = of_k ? rows->k : rows->v,
        .scales = type->head_scale ? of_k ? rows->k_scales : rows->v_scales : NULL,
        .blocks = rows->encoded && (type->halves || type->head_scale),
        .kv_heads = f->kv_heads,
    };
}

/* --- checks ------------------------------------------------------------------------------------------ */

static float value_at(enum za_dtype dtype, const void *values, size_t i) {
    if (dtype == ZA_F16) return za_half_value(((const uint16_t *)values)[i]);
    if (dtype == ZA_BF16) return za_bfloat_value(((const uint16_t *)values)[i]);
    return ((const float *)values)[i];
}

/* False if the type does not take a value. */
static bool check_values(const struct part *p, uint32_t tokens, double *largest) {
    size_t heads = p->kv_heads, dims = p->as->dims, n = (size_t)tokens * heads * dims;
    double most = p->type->most != 0 ? p->type->most : (double)MAX_INPUT, top = 0;
    for (size_t i = 0; i < n; ++i) {
        float x = value_at(p->as->dtype, p->values, i), scale = p->scales ? p->scales[i / dims % heads] : 1;
        if (!((double)fabsf(x) <= most)) /* also where x is NaN */
            return za_fail("%s[%zu, %zu, %zu]: got %.9g, expected a finite value of at most %s%.9g", p->name,
                           i / (heads * dims), i / dims % heads, i % dims, (double)x, p->type->most != 0 ? "" : "2**",
                           p->type->most != 0 ? most : log2(most));
        if (p->scales && (double)(fabsf(x) / scale) > FP8_MAX)
            return za_fail("%s[%zu, %zu, %zu]: got %g, expected at most %g times the head's scale, %g; give a larger "
                           "one in %s_scales", p->name, i / (heads * dims), i / dims % heads, i % dims, (double)x,
                           FP8_MAX, (double)scale, p->name);
        top = fmax(top, (double)fabsf(x));
    }
    *largest = fmax(*largest, p->type->halves || p->scales ? top * GROWTH : top);
    return true;
}

static bool check_part(const struct part *p, uint32_t tokens, double *largest) {
    if (!tokens || !p->as->dims) return true;
    if (!p->values)
        return za_fail("%s: got NULL, expected (%u, %u, %u) values of %s", p->name, tokens, p->kv_heads, p->as->dims,
                       p->type->name);
    if (!p->blocks) return check_values(p, tokens, largest);
    if (!p->type->halves || p->as->dims % BLOCK == 0) return true;
    return za_fail("encoded: got rows of %u values in %s, expected a multiple of %d for %s; give floats for other "
                   "sizes", p->as->dims, p->name, BLOCK, p->type->name);
}

/* --- encodings of one token and KV head -------------------------------------------------------------- */

/* Write block `number` of a row. */
static void write_block(const struct part *p, uint32_t number, struct block *block, uint32_t *out, uint32_t *shared) {
    uint32_t left = p->as->stored - number * BLOCK, n = left < BLOCK ? left : BLOCK, halves = p->type->halves;
    if (p->as->stride) {
        for (uint32_t i = n; i < BLOCK; ++i) block->q[i] &= 16; /* padding keeps only fifth bits, as in tiles */
        za_block_write(p->as->dtype, block, (uint8_t *)out + number * za_block_bytes(p->as->dtype));
        return;
    }
    uint8_t *bytes = (uint8_t *)out + (size_t)number * BLOCK * p->type->bits / 8;
    for (uint32_t i = 0; i < n; ++i) {
        if (p->type->bits == 8) {
            bytes[i] = block->q[i];
        } else {
            bytes[i / 2] |= (uint8_t)((block->q[i] & 15) << 4 * (i % 2));
        }
    }
    memcpy((uint8_t *)shared + (size_t)number * 2 * halves, block->halves, 2 * (size_t)halves);
    if (!p->type->fifth_bits) return;
    uint32_t fifth = 0, count = (p->as->stored + BLOCK - 1) / BLOCK;
    for (int i = 0; i < BLOCK; ++i) fifth |= (uint32_t)(block->q[i] >> 4) << i;
    memcpy(shared + p->as->scale_words - count + number, &fifth, sizeof fifth);
}

/* Row number `row` of blocks, from values or from ggml's bytes. */
static bool encode_blocks(const struct part *p, size_t row, uint32_t *out, uint32_t *shared, double *largest) {
    uint32_t dims = p->as->dims, count = (dims + BLOCK - 1) / BLOCK;
    enum za_dtype dtype = p->as->dtype;
    struct block block;
    const uint8_t *bytes = (const uint8_t *)p->values + row * count * za_block_bytes(dtype);
    for (uint32_t number = 0; number < count; ++number) {
        if (p->blocks) {
            if (!za_block_read(dtype, bytes + number * za_block_bytes(dtype), &block))
                return za_fail("%s: got a scale or minimum that is not finite in token %zu, KV head %zu, block %u, "
                               "expected numbers", p->name, row / p->kv_heads, row % p->kv_heads, number);
            for (int i = 0; i < BLOCK; ++i) *largest = fmax(*largest, (double)fabsf(za_block_value(dtype, &block, i)));
        } else {
            float x[BLOCK] = {0};
            for (uint32_t i = 0; i < BLOCK && number * BLOCK + i < dims; ++i)
                x[i] = za_flushed(((const float *)p->values)[row * dims + number * BLOCK + i]);
            za_block_quantize(dtype, x, &block);
        }
        write_block(p, number, &block, out, shared);
    }
    return true;
}

/* Row number `row` of fp8_e4m3, from values or from its bytes. */
static bool encode_fp8(const struct part *p, size_t row, uint8_t *out, double *largest) {
    float scale = p->scales[row % p->kv_heads];
    for (uint32_t i = 0; i < p->as->dims; ++i) {
        size_t offset = row * p->as->dims + i;
        if (!p->blocks) {
            out[i] = za_fp8_bits(za_flushed(((const float *)p->values)[offset]) / scale);
            continue;
        }
        out[i] = ((const uint8_t *)p->values)[offset];
        float value = za_fp8_value(out[i]) * scale;
        if (isnan(value))
            return za_fail("%s: got an fp8_e4m3 NaN in token %zu, KV head %zu, value %u, expected numbers", p->name,
                           row / p->kv_heads, row % p->kv_heads, i);
        *largest = fmax(*largest, (double)fabsf(value));
    }
    return true;
}

/* Row number `row` of a type that stores values as they are, except magnitudes that count as 0. */
static void encode_plain(const struct part *p, size_t row, uint32_t *out) {
    size_t dims = p->as->dims, size = p->type->bits / 8, first = row * dims;
    memcpy(out, (const char *)p->values + first * size, dims * size);
    if (p->as->dtype == ZA_F16) return; /* it has no magnitude that counts as 0 */
    for (size_t i = 0; i < dims; ++i) {
        float x = value_at(p->as->dtype, p->values, first + i);
        if (x != 0 && za_flushed(x) == 0) memset((char *)out + i * size, 0, size);
    }
}

static bool encode(const struct part *p, size_t row, uint32_t *out, uint32_t *shared, double *largest) {
    if (!p->as->dims) return true;
    memset(out, 0, 4 * (size_t)p->as->value_words);
    memset(shared, 0, 4 * (size_t)p->as->scale_words);
    if (p->type->halves) return encode_blocks(p, row, out, shared, largest);
    if (p->type->head_scale) return encode_fp8(p, row, (uint8_t *)out, largest);
    encode_plain(p, row, out);
    return true;
}

/* --- rows -------------------------------------------------------------------------------------------- */

bool za_rows_encode(const struct row_format *f, const struct new_rows *rows, uint32_t *out, double *largest_k) {
    struct part k = part_of(f, rows, true), v = part_of(f, rows, false);
    double largest_v = 0;
    if (!check_part(&k, rows->tokens, largest_k) || !check_part(&v, rows->tokens, &largest_v)) return false;
    size_t n = (size_t)rows->tokens * f->kv_heads;
    for (size_t row = 0; row < n; ++row) {
        uint32_t *v_out = out + f->k.value_words, *shared = v_out + f->v.value_words;
        if (!encode(&k, row, out, shared, largest_k) ||
            !encode(&v, row, v_out, shared + f->k.scale_words, &largest_v))
            return false;
        out = shared + f->k.scale_words + f->v.scale_words;
    }
    return true;
}
