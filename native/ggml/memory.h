// ggml's buffer type and buffers: memory of the Vulkan device that the host reads and writes in place, so that nothing
// is copied between this back end and the CPU's.  Buffers that hold caches note when each row was written.
#ifndef ZINC_GGML_MEMORY_H
#define ZINC_GGML_MEMORY_H

#include "cells.h"
#include "device.h"
#include "ggml-backend-impl.h"
#include "ggml.h"

namespace zinc {

// A tensor whose rows of ne[0] values are the cells of a cache.  Each has an order of its own: caches of a context need
// not have a token in the same cell, and nothing says which tensors are of one cache.
struct Cells {
    size_t row_bytes, rows;
    WriteOrder order;
    bool values;  // attention reads it as V: its order is not kept
};

// What a buffer's `context` is.
struct Buffer {
    Device *device;
    Memory memory;
    std::map<size_t, Cells> cells;  // by the offset of the tensor
};

ggml_backend_buffer_type_t buffer_type(ggml_backend_dev_t device);  // whose context is a Device

const ggml_tensor *root_of(const ggml_tensor *tensor);  // the tensor that a view, or a view of a view, is of

// The buffer that holds a tensor; NULL for another back end's, or where the tensor has no memory yet.
Buffer *buffer_of(const ggml_tensor *tensor);
bool is_elsewhere(const ggml_tensor *root);  // in a buffer of another back end's
bool is_cache(const ggml_tensor *root);  // in a buffer of this back end, and more than a step's result

// The order in which the rows of the root of K were written; NULL where it is no cache.  v: the root of V.
const WriteOrder *order_of_keys(const ggml_tensor *k, const ggml_tensor *v);
void note_write(const ggml_tensor *root, uint32_t row);  // whose bytes are there
void note_use();  // cells are read or written by a graph: what is restored is whole

}  // namespace zinc
#endif
