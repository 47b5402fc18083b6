#include "cells.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>

namespace zinc {

// --- the order of writes ---------------------------------------------------------------------------------------------

WriteOrder::WriteOrder(size_t cells) : order_(cells), place_(cells) {
    std::iota(order_.begin(), order_.end(), 0u);
    std::iota(place_.begin(), place_.end(), 0u);
}

void WriteOrder::write(uint32_t cell) {
    history_ = (history_ ^ (cell + 1)) * 0x9E3779B97F4A7C15u;
    history_ ^= history_ >> 32;
    if (order_.size() >= 2 * place_.size()) {
        order_.erase(std::remove(order_.begin(), order_.end(), NO_CELL), order_.end());
        for (uint32_t i = 0; i < order_.size(); ++i) place_[order_[i]] = i;
    }
    order_[place_[cell]] = NO_CELL;
    place_[cell] = uint32_t(order_.size());
    order_.push_back(cell);
}

// --- saved orders ----------------------------------------------------------------------------------------------------

// FNV-1a of words of 8 bytes. Four lanes hide the time of a product. The last words of the row are padded with zeros.
static uint64_t hash_row(uint64_t hash, const void *row, size_t bytes) {
    constexpr uint64_t PRIME = 1099511628211u;
    uint64_t lanes[4] = {hash, hash + 1, hash + 2, hash + 3};
    for (size_t begin = 0; begin < bytes; begin += 32) {
        uint64_t words[4] = {};
        std::memcpy(words, static_cast<const char *>(row) + begin, std::min<size_t>(32, bytes - begin));
        for (int i = 0; i < 4; ++i) {
            lanes[i] = (lanes[i] ^ words[i]) * PRIME;
            lanes[i] ^= lanes[i] >> 32;
        }
    }
    for (uint64_t lane : lanes) hash = (hash ^ lane) * PRIME, hash ^= hash >> 32;
    return hash;
}

template <typename Order>
void SavedOrders::Group<Order>::add(uint32_t cell, const void *row, size_t bytes) {
    hash = hash_row(cells.empty() ? 14695981039346656037u : hash, row, bytes);
    cells.push_back(cell);
}

void SavedOrders::save(const void *buffer, const WriteOrder *order, uint32_t cell, const void *row, size_t bytes) {
    auto &group = saved_[buffer];
    if (group.order != order) finish_saved(std::exchange(group, {order, {}, 0}));
    group.add(cell, row, bytes);
}

void SavedOrders::restore(const void *buffer, WriteOrder *order, uint32_t cell, const void *row, size_t bytes) {
    if (restored_[buffer].order != order) finish(buffer);
    auto &group = restored_[buffer];
    group.order = order;
    group.add(cell, row, bytes);
    order->write(cell);
}

void SavedOrders::finish(const void *buffer) {
    auto saved = saved_.extract(buffer);
    auto restored = restored_.extract(buffer);
    if (saved) finish_saved(saved.mapped());
    if (!restored) return;
    for (const auto &[other, group] : saved_)  // the restored group may be the last group that another buffer saved
        if (group.hash == restored.mapped().hash) {
            finish_saved(saved_.extract(other).mapped());
            break;
        }
    finish_restored(restored.mapped());
}

void SavedOrders::finish_saved(const Group<const WriteOrder> &group) {
    auto earlier = [&](uint32_t a, uint32_t b) {
        return group.order->place(group.cells[a]) < group.order->place(group.cells[b]);
    };
    std::vector<uint32_t> ranks(group.cells.size());
    std::iota(ranks.begin(), ranks.end(), 0u);
    known_.erase(group.hash);
    older_.erase(group.hash);
    if (std::is_sorted(ranks.begin(), ranks.end(), earlier)) return;  // the state has the same order
    std::stable_sort(ranks.begin(), ranks.end(), earlier);
    if (rows_ >= most_) {
        older_ = std::exchange(known_, {});
        rows_ = 0;
    }
    if (!last_ || *last_ != ranks) {
        rows_ += ranks.size();
        last_ = std::make_shared<const std::vector<uint32_t>>(std::move(ranks));
    }
    ++rows_;
    known_[group.hash] = last_;
}

void SavedOrders::finish_restored(const Group<WriteOrder> &group) {
    for (const auto *orders : {&known_, &older_}) {
        auto entry = orders->find(group.hash);
        if (entry == orders->end() || entry->second->size() != group.cells.size()) continue;
        for (uint32_t rank : *entry->second) group.order->write(group.cells[rank]);
        return;
    }
}

}  // namespace zinc
