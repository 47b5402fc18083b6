/* Conversions of numbers. All of them round to the nearest number, ties to even. */
#pragma once
#include <stdint.h>

uint16_t za_half_bits(float x); /* float16; x: a magnitude that rounds to at most 65504 */
float za_half_value(uint16_t bits);
float za_bfloat_value(uint16_t bits);
uint8_t za_fp8_bits(float x); /* e4m3; x: a magnitude up to 448 */
float za_fp8_value(uint8_t bits);

/* A float as the kernels take it: a magnitude below MIN_INPUT becomes +0. */
float za_flushed(float x);
