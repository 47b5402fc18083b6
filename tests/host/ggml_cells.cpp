// The write order of native/ggml, for test_ggml_cells.py. Lines on stdin, CELLS STEP…, are each answered by the cells in
// the order of writes, the oldest first, after steps: wCELL writes; sCELL:ROW and rCELL:ROW save and restore a state's
// next row, S and R of another buffer; "." ends a group; f saves 64 rows of another tensor, as many as are known.
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <sstream>
#include <string>

#include "cells.h"

static void save_others(zinc::SavedOrders *saved) {
    static uint64_t row = uint64_t(1) << 32;
    zinc::WriteOrder order(64);
    order.write(uint32_t(row / 64 % 32));  // another order each time
    for (uint32_t cell = 0; cell < 64; ++cell, ++row) saved->save(nullptr, &order, cell, &row, sizeof row);
    saved->finish(nullptr);
}

int main() {
    for (std::string line, word; std::getline(std::cin, line);) {
        std::istringstream in(line);
        size_t cells;
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
}
