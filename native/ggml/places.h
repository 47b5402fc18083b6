// Lines that say which parts of a model other devices have, as the places of weights and of graphs' inputs show.
#pragma once
#include <map>
#include <string>

#include "ggml-backend-impl.h"
#include "ggml-impl.h"

namespace zinc {

// Each function says at most one line in the process. Any device may look up rows of weights: a look-up sums nothing.
void note_operation(const ggml_tensor *op);  // ggml asks whether a device takes the operation
void note_input(const ggml_tensor *source);  // a graph reads a tensor that another device may have made
void note_read(const ggml_tensor *tensor, const void *to);  // the tensor's bytes go to the host
void note_graph(ggml_cgraph *graph);  // the graph was computed; says that the model is here, if no other line was said

// Says that a sum goes over the tokens of a batch. Such a sum has another number of terms than the sum of the same name
// in an earlier graph of the context; `terms` keeps these numbers.
void note_sums(const ggml_cgraph *graph, std::map<std::string, int64_t> *terms);

}  // namespace zinc
