// What a FLASH_ATTN_EXT is, and the keys of its rows.
#ifndef ZINC_GGML_PLAN_H
#define ZINC_GGML_PLAN_H

#include <cstdint>
#include <map>
#include <string>
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
    const ggml_tensor *kept_k, *kept_v;  // as the cache has them: llama.cpp copies an f32 cache to float16 first
    Rows kept_at;                        // of K, in the cache
    uint32_t pages;  // rows that can be a cell's of head 0, in the roots of K and V
    Kind kind;
};

// False for what is not taken.  Needs no memory behind the tensors.
bool read_operation(const ggml_tensor *op, Operation *o);

// Why the device's arithmetic does not take K or V of a tensor's type, or "".
std::string refused_type(const Device &device, const ggml_tensor *kept);

// All of an operation but the bytes of its tensors: their types, sizes, strides and places, and the parameters.
std::vector<uint64_t> key_of(const ggml_tensor *op);

// Rows of a call at most, where a row has up to `keys` keys; 0: not even as few as it needs.
size_t rows_of_call(const Device &device, const za_attn *attn, const Operation &o, uint64_t keys);

// Rows of an operation, one stream behind the other, that are a call of the library's, and where its words lie.
struct Call {
    size_t first_row;
    struct laid laid;
    za_place words;
};

// Lists and words of operations, which are made once for all layers of a graph that have the same mask, sizes and order
// of cells.
class Plan {
  public:
    void begin() { ++graph_; }  // another graph, or masks that may have changed; words of before are gone

    // order: of K's cells; NULL: they are in ascending order.  NULL: za_error says why.
    const Lists *lists(const ggml_tensor *op, const Operation &o, const WriteOrder *order);
    const std::vector<Call> *calls(Device *device, za_cache *cache, const ggml_tensor *op, const Operation &o,
                                   const WriteOrder *order);  // until the next call of it

    std::map<std::string, int64_t> terms;  // of the sums of the graphs so far

  private:
    struct OfSinks {
        const ggml_tensor *sinks;
        std::vector<Call> calls;
    };
    struct Entry {
        std::vector<uint64_t> key;  // the operation, and its order
        std::vector<char> mask;
        const ggml_tensor *mask_tensor;
        Lists lists;
        uint64_t graph;               // that used it last
        std::vector<OfSinks> calls;   // in that graph
    };
    Entry *entry(const ggml_tensor *op, const Operation &o, const WriteOrder *order);

    std::vector<Entry> entries_;
    uint64_t graph_ = 1;
};

}  // namespace zinc
#endif
