// ggml's buffer type and buffers: memory of the Vulkan device that the host reads and writes in place, so that nothing
// is copied between this back end and the CPU's.  Buffers that hold caches note when each row was written.
#ifndef ZINC_GGML_MEMORY_H
#define ZINC_GGML_MEMORY_H

#include "cells.h"
#include "device.h"
#include "ggml-backend-impl.h"
#include "ggml.h"

namespace zinc {

// What a buffer's `context` is.
struct Buffer {
    Device *device;
    Memory memory;
    std::map<size_t, WriteOrder> orders;  // of the tensors whose rows were written, by their offset
};

ggml_backend_buffer_type_t buffer_type(ggml_backend_dev_t device);  // whose context is a Device

const ggml_tensor *root_of(const ggml_tensor *tensor);  // the tensor that a view, or a view of a view, is of

// The buffer that holds a tensor; NULL for another back end's, or where the tensor has no memory yet.
Buffer *buffer_of(const ggml_tensor *tensor);

// The order in which the rows (of ne[0] values) of a root were written; NULL where none was noted.
WriteOrder *order_of(const ggml_tensor *root);
WriteOrder *note_order(const ggml_tensor *root);  // made where there is none; NULL for memory that holds no cache

}  // namespace zinc
#endif
