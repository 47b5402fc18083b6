// The order of writes of the cells in buffers, which SET_ROWS, restored states and copies of streams change.
#ifndef ZINC_GGML_ORDERS_H
#define ZINC_GGML_ORDERS_H

#include "memory.h"

namespace zinc {

// In a thread's turn.

// The order in which the rows of the root of K were written; NULL where it is no cache.  v: the root of V.
const WriteOrder *order_of_keys(const ggml_tensor *k, const ggml_tensor *v);
void note_write(const ggml_tensor *root, uint32_t row);  // whose bytes are there
void note_use(const Buffer *buffer);  // cells are read or written by a graph, or freed: what is restored is whole

// Bytes [offset, offset + size) of a tensor go to a state, or come from one: `data`.
void note_get(const ggml_tensor *tensor, const void *data, size_t offset, size_t size);
void note_set(const ggml_tensor *tensor, const void *data, size_t offset, size_t size);
// Bytes [offset, offset + size) of a tensor come from a place of a buffer: cells have the order that they have there,
// or, where no rows of such cells are known there (a state that llama.cpp keeps on the device), that of cells.
void note_copy(const Buffer *from, size_t begin, const ggml_tensor *target, size_t offset, size_t size);

}  // namespace zinc
#endif
