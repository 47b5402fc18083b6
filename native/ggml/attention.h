// FLASH_ATTN_EXT by the C library's kernels, among the dispatches of a graph.
#pragma once
#include "recording.h"

namespace zinc {

// Whether the device takes the operation. Opens a za_attn for the shape, so that an operation that is taken can run.
bool attention_supported(Device *device, const ggml_tensor *op);

// y = x, with +0 for magnitudes below `least`.
bool fit(Recording &recording, const Bound &x, const Bound &y, float least);

bool attend(Recording &recording, ggml_tensor *op);  // false: za_error says why

}  // namespace zinc
