#include "weights.h"

#include <algorithm>
#include <cstring>

namespace zinc {

int weight_type(ggml_type type) {
    switch (type) {
        case GGML_TYPE_Q4_0: return WEIGHT_TYPE_Q4_0;
        case GGML_TYPE_Q4_1: return WEIGHT_TYPE_Q4_1;
        case GGML_TYPE_Q5_0: return WEIGHT_TYPE_Q5_0;
        case GGML_TYPE_Q5_1: return WEIGHT_TYPE_Q5_1;
        case GGML_TYPE_Q8_0: return WEIGHT_TYPE_Q8_0;
        case GGML_TYPE_IQ4_NL: return WEIGHT_TYPE_IQ4_NL;
        case GGML_TYPE_MXFP4: return WEIGHT_TYPE_MXFP4;
        case GGML_TYPE_Q2_K: return WEIGHT_TYPE_Q2_K;
        case GGML_TYPE_Q3_K: return WEIGHT_TYPE_Q3_K;
        case GGML_TYPE_Q4_K: return WEIGHT_TYPE_Q4_K;
        case GGML_TYPE_Q5_K: return WEIGHT_TYPE_Q5_K;
        case GGML_TYPE_Q6_K: return WEIGHT_TYPE_Q6_K;
        case GGML_TYPE_IQ4_XS: return WEIGHT_TYPE_IQ4_XS;
        default: return -1;
    }
}

// The pieces of a size that a run has, of `rows` rows of `blocks` blocks: a plane for each, from `pieces` on.
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
            const size_t n = std::min<size_t>(WEIGHT_GROUP, w.rows - row), at = (matrix * w.rows + row) * row_bytes;
            char *to = pieces + at;
            for (const auto &run : type.runs) {
                auto swap_pieces = run.size == 16 ? swap_run<16> : run.size == 4 ? swap_run<4>
                                 : run.size == 2 ? swap_run<2> : swap_run<1>;
                to = swap_pieces(run.offset, run.count, type.bytes, blocks, n, of_blocks + at, to, back);
            }
        }
}

Weights weights_of(const ggml_tensor *tensor) {
    return {tensor->type, size_t(tensor->ne[0]), size_t(tensor->ne[1]), size_t(tensor->ne[2] * tensor->ne[3])};
}

void to_pieces(const Weights &weights, const char *blocks, char *pieces) {
    swap(weights, const_cast<char *>(blocks), pieces, false);
}

void to_blocks(const Weights &weights, const char *pieces, char *blocks) {
    swap(weights, blocks, const_cast<char *>(pieces), true);
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
    if (as_pieces) to_pieces(weights_of(root), from.data(), to.data());
    else to_blocks(weights_of(root), from.data(), to.data());
    if (!buffer->device->store->write(buffer->memory, begin, to.data(), size)) return false;
    if (as_pieces) buffer->weights[begin] = weights_of(root);
    else buffer->weights.erase(begin);
    return true;
}

}  // namespace zinc
