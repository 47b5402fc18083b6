// The order in which the rows ("cells") of a tensor of K were written.
//
// llama.cpp puts a token's K and V into any free cell, so the place of a cell says nothing about its token. The order
// of writes is the same in every history of a cache, so the back end takes keys in this order.
#pragma once
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <unordered_map>
#include <vector>

namespace zinc {

constexpr uint32_t NO_CELL = UINT32_MAX;

// The cells of a tensor in the order of their last writes. Cells without a write come first, in ascending order.
class WriteOrder {
  public:
    explicit WriteOrder(size_t cells);

    void write(uint32_t cell);  // the cell becomes the latest

    // A hash of all writes. Orders of the same number of cells and the same hash are equal.
    uint64_t history() const { return history_; }

    // A number that is the larger, the later the cell was written.
    uint32_t place(uint32_t cell) const { return place_[cell]; }

    // Every cell once, the oldest write first, and NO_CELL at the former places of cells that were written again.
    const std::vector<uint32_t> &order() const { return order_; }

  private:
    std::vector<uint32_t> order_, place_;  // place_[cell]: where the cell is in order_
    uint64_t history_ = 0;
};

// The write orders of saved sequences. A restored sequence gets its order back, also in other cells.
//
// A state has its rows in the order of their cells, tensor after tensor. The rows of a tensor are a group, which a hash
// of all their bytes identifies. A group that was saved is restored in the order of its writes; any other group is
// restored in the order of the state. So an order is restored completely or not at all, and two sequences with the same
// end stay different.
class SavedOrders {
  public:
    // Keeps the orders of at least the last `most` rows and groups, and forgets orders before twice as many.
    explicit SavedOrders(size_t most) : most_(most) {}

    // The next row of a state, with these bytes, is saved from a tensor of a buffer, or restored to a tensor. Calls for
    // several buffers may alternate.
    void save(const void *buffer, const WriteOrder *order, uint32_t cell, const void *row, size_t bytes);
    void restore(const void *buffer, WriteOrder *order, uint32_t cell, const void *row, size_t bytes);

    // The buffer's groups are complete: another tensor is next, or the cells are used.
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
    std::unordered_map<uint64_t, Ranks> known_, older_;  // by the hash of a group; older_: the former known_
    Ranks last_;  // the latest order, which the layers of a state share
    const size_t most_;
    size_t rows_ = 0;  // the number of rows and groups in known_
};

}  // namespace zinc
