/* Loop hints of SPIR-V for a GPU's compiler. */
#pragma once
#include <stddef.h>
#include <stdint.h>

/* A copy with the hint to unroll on every loop that has none: an array that a loop indexes lies in registers where the
   compiler unrolls the loop, else in memory. The modules go without, since a CPU's would compile for longer. To be
   freed; NULL: no memory. */
uint32_t *za_unrolled(const uint32_t *code, size_t words);
