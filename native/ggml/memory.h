// ggml's buffer type and buffers: memory of the Vulkan device that the host reads and writes in place, so that nothing
// is copied between this back end and the CPU's.  Buffers that hold caches note when each row was written.
#ifndef ZINC_GGML_MEMORY_H
#define ZINC_GGML_MEMORY_H

#include "cells.h"
#include "device.h"
#include "ggml-backend-impl.h"
#include "ggml.h"

namespace zinc {

constexpr size_t NO_TENSOR = SIZE_MAX;

// The cells of a cache: row i of each of its tensors, K and V of all layers, belongs to cell i.
struct Cells {
    WriteOrder order;
    size_t writer = NO_TENSOR;  // offset of the tensor that was written first: its writes count
    size_t keys = NO_TENSOR;    // of the last layer's K, whose rows tell tokens apart by all that came before them
};

// What a buffer's `context` is.
struct Buffer {
    Device *device;
    Memory memory;
    std::map<size_t, Cells> cells;  // by their number: caches of as many cells share an order
};

ggml_backend_buffer_type_t buffer_type(ggml_backend_dev_t device);  // whose context is a Device

const ggml_tensor *root_of(const ggml_tensor *tensor);  // the tensor that a view, or a view of a view, is of

// The buffer that holds a tensor; NULL for another back end's, or where the tensor has no memory yet.
Buffer *buffer_of(const ggml_tensor *tensor);

// The order in which the rows (of ne[0] values) of a root that holds K were written; NULL for another back end's.
WriteOrder *order_of_keys(const ggml_tensor *root);
void note_write(const ggml_tensor *root, uint32_t row);  // whose bytes are there

}  // namespace zinc
#endif
