// FLASH_ATTN_EXT by the C library's kernels, among the dispatches of a graph.
#ifndef ZINC_GGML_ATTENTION_H
#define ZINC_GGML_ATTENTION_H

#include "recording.h"

namespace zinc {

// Opens the library for the shape, so that what is taken can be run.
bool attention_supported(Device *device, const ggml_tensor *op);

// y = x, +0 for magnitudes below `least`.
bool fit(Recording &recording, const Bound &x, const Bound &y, float least);

bool attend(Recording &recording, const ggml_tensor *op);  // false: za_error says why

}  // namespace zinc
#endif
