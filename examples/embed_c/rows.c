#include "rows.h"

#include <float.h>
#include <math.h>
#include <string.h>

#include "error.h"

_Static_assert(FLT_EVAL_METHOD == 0, "float operations must round to float: on x86 compile with -msse2 -mfpmath=sse");

enum { BLOCK = 32 }; /* head dimensions that share a q8_0 scale */
static const float Q8_MAX = 127.0F * 65504.0F;

/* --- float16 ----------------------------------------------------------------------------------------- */

/* The float16 nearest to x, ties to even. x: 0 to 65504. */
static uint16_t half_bits(float x) {
    if (x < 0x1p-14F) return (uint16_t)rintf(x * 0x1p24F); /* a multiple of 2**-24; 1024 is the smallest normal one */
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    bits += 0xFFF + (bits >> 13 & 1); /* rounds the 13 bits that float16 lacks */
    return (uint16_t)((bits >> 13) - ((127 - 15) << 10));
}

/* The value of a float16. */
static float half_value(uint16_t bits) {
    int exponent = bits >> 10 & 31, mantissa = bits & 0x3FF;
    float magnitude = exponent ? ldexpf((float)(1024 + mantissa), exponent - 25) : ldexpf((float)mantissa, -24);
    if (exponent == 31) magnitude = mantissa ? NAN : INFINITY;
    return bits & 0x8000 ? -magnitude : magnitude;
}

/* --- values ------------------------------------------------------------------------------------------ */

/* Value i of k or v. */
static float value_at(enum za_dtype dtype, const void *values, size_t i) {
    if (dtype == ZA_F32 || dtype == ZA_Q8_0) return ((const float *)values)[i];
    uint16_t half = ((const uint16_t *)values)[i];
    if (dtype == ZA_F16) return half_value(half);
    uint32_t bits = (uint32_t)half << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* False if a value of k (or v) is none that the dtype takes. */
static bool check_values(const struct row_format *f, const char *name, const void *values, uint32_t dims,
                         uint32_t tokens, double *largest) {
    size_t heads = f->kv_heads, n = (size_t)tokens * heads * dims;
    double most = f->dtype == ZA_F16 ? 65504 : f->dtype == ZA_Q8_0 ? (double)Q8_MAX : (double)f->max_input;
    double growth = f->dtype == ZA_Q8_0 ? 1.125 : 1; /* a stored value may exceed its own by the scale's rounding */
    for (size_t i = 0; i < n; ++i) {
        double x = (double)value_at(f->dtype, values, i);
        if (!(fabs(x) <= most)) /* also where x is NaN */
            return za_fail("%s[%zu, %zu, %zu]: got %g, expected a finite value of at most %g", name, i / (heads * dims),
                           i / dims % heads, i % dims, x, most);
        *largest = fmax(*largest, growth * fabs(x));
    }
    return true;
}

float za_flushed(float min_input, float x) { return x != 0 && fabsf(x) < min_input ? 0 : x; }

/* --- encodings of K (or V) of one token and KV head -------------------------------------------------- */

static void encode_q8_0(const struct row_format *f, const struct row_part *part, const float *x, int8_t *quants,
                        uint8_t *scales) {
    memset(scales, 0, 4 * (size_t)part->scale_words);
    for (uint32_t block = 0; block < part->dims / BLOCK; ++block, x += BLOCK, quants += BLOCK) {
        float largest = 0;
        for (int i = 0; i < BLOCK; ++i) largest = fmaxf(largest, fabsf(za_flushed(f->min_input, x[i])));
        float step = largest / 127.0F, inverse = step > 0 ? 1.0F / step : 0;
        uint16_t half = half_bits(step);
        memcpy(scales + 2 * (size_t)block, &half, sizeof half);
        for (int i = 0; i < BLOCK; ++i)
            quants[i] = (int8_t)roundf(za_flushed(f->min_input, x[i]) * inverse); /* ties away from zero */
    }
}

static void encode_bf16(const struct row_format *f, const struct row_part *part, const uint16_t *bits, uint32_t *out) {
    for (uint32_t i = 0; i < part->dims; ++i) {
        float value = value_at(ZA_BF16, bits, i);
        uint16_t kept = value != 0 && fabsf(value) < f->min_input ? 0 : bits[i];
        memcpy((char *)out + 2 * (size_t)i, &kept, sizeof kept);
    }
}

/* The values of row number `row`. */
static void encode(const struct row_format *f, const struct row_part *part, const void *values, size_t row,
                   uint32_t *out, uint32_t *scales) {
    size_t at = row * part->dims;
    if (f->dtype == ZA_F16) {
        memcpy(out, (const uint16_t *)values + at, 2 * (size_t)part->dims);
    } else if (f->dtype == ZA_BF16) {
        encode_bf16(f, part, (const uint16_t *)values + at, out);
    } else if (f->dtype == ZA_Q8_0) {
        encode_q8_0(f, part, (const float *)values + at, (int8_t *)out, (uint8_t *)scales);
    } else {
        for (uint32_t i = 0; i < part->dims; ++i) {
            float kept = za_flushed(f->min_input, ((const float *)values)[at + i]);
            memcpy(out + i, &kept, sizeof kept);
        }
    }
}

/* --- rows -------------------------------------------------------------------------------------------- */

bool za_row_words(enum za_dtype dtype, uint32_t dims, struct row_part *part) {
    static const uint32_t bytes[ZA_DTYPES] = {[ZA_F32] = 4, [ZA_F16] = 2, [ZA_BF16] = 2, [ZA_Q8_0] = 1};
    uint32_t scales = dtype == ZA_Q8_0 ? (dims + 2 * BLOCK - 1) / (2 * BLOCK) : 0;
    *part = (struct row_part){dims, dims * bytes[dtype] / 4, scales};
    if (dtype == ZA_Q8_0 && dims % BLOCK)
        return za_fail("dtype: got q8_0 at head_dim %u, expected a head_dim that is a multiple of 32", dims);
    return true;
}

bool za_rows_encode(const struct row_format *f, const void *k, const void *v, uint32_t tokens, uint32_t *out,
                    double *largest_k) {
    double largest_v = 0;
    if (!check_values(f, "k", k, f->k.dims, tokens, largest_k) ||
        !check_values(f, "v", v, f->v.dims, tokens, &largest_v))
        return false;
    size_t rows = (size_t)tokens * f->kv_heads;
    for (size_t row = 0; row < rows; ++row) {
        uint32_t *v_out = out + f->k.value_words, *scales = v_out + f->v.value_words;
        encode(f, &f->k, k, row, out, scales);
        encode(f, &f->v, v, row, v_out, scales + f->k.scale_words);
        out = scales + f->k.scale_words + f->v.scale_words;
    }
    return true;
}
