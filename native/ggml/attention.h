// FLASH_ATTN_EXT through the C library: what is taken, and how calls are made of it.
#ifndef ZINC_GGML_ATTENTION_H
#define ZINC_GGML_ATTENTION_H

#include "recording.h"

namespace zinc {

// Opens the library for the shape, so that what is taken can be run.
bool attention_supported(Device *device, const ggml_tensor *op);

bool attend(Recording &recording, ggml_tensor *op);  // za_error has the reason of a failure

}  // namespace zinc
#endif
