// FLASH_ATTN_EXT through the C library: what is taken, and how calls are made of it.
#ifndef ZINC_GGML_ATTENTION_H
#define ZINC_GGML_ATTENTION_H

#include "device.h"
#include "ggml-backend.h"
#include "plan.h"

namespace zinc {

// Opens the library for the shape, so that what is taken can be run.
bool attention_supported(Device *device, const ggml_tensor *op);

ggml_status attend(Device *device, Plan *plan, ggml_tensor *op);  // the reason of a failure is on stderr

}  // namespace zinc
#endif
