#include "floats.h"

#include <float.h>
#include <math.h>
#include <string.h>

#include "zinc_contract.h"

_Static_assert(FLT_EVAL_METHOD == 0, "float operations must round to float: on x86 compile with -msse2 -mfpmath=sse");

static uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

/* The magnitude of x in a format with `mantissa` bits of mantissa and an exponent of bias `bias`. */
static uint32_t narrowed(float x, int mantissa, int bias) {
    x = fabsf(x);
    if (x < ldexpf(1, 1 - bias)) return (uint32_t)rintf(ldexpf(x, bias - 1 + mantissa)); /* below the normal numbers */
    int dropped = 23 - mantissa;
    uint32_t bits = bits_of(x);
    bits += (1U << (dropped - 1)) - 1 + (bits >> dropped & 1);
    return (bits >> dropped) - ((uint32_t)(127 - bias) << mantissa);
}

/* The inverse, for finite numbers. */
static float widened(uint32_t bits, int mantissa, int bias) {
    int exponent = (int)(bits >> mantissa), fraction = (int)(bits & ((1U << mantissa) - 1));
    if (exponent == 0) return ldexpf((float)fraction, 1 - bias - mantissa);
    return ldexpf((float)((1 << mantissa) + fraction), exponent - bias - mantissa);
}

uint16_t za_half_bits(float x) { return (uint16_t)((bits_of(x) >> 16 & 0x8000) | narrowed(x, 10, 15)); }

float za_half_value(uint16_t bits) {
    uint32_t size = bits & 0x7FFF;
    float magnitude = size < 0x7C00 ? widened(size, 10, 15) : size == 0x7C00 ? INFINITY : NAN;
    return bits & 0x8000 ? -magnitude : magnitude;
}

float za_bfloat_value(uint16_t bits) {
    uint32_t whole = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &whole, sizeof value);
    return value;
}

uint8_t za_fp8_bits(float x) { return (uint8_t)((bits_of(x) >> 24 & 0x80) | narrowed(x, 3, 7)); }

float za_fp8_value(uint8_t bits) {
    uint32_t size = bits & 0x7F;
    float magnitude = size < 0x7F ? widened(size, 3, 7) : NAN;
    return bits & 0x80 ? -magnitude : magnitude;
}

float za_flushed(float x) { return x != 0 && fabsf(x) < MIN_INPUT ? 0 : x; }
