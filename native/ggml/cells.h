// The order in which the rows ("cells") of a KV cache were written.
//
// llama.cpp puts a token's K and V into any free cell, so where a cell lies says nothing about its token.  What every
// history of a cache has in common is the order of writes, and it is the order of keys here.
#ifndef ZINC_GGML_CELLS_H
#define ZINC_GGML_CELLS_H

#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <vector>

namespace zinc {

constexpr uint32_t NO_CELL = UINT32_MAX;

// The cells of a cache in the order of their last write.  Cells that were never written come first, ascending.
class WriteOrder {
  public:
    explicit WriteOrder(size_t cells);

    // `cell` becomes the latest.
    void write(uint32_t cell);

    // `cell` takes the place of a write that was made at time `stamp`: see RowMemory.
    void restore(uint32_t cell, uint64_t stamp);

    uint64_t stamp(uint32_t cell) const { return stamps_[cell]; }

    // Every cell once, oldest write first, and NO_CELL where a cell was that has been written again since.
    const std::vector<uint32_t> &order();

  private:
    void rebuild();

    std::vector<uint64_t> stamps_;  // by cell: time of its last write, 0 for none
    std::vector<uint32_t> order_;
    std::vector<uint32_t> place_;   // by cell: where it is in order_
    bool sorted_ = true;            // false: a restored cell is not yet at its place
};

// When rows were written first, by a 64-bit hash of the row's bytes: a state that is saved and restored keeps the order
// in which its tokens were decoded, wherever its cells were and will be. A row of equal bytes is the same token behind
// the same tokens, and the first time of each token is before that of the next.
class RowMemory {
  public:
    void keep(const void *row, size_t bytes, uint64_t stamp);  // unless it is there
    uint64_t find(const void *row, size_t bytes) const;        // 0: not kept

  private:
    static constexpr size_t MOST = size_t(1) << 20;  // rows; then those before them are forgotten
    std::unordered_map<uint64_t, uint64_t> stamps_, older_;
};

}  // namespace zinc
#endif
