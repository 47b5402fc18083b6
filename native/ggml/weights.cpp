#include "weights.h"

#include <algorithm>
#include <cstring>

namespace zinc {

int weight_type(ggml_type type) {
    switch (type) {
#define X(name) case GGML_TYPE_##name: return WEIGHT_TYPE_##name;
        X(Q4_0) X(Q4_1) X(Q5_0) X(Q5_1) X(Q8_0) X(IQ4_NL) X(MXFP4) X(Q2_K) X(Q3_K) X(Q4_K) X(Q5_K) X(Q6_K) X(IQ4_XS)
#undef X
        default: return -1;
    }
}

// Copies a run's pieces of SIZE bytes, of `rows` rows of `blocks` blocks each, to planes that begin at `pieces`, or
// back. Returns the end of the planes.
template <size_t SIZE>
static char *swap_run(size_t offset, size_t count, size_t block_bytes, size_t blocks, size_t rows, char *of_blocks,
                      char *pieces, bool back) {
    for (size_t i = 0; i < count; ++i)
        for (size_t block = 0; block < blocks; ++block)
            for (size_t row = 0; row < rows; ++row, pieces += SIZE) {
                char *in_block = of_blocks + (row * blocks + block) * block_bytes + offset + i * SIZE;
                if (back) std::memcpy(in_block, pieces, SIZE);
                else std::memcpy(pieces, in_block, SIZE);
            }
    return pieces;
}

static void swap(const Weights &w, char *of_blocks, char *pieces, bool back) {
    const struct weight_type &type = za_weight_types[weight_type(w.type)];
    const size_t blocks = w.columns / type.values, row_bytes = blocks * type.bytes;
    for (size_t matrix = 0; matrix < w.matrices; ++matrix)
        for (size_t row = 0; row < w.rows; row += WEIGHT_GROUP) {
            const size_t n = std::min<size_t>(WEIGHT_GROUP, w.rows - row), begin = (matrix * w.rows + row) * row_bytes;
            char *to = pieces + begin;
            for (const auto &run : type.runs) {
                auto swap_pieces = run.size == 16 ? swap_run<16> : run.size == 4 ? swap_run<4>
                                 : run.size == 2 ? swap_run<2> : swap_run<1>;
                to = swap_pieces(run.offset, run.count, type.bytes, blocks, n, of_blocks + begin, to, back);
            }
        }
}

Weights weights_of(const ggml_tensor *tensor) {
    return {tensor->type, size_t(tensor->ne[0]), size_t(tensor->ne[1]), size_t(tensor->ne[2] * tensor->ne[3])};
}

void convert(const Weights &weights, const char *from, char *to, bool as_pieces) {
    char *source = const_cast<char *>(from);
    swap(weights, as_pieces ? source : to, as_pieces ? to : source, !as_pieces);
}

bool in_pieces(const ggml_tensor *root) {
    Buffer *buffer = buffer_of(root);
    return buffer && buffer->weights.count(begin_of(root));
}

bool lay_weights(const ggml_tensor *root, bool as_pieces) {
    Buffer *buffer = buffer_of(root);
    if (!buffer || in_pieces(root) == as_pieces) return true;
    const size_t begin = begin_of(root), size = ggml_nbytes(root);
    std::vector<char> from(size), to(size);
    if (!buffer->device->store->read(buffer->memory, begin, from.data(), size)) return false;
    convert(weights_of(root), from.data(), to.data(), as_pieces);
    if (!buffer->device->store->write(buffer->memory, begin, to.data(), size)) return false;
    if (as_pieces) buffer->weights[begin] = weights_of(root);
    else buffer->weights.erase(begin);
    return true;
}

}  // namespace zinc
