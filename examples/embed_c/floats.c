#include "floats.h"

#include <float.h>
#include <math.h>
#include <string.h>

_Static_assert(FLT_EVAL_METHOD == 0, "float operations must round to float: on x86 compile with -msse2 -mfpmath=sse");

static uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

uint16_t za_half_bits(float x) {
    uint16_t sign = (uint16_t)(bits_of(x) >> 16 & 0x8000);
    x = fabsf(x);
    if (x < 0x1p-14F) return sign | (uint16_t)rintf(x * 0x1p24F); /* a multiple of 2**-24; 1024 is the normal 2**-14 */
    uint32_t bits = bits_of(x);
    bits += 0xFFF + (bits >> 13 & 1); /* rounds the 13 bits that float16 lacks */
    return sign | (uint16_t)((bits >> 13) - ((127 - 15) << 10));
}

float za_half_value(uint16_t bits) {
    int exponent = bits >> 10 & 31, mantissa = bits & 0x3FF;
    float magnitude = exponent ? ldexpf((float)(1024 + mantissa), exponent - 25) : ldexpf((float)mantissa, -24);
    if (exponent == 31) magnitude = mantissa ? NAN : INFINITY;
    return bits & 0x8000 ? -magnitude : magnitude;
}

float za_bfloat_value(uint16_t bits) {
    uint32_t whole = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &whole, sizeof value);
    return value;
}

uint8_t za_fp8_bits(float x) {
    uint8_t sign = (uint8_t)(bits_of(x) >> 24 & 0x80);
    x = fabsf(x);
    if (x < 0x1p-6F) return sign | (uint8_t)rintf(x * 0x1p9F); /* a multiple of 2**-9; 8 is the normal 2**-6 */
    uint32_t bits = bits_of(x);
    bits += 0x7FFFF + (bits >> 20 & 1); /* rounds the 20 bits that e4m3 lacks */
    return sign | (uint8_t)((bits >> 20) - ((127 - 7) << 3));
}

float za_fp8_value(uint8_t bits) {
    int exponent = bits >> 3 & 15, mantissa = bits & 7;
    float magnitude = exponent ? ldexpf((float)(8 + mantissa), exponent - 10) : ldexpf((float)mantissa, -9);
    if ((bits & 0x7F) == 0x7F) magnitude = NAN;
    return bits & 0x80 ? -magnitude : magnitude;
}

float za_flushed(float min_input, float x) { return x != 0 && fabsf(x) < min_input ? 0 : x; }
