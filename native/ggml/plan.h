// A FLASH_ATTN_EXT as the C library takes it: its sizes, the keys of its rows, and its calls.
#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "cells.h"
#include "device.h"
#include "ggml.h"
#include "lists.h"

namespace zinc {

// Where a head's rows of K (or V) lie in the root. All four numbers count rows: the first row, and the steps from a
// cell, a head and a stream to the next.
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
    Rows k_rows;
    const ggml_tensor *cache_k, *cache_v;  // K and V in the cache: llama.cpp copies an f32 cache to float16 first
    Rows cache_rows;                      // of cache_k
    uint32_t pages;  // rows of the roots that can hold a cell's K and V of head 0
    Kind kind;
};

// False if the library does not take the operation. The tensors need no memory.
bool read_operation(const ggml_tensor *op, Operation *o);

// Why the device's arithmetic does not take K or V of a tensor's type, or "".
std::string refused_type(const Device &device, const ggml_tensor *kept);

// An operation without the bytes of its tensors: their types, sizes, strides and offsets, and the parameters.
std::vector<uint64_t> key_of(const ggml_tensor *op);

// The most rows that a call with states may have, if a row has up to `keys` keys. 0: the device runs no such call.
size_t rows_of_call(const Device &device, const za_attn *attn, const Operation &o, uint64_t keys);

// A call of the C library for some rows of an operation, from first_row on, and where the words of the call lie. Rows
// count over all streams, stream after stream.
struct Call {
    size_t first_row;
    struct laid laid;
    za_place words;
};

// The lists and the words of operations. All layers of a graph with the same mask, sizes and order of cells share them.
class Plan {
  public:
    void begin() { ++graph_; }  // another graph begins, or masks may have changed; earlier words are no longer valid

    // The calls of an operation, valid until the next call of this function. NULL: za_error says why. order: the write
    // order of K's cells; NULL: the cells are in ascending order.
    const std::vector<Call> *calls(Device *device, za_cache *cache, const ggml_tensor *op, const Operation &o,
                                   const WriteOrder *order);

    std::map<std::string, int64_t> terms;  // how many terms each sum had in earlier graphs, see note_sums

  private:
    struct SinkCalls {  // the calls of layers with these sinks
        const ggml_tensor *sinks;
        std::vector<Call> calls;
    };
    struct Entry {
        std::vector<uint64_t> key;  // key_of the operation, and the history of the write order
        std::vector<char> mask;
        const ggml_tensor *mask_tensor;
        Lists lists;
        uint64_t graph;              // the last graph that used the entry
        std::vector<SinkCalls> calls;  // of that graph
    };
    Entry *entry(const ggml_tensor *op, const Operation &o, const WriteOrder *order);

    std::vector<Entry> entries_;
    uint64_t graph_ = 1;
};

}  // namespace zinc
