// Layout R32 of quantized weights (zinc_attn/graph/pieces.py), in which products read them.
#ifndef ZINC_GGML_WEIGHTS_H
#define ZINC_GGML_WEIGHTS_H

#include "memory.h"

namespace zinc {

int weight_type(ggml_type type);  // a WEIGHT_TYPE_; -1: none

Weights weights_of(const ggml_tensor *tensor);

// A whole tensor, from ggml's blocks to R32, or back.
void to_pieces(const Weights &weights, const char *blocks, char *pieces);
void to_blocks(const Weights &weights, const char *pieces, char *blocks);

bool in_pieces(const ggml_tensor *root);                     // whether it lies in R32 now
bool lay_weights(const ggml_tensor *root, bool as_pieces);   // false: the device failed

}  // namespace zinc
#endif
