#include "loops.h"

#include <stdlib.h>
#include <string.h>

#include "error.h"

uint32_t *za_unrolled(const uint32_t *code, size_t words) {
    enum { HEADER = 5, OP_LOOP_MERGE = 246, CONTROL = 3, NO_HINT = 0, UNROLL = 1 }; /* of SPIR-V */
    uint32_t *hinted = malloc(words * sizeof *hinted);
    if (!hinted) return za_no_memory(), NULL;
    memcpy(hinted, code, words * sizeof *hinted);
    for (size_t i = HEADER; i < words; i += code[i] >> 16)
        if ((code[i] & 0xFFFF) == OP_LOOP_MERGE && code[i + CONTROL] == NO_HINT) hinted[i + CONTROL] = UNROLL;
    return hinted;
}
