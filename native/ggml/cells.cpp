#include "cells.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <numeric>
#include <utility>

namespace zinc {

// One clock for all tensors, so that a row keeps its time when it is restored into another one.
static std::atomic<uint64_t> now{0};

WriteOrder::WriteOrder(size_t cells) : stamps_(cells, 0), order_(cells), place_(cells) {
    std::iota(order_.begin(), order_.end(), 0u);
    std::iota(place_.begin(), place_.end(), 0u);
}

void WriteOrder::write(uint32_t cell) {
    stamps_[cell] = ++now;
    if (order_.size() >= 2 * stamps_.size()) rebuild();
    order_[place_[cell]] = NO_CELL;
    place_[cell] = uint32_t(order_.size());
    order_.push_back(cell);
}

void WriteOrder::restore(uint32_t cell, uint64_t stamp) {
    stamps_[cell] = stamp;
    sorted_ = false;
}

const std::vector<uint32_t> &WriteOrder::order() {
    if (!sorted_) rebuild();
    return order_;
}

void WriteOrder::rebuild() {
    order_.resize(stamps_.size());
    std::iota(order_.begin(), order_.end(), 0u);
    std::stable_sort(order_.begin(), order_.end(), [this](uint32_t a, uint32_t b) { return stamps_[a] < stamps_[b]; });
    for (uint32_t i = 0; i < order_.size(); ++i) place_[order_[i]] = i;
    sorted_ = true;
}

// FNV-1a over words of 8 bytes; `bytes` of a row of any ggml type is a multiple of 2.
static uint64_t hash_row(const void *row, size_t bytes) {
    uint64_t hash = 14695981039346656037u, word;
    for (size_t at = 0; at < bytes; at += 8) {
        word = 0;
        std::memcpy(&word, static_cast<const char *>(row) + at, std::min<size_t>(8, bytes - at));
        hash = (hash ^ word) * 1099511628211u;
        hash ^= hash >> 32;
    }
    return hash;
}

void RowMemory::keep(const void *row, size_t bytes, uint64_t stamp) {
    if (find(row, bytes)) return;
    if (stamps_.size() >= MOST) older_ = std::exchange(stamps_, {});
    stamps_[hash_row(row, bytes)] = stamp;
}

uint64_t RowMemory::find(const void *row, size_t bytes) const {
    const uint64_t hash = hash_row(row, bytes);
    for (const auto *stamps : {&stamps_, &older_})
        if (auto found = stamps->find(hash); found != stamps->end()) return found->second;
    return 0;
}

}  // namespace zinc
