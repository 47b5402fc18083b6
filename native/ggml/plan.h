// What a FLASH_ATTN_EXT is, and the keys of its rows.
#ifndef ZINC_GGML_PLAN_H
#define ZINC_GGML_PLAN_H

#include <cstdint>
#include <vector>

#include "cells.h"
#include "device.h"
#include "ggml.h"
#include "lists.h"

namespace zinc {

// Where the rows of K (or V) are that belong to one head and cell, counted in such rows from the begin of the root.
struct Rows {
    uint64_t first, cell, head, stream;
    bool operator==(const Rows &b) const {
        return first == b.first && cell == b.cell && head == b.head && stream == b.stream;
    }
};

struct Operation {
    const ggml_tensor *q, *k, *v, *mask, *sinks, *k_root, *v_root;
    float scale, max_bias, softcap;
    uint32_t rows, cells, streams;
    Rows at;
    uint32_t pages;  // rows that can be a cell's of head 0, in the roots of K and V
    Kind kind;
};

// False for what is not taken.  Needs no memory behind the tensors.
bool read_operation(const ggml_tensor *op, Operation *o);

// All of an operation but the bytes of its tensors: their types, sizes, strides and places, and the parameters.
std::vector<uint64_t> key_of(const ggml_tensor *op);

// The lists of the last operation: all layers of a step have the same, unless their cells were written in other orders.
class Plan {
  public:
    // order: of K's cells; NULL: they are in ascending order.  False where the mask has a NaN or +inf.
    bool make(const ggml_tensor *op, const Operation &o, const WriteOrder *order);
    const Lists &lists() const { return lists_; }

  private:
    std::vector<uint64_t> key_;  // what lists_ was made of: the operation, the order, the mask
    std::vector<uint32_t> order_;
    std::vector<char> mask_;
    Lists lists_;
    bool valid_ = false;
};

}  // namespace zinc
#endif
