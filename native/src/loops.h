/* Loop hints of SPIR-V for a GPU's compiler. */
#pragma once
#include <stddef.h>
#include <stdint.h>

/* A copy of a module in which every loop without a hint has the hint to unroll. An array that a loop indexes lies in
   registers only if the compiler unrolls the loop. The modules themselves have no hints, because a CPU's compiler would
   take longer with them. The caller frees the copy. NULL: no memory. */
uint32_t *za_unrolled(const uint32_t *code, size_t words);
