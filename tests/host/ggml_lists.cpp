// Lines on stdin, each answered by a line: the write order and the lists of native/ggml, for test_ggml_lists.py.
//   states CELLS STEP…          the cells in the order of writes, the oldest first, after steps: wCELL writes; sCELL:ROW
//                               and rCELL:ROW save and restore a state's next row, S and R of another buffer; "." ends
//                               a group; f saves 64 rows of another tensor, as many as are known
//   lists ROWS CELLS FIRST STEP FIRST STEP N ORDER… MASK…   each row's begin, count, bias; then pages; then biases
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <sstream>
#include <string>

#include "cells.h"
#include "lists.h"

static void save_others(zinc::SavedOrders *saved) {
    static uint64_t row = uint64_t(1) << 32;
    zinc::WriteOrder order(64);
    order.write(uint32_t(row / 64 % 32));  // another order each time
    for (uint32_t cell = 0; cell < 64; ++cell, ++row) saved->save(nullptr, &order, cell, &row, sizeof row);
    saved->finish(nullptr);
}

static void answer_states(std::istream &in) {
    size_t cells;
    std::string word;
    in >> cells;
    zinc::WriteOrder order(cells);
    zinc::SavedOrders saved(64);
    while (in >> word) {
        uint32_t cell = uint32_t(std::strtoul(word.c_str() + 1, nullptr, 10));
        size_t colon = word.find(':');
        uint64_t row = colon == std::string::npos ? 0 : std::stoull(word.substr(colon + 1));
        if (word[0] == 'w') order.write(cell);
        const void *buffer = word[0] < 'a' && word[0] != '.' ? &saved : nullptr;
        if (std::tolower(word[0]) == 's') saved.save(buffer, &order, cell, &row, sizeof row);
        if (std::tolower(word[0]) == 'r') saved.restore(buffer, &order, cell, &row, sizeof row);
        if (word[0] == '.') saved.finish(nullptr);
        if (word[0] == 'f') save_others(&saved);
    }
    for (uint32_t cell : order.order())
        if (cell != zinc::NO_CELL) std::printf("%u ", cell);
    std::printf("\n");
}

static void answer_lists(std::istream &in) {
    uint32_t rows, cells, n;
    zinc::StreamMask stream{};
    in >> rows >> cells >> stream.cell_ids.first >> stream.cell_ids.step;
    in >> stream.pages.first >> stream.pages.step >> n;
    std::vector<uint32_t> order(n);
    for (uint32_t &cell : order) in >> cell;
    std::vector<uint16_t> mask;
    for (unsigned word; in >> word;) mask.push_back(uint16_t(word));
    stream.mask = mask.empty() ? nullptr : mask.data();
    stream.row_stride = cells;
    stream.rows = rows;
    stream.cells = cells;
    zinc::Lists lists;
    if (!zinc::add_stream(n ? &order : nullptr, stream, &lists)) {
        std::printf("refused\n");
        return;
    }
    for (const zinc::RowKeys &row : lists.rows)
        std::printf("%zu,%zu,%lld ", row.begin, row.count, row.bias == zinc::NO_BIAS ? -1LL : (long long)row.bias);
    std::printf("|");
    for (uint32_t page : lists.pages) std::printf(" %u", page);
    std::printf("|");
    for (float bias : lists.bias) std::printf(" %.17g", double(bias));
    std::printf("\n");
}

int main() {
    for (std::string line, word; std::getline(std::cin, line);) {
        std::istringstream in(line);
        in >> word;
        if (word == "states") answer_states(in);
        if (word == "lists") answer_lists(in);
        std::fflush(stdout);
    }
}
