#include "lists.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "cells.h"

namespace zinc {

constexpr uint16_t HIDDEN = 0xFC00, SIGN = 0x8000, EXPONENT = 0x7C00;

static float value_of(uint16_t half) {  // a finite float16
    const int exponent = (half & EXPONENT) >> 10, fraction = half & 0x3FF;
    const float magnitude = std::ldexp(float(exponent ? fraction + 0x400 : fraction), std::max(exponent, 1) - 25);
    return half & SIGN ? -magnitude : magnitude;
}

// The stream's cells in the order of writes, numbered within the operation.
static std::vector<uint32_t> in_order(const std::vector<uint32_t> *order, const StreamMask &stream) {
    std::vector<uint32_t> cells(order ? 0 : stream.cells);
    std::iota(cells.begin(), cells.end(), 0u);
    if (!order) return cells;
    cells.reserve(stream.cells);
    for (uint32_t cell : *order) {
        if (cell == NO_CELL || cell < stream.cell_ids.first) continue;
        if ((cell - stream.cell_ids.first) % stream.cell_ids.step) continue;
        uint64_t number = (cell - stream.cell_ids.first) / stream.cell_ids.step;
        if (number < stream.cells) cells.push_back(uint32_t(number));
    }
    return cells;
}

// Puts `list` into `pages` and returns its begin: within the previous row's list, if `list` continues it, or after all
// pages.
static size_t place_list(const std::vector<uint32_t> &list, const RowKeys *previous, std::vector<uint32_t> *pages) {
    size_t place = pages->size(), overlap = 0;
    if (previous && previous->count && !list.empty()) {
        auto begin = pages->begin() + std::ptrdiff_t(previous->begin), end = begin + std::ptrdiff_t(previous->count);
        auto match = std::find(begin, end, list[0]);
        size_t both = std::min(size_t(end - match), list.size());
        if (both && (both == list.size() || end == pages->end()) &&
            std::equal(match, match + std::ptrdiff_t(both), list.begin())) {
            overlap = both;
            place = size_t(match - pages->begin());
        }
    }
    pages->insert(pages->end(), list.begin() + std::ptrdiff_t(overlap), list.end());
    return place;
}

// Appends the row's biases and returns where they begin, or NO_BIAS if all of them are zero. keys: the row's cells.
static size_t place_bias(const uint16_t *mask, const std::vector<uint32_t> &keys, std::vector<float> *bias) {
    auto has_bias = [mask](uint32_t key) { return (mask[key] & ~SIGN) != 0; };
    if (!mask || std::none_of(keys.begin(), keys.end(), has_bias)) return NO_BIAS;
    size_t place = bias->size();
    for (uint32_t key : keys) bias->push_back(value_of(mask[key]));
    return place;
}

bool add_stream(const std::vector<uint32_t> *order, const StreamMask &stream, Lists *lists) {
    const std::vector<uint32_t> candidates = in_order(order, stream);
    std::vector<uint32_t> keys, list;
    for (uint32_t row = 0; row < stream.rows; ++row) {
        const uint16_t *mask = stream.mask ? stream.mask + row * stream.row_stride : nullptr;
        keys.clear();
        for (uint32_t key : candidates)
            if (!mask || mask[key] != HIDDEN) keys.push_back(key);
        for (uint32_t key : keys)
            if (mask && (mask[key] & EXPONENT) == EXPONENT) return false;
        list.resize(keys.size());
        auto page_of = [&](uint32_t key) { return uint32_t(stream.pages.first + key * stream.pages.step); };
        std::transform(keys.begin(), keys.end(), list.begin(), page_of);
        size_t begin = place_list(list, row ? &lists->rows.back() : nullptr, &lists->pages);
        lists->rows.push_back({begin, list.size(), place_bias(mask, keys, &lists->bias)});
    }
    return true;
}

}  // namespace zinc
