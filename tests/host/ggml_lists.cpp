// Lines on stdin, each answered by a line: the write order and the lists of native/ggml, for test_ggml_lists.py.
//   order CELLS WRITE…          the cells in the order of writes, the oldest first
//   memory CELLS wCELL kCELL:ROW rCELL:ROW…   the same, after writes, kept rows and restored rows
//   lists ROWS CELLS FIRST STEP FIRST STEP N ORDER… MASK…   each row's begin, count, bias; then pages; then biases
#include <cstdio>
#include <iostream>
#include <sstream>
#include <string>

#include "cells.h"
#include "lists.h"

static void print_order(zinc::WriteOrder &order) {
    for (uint32_t cell : order.order())
        if (cell != zinc::NO_CELL) std::printf("%u ", cell);
    std::printf("\n");
}

static void answer_order(std::istream &in) {
    size_t cells;
    uint32_t cell;
    in >> cells;
    zinc::WriteOrder order(cells);
    while (in >> cell) order.write(cell);
    print_order(order);
}

// Write some cells, let their rows go, write others, and put the rows back into given cells.
static void answer_memory(std::istream &in) {
    size_t cells;
    std::string word;
    in >> cells;
    zinc::WriteOrder order(cells);
    zinc::RowMemory memory;
    while (in >> word) {
        uint32_t cell = uint32_t(std::stoul(word.substr(1)));
        size_t at = word.find(':');
        uint64_t row = at == std::string::npos ? 0 : std::stoull(word.substr(at + 1));
        if (word[0] == 'w') order.write(cell);
        if (word[0] == 'k') memory.keep(&row, sizeof row, order.stamp(cell));
        if (word[0] == 'r') order.restore(cell, memory.find(&row, sizeof row));
    }
    print_order(order);
}

static void answer_lists(std::istream &in) {
    uint32_t rows, cells, n;
    zinc::StreamMask stream{};
    in >> rows >> cells >> stream.written.first >> stream.written.step >> stream.pages.first >> stream.pages.step >> n;
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
        if (word == "order") answer_order(in);
        if (word == "memory") answer_memory(in);
        if (word == "lists") answer_lists(in);
        std::fflush(stdout);
    }
}
