// Layout R32 of quantized weights (zinc_attn/graph/pieces.py). Products read weights in this layout.
#pragma once
#include "memory.h"

namespace zinc {

int weight_type(ggml_type type);  // a WEIGHT_TYPE_; -1: none

Weights weights_of(const ggml_tensor *tensor);

// Converts a whole tensor from ggml's blocks to R32 (as_pieces), or from R32 to ggml's blocks.
void convert(const Weights &weights, const char *from, char *to, bool as_pieces);

bool in_pieces(const ggml_tensor *root);                    // whether the tensor lies in R32 now
bool lay_weights(const ggml_tensor *root, bool as_pieces);  // converts in place; false: the device failed

}  // namespace zinc
