// Lists of the keys that each query row attends: the cells that the mask shows, the oldest write first.
//
// A hidden cell is in no list, so neither padding nor the cells of other sequences change a result. Rows whose lists
// overlap share words: row i + 1 of a prompt has the list of row i and then its own cell. All rows of a prompt together
// need a single word per key.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

namespace zinc {

constexpr size_t NO_BIAS = SIZE_MAX;

// The keys of a query row: their pages are pages[begin, begin + count), and bias[bias, bias + count) is added to their
// scores. bias NO_BIAS: nothing is added.
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
    const uint16_t *mask;  // (rows, row_stride) float16: 0, a bias, or -inf for a hidden cell; NULL: no cell is hidden
    size_t row_stride;
    uint32_t rows, cells;
    Steps cell_ids, pages;  // the number of cell j in the write order, and its page
};

// Appends the rows of a stream to the lists. order: see WriteOrder::order; NULL: the cells are in ascending order.
// False: the mask has a NaN or +inf, and the lists cannot be used.
bool add_stream(const std::vector<uint32_t> *order, const StreamMask &stream, Lists *lists);

}  // namespace zinc
