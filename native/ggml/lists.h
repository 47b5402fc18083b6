// Which keys each query row attends, and in which order: the cells that the mask shows, oldest write first.
//
// A hidden cell takes no place, so neither padding nor the cells of other sequences can show in a result.  Rows whose
// lists overlap share words: row i + 1 of a prompt has row i's list and its own cell, so all rows of a prompt together
// need one word per key.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

namespace zinc {

constexpr size_t NO_BIAS = SIZE_MAX;

// Of one query row: its keys lie in pages[begin, begin + count), and what is added to their scores is
// bias[bias, bias + count), or nothing where that is NO_BIAS.
struct RowKeys {
    size_t begin, count, bias;
};

struct Lists {
    std::vector<uint32_t> pages;
    std::vector<float> bias;
    std::vector<RowKeys> rows;  // (streams, rows of a stream)
};

// An arithmetic sequence of cells: cell j has number first + j * step.
struct Steps {
    uint64_t first, step;
};

// A stream's part of an operation.
struct StreamMask {
    const uint16_t *mask;  // (rows, row_stride) float16: 0, a bias, or -inf for a hidden cell; NULL: all are seen
    size_t row_stride;
    uint32_t rows, cells;
    Steps cell_ids, pages;  // of cell j the number in the write order, and the page
};

// Append the rows of a stream.  order: see WriteOrder::order; NULL: cells are in ascending order.  False for a mask
// value that is NaN or +inf; `lists` is then of no use.
bool add_stream(const std::vector<uint32_t> *order, const StreamMask &stream, Lists *lists);

float half_value(uint16_t bits);  // of a float16

}  // namespace zinc
