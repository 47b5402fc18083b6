// The order in which the rows ("cells") of a tensor of K were written.
//
// llama.cpp puts a token's K and V into any free cell, so where a cell lies says nothing about its token.  What every
// history of a cache has in common is the order of writes, and it is the order of keys here.
#pragma once
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <unordered_map>
#include <vector>

namespace zinc {

constexpr uint32_t NO_CELL = UINT32_MAX;

// The cells of a tensor in the order of their last write.  Cells that were never written come first, ascending.
class WriteOrder {
  public:
    explicit WriteOrder(size_t cells);

    // `cell` becomes the latest.
    void write(uint32_t cell);

    // A hash of all writes: orders of as many cells that have the same are equal.
    uint64_t history() const { return history_; }

    // Grows with the time of the cell's last write.
    uint32_t place(uint32_t cell) const { return place_[cell]; }

    // Every cell once, oldest write first, and NO_CELL where a cell was that has been written again since.
    const std::vector<uint32_t> &order() const { return order_; }

  private:
    std::vector<uint32_t> order_, place_;  // place_: by cell, where it is in order_
    uint64_t history_ = 0;
};

// The orders of sequences that were saved, so that one that is restored keeps it, wherever its cells were and will be.
//
// A state has its rows in the order of their cells, tensor after tensor.  Its rows of one tensor are a group, which is
// known by a hash of all their bytes: a group that was saved is restored in the order of its writes, any other one in
// the order of the state.  So an order is whole or not there, and two sequences that end alike are two.
class SavedOrders {
  public:
    // Rows and groups of this number at least are known; what was saved before twice as many is forgotten.
    explicit SavedOrders(size_t most) : most_(most) {}

    // The next row of a state that is saved from a tensor of a buffer, or restored to it, whose bytes are there.
    // States of several buffers may take turns.
    void save(const void *buffer, const WriteOrder *order, uint32_t cell, const void *row, size_t bytes);
    void restore(const void *buffer, WriteOrder *order, uint32_t cell, const void *row, size_t bytes);

    // The buffer's groups are whole: another tensor is next, or the cells are used.
    void finish(const void *buffer);

  private:
    using Ranks = std::shared_ptr<const std::vector<uint32_t>>;  // rows of a group, oldest write first

    template <typename Order>
    struct Group {
        Order *order = nullptr;
        std::vector<uint32_t> cells;
        uint64_t hash = 0;
        void add(uint32_t cell, const void *row, size_t bytes);
    };

    void finish_saved(const Group<const WriteOrder> &group);
    void finish_restored(const Group<WriteOrder> &group);

    std::map<const void *, Group<const WriteOrder>> saved_;  // by buffer
    std::map<const void *, Group<WriteOrder>> restored_;
    std::unordered_map<uint64_t, Ranks> known_, older_;
    Ranks last_;  // layers of a state share it
    const size_t most_;
    size_t rows_ = 0;  // in known_, and its groups
};

}  // namespace zinc
