// ggml's buffer types and buffers.  The host does not address a Vulkan device's memory: a tensor's `data` is BASE and its
// offset in the buffer.  The host addresses the processor's memory, its own and that of ggml's buffers, which the
// processor takes over.
#pragma once
#include <set>
#include <vector>

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

// A tensor of quantized weights.
struct Weights {
    ggml_type type;
    size_t columns, rows, matrices;
    size_t bytes() const { return ggml_row_size(type, int64_t(columns)) * rows * matrices; }
};

// What a buffer's `context` is.  Maps are by the offset of a tensor.
struct Buffer {
    Device *device;
    Memory memory;
    uintptr_t base;  // a tensor's data and its offset differ by it
    std::map<size_t, Cells> cells;
    std::map<size_t, Weights> weights;            // that lie in layout R32
    std::map<size_t, std::vector<char>> shadows;  // what the host wrote or read, where memory is not mapped
    std::set<size_t> blocks;                      // weights that another device reads, too: they stay ggml's blocks
    ggml_backend_buffer_i functions;              // ggml's, and its context, of a buffer that was taken over
    void *context;
};

constexpr size_t BASE = 4096;

ggml_backend_buffer_type_t buffer_type(Device *device);

const ggml_tensor *root_of(const ggml_tensor *tensor);  // the tensor that a view, or a view of a view, is of

// The buffer that holds a tensor; NULL for another back end's, or where the tensor has no memory yet.
Buffer *buffer_of(const ggml_tensor *tensor);
size_t begin_of(const ggml_tensor *tensor);  // its offset in the buffer
bool is_elsewhere(const ggml_tensor *root);  // in a buffer of another back end's
const Device *holder_of(const ggml_tensor *tensor);  // the device in whose buffer it is, or NULL
// The processor reads ggml's own buffers where they are; it keeps what is known of them from now on.
void take_over(const ggml_tensor *tensor);
Buffer *holding(const void *bytes);  // the processor's buffer with these bytes, or NULL
// Another device reads a tensor of quantized weights. False: the device failed.
bool share_weights(const ggml_tensor *root);
bool stay_blocks(const ggml_tensor *root);  // whether weights are to stay so
bool is_cache(const ggml_tensor *root);  // in a buffer of this back end, and neither weights nor a step's result

// The bytes of a tensor that no command of the graph that is recorded writes; NULL: the device failed.
const char *host_bytes(const ggml_tensor *tensor);
void note_change(Buffer *buffer, size_t begin, size_t size);  // a graph writes bytes of a buffer

}  // namespace zinc
