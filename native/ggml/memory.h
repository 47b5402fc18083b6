// ggml's buffer types and buffers. The host has no addresses of a Vulkan device's memory, so a tensor's `data` is BASE
// plus its offset in the buffer. The processor's buffers have the host's addresses. The processor takes over ggml's own
// buffers of the CPU, too.
#pragma once
#include <set>
#include <vector>

#include "cells.h"
#include "device.h"
#include "ggml-backend-impl.h"
#include "ggml.h"

namespace zinc {

// A tensor whose rows of ne[0] values are the cells of a cache. Each tensor has its own order of writes: the caches of
// a context may have a token in different cells, and nothing says which tensors belong to the same cache.
struct Cells {
    size_t row_bytes, rows;
    WriteOrder order;
    bool values;  // attention reads the tensor as V, whose order of writes is not kept
};

// A tensor of quantized weights.
struct Weights {
    ggml_type type;
    size_t columns, rows, matrices;
    size_t bytes() const { return ggml_row_size(type, int64_t(columns)) * rows * matrices; }
};

// The `context` of ggml's buffers. The keys of its maps are offsets of tensors.
struct Buffer {
    Device *device;
    Memory memory;
    uintptr_t base;  // a tensor's `data` is the base plus its offset
    std::map<size_t, Cells> cells;
    std::map<size_t, Weights> weights;            // tensors that lie in layout R32
    std::map<size_t, std::vector<char>> shadows;  // bytes that the host wrote or read, if the memory is not mapped
    std::set<size_t> blocks;                      // weights that another device reads, too: they stay ggml's blocks
    ggml_backend_buffer_i functions;              // ggml's functions of a buffer that was taken over
    void *context;                                // ggml's context of such a buffer
};

constexpr size_t BASE = 4096;

ggml_backend_buffer_type_t buffer_type(Device *device);

const ggml_tensor *root_of(const ggml_tensor *tensor);  // the tensor whose bytes a view, or a view of a view, has

// The buffer that holds a tensor. NULL: the buffer is another back end's, or the tensor has no memory yet.
Buffer *buffer_of(const ggml_tensor *tensor);
size_t begin_of(const ggml_tensor *tensor);  // the tensor's offset in the buffer
bool is_elsewhere(const ggml_tensor *root);  // whether the tensor lies in another back end's buffer
const Device *holder_of(const ggml_tensor *tensor);  // the device whose buffer holds the tensor, or NULL
// Takes over ggml's own buffer of the CPU that holds the tensor: the processor reads it in place and notes its changes.
void take_over(const ggml_tensor *tensor);
Buffer *holding(const void *bytes);  // the processor's buffer that has these bytes, or NULL
// Notes that another device reads a tensor of quantized weights, too. False: the device failed.
bool share_weights(const ggml_tensor *root);
bool stay_blocks(const ggml_tensor *root);  // whether weights must stay ggml's blocks
bool is_cache(const ggml_tensor *root);  // in a buffer of this back end, but neither weights nor a result of a graph

// The bytes of a tensor that the current graph does not write. NULL: the device failed.
const char *host_bytes(const ggml_tensor *tensor);
void note_change(Buffer *buffer, size_t begin, size_t size);  // a graph, or the host, writes bytes of a buffer

}  // namespace zinc
