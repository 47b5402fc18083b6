// The order in which the cells of buffers were written. SET_ROWS, restored states and copies of streams change it.
#pragma once
#include "memory.h"

namespace zinc {

// The calling thread holds the device's turn in all functions.

// The order in which the rows of K's root were written; NULL if the root is no cache. v: the root of V.
const WriteOrder *order_of_keys(const ggml_tensor *k, const ggml_tensor *v);
void note_write(const ggml_tensor *root, uint32_t row);  // a graph writes the row of the root
void note_use(const Buffer *buffer);  // a graph uses the buffer's cells, or they are freed: its states are complete

// Bytes [offset, offset + size) of a tensor are saved to a state (get) or restored from a state (set); `data` has them.
void note_get(const ggml_tensor *tensor, const void *data, size_t offset, size_t size);
void note_set(const ggml_tensor *tensor, const void *data, size_t offset, size_t size);
// Bytes [offset, offset + size) of a tensor are copied from a buffer. The target's cells take the order of the source's
// cells. If the source has no such cells (a state that llama.cpp keeps on the device), they are in ascending order.
void note_copy(const Buffer *from, size_t begin, const ggml_tensor *target, size_t offset, size_t size);

}  // namespace zinc
