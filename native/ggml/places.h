// Which parts of a model other devices have, as the places of weights and what devices hand to each other tell.
#ifndef ZINC_GGML_PLACES_H
#define ZINC_GGML_PLACES_H

#include <map>
#include <string>

#include "ggml-backend-impl.h"
#include "ggml-impl.h"

namespace zinc {

// A look-up of rows in weights sums nothing, so that it may be anywhere.  Each says one line at most, in the process.
void note_operation(const ggml_tensor *op);  // that a device is asked for
void note_input(const ggml_tensor *source);  // another device's, which a graph here reads
void note_read(const ggml_tensor *tensor, const void *to);  // whose bytes go to the host
void note_graph(ggml_cgraph *graph);  // that was computed: the model is here, where nothing else was said

// Sums whose number of terms is another than in a graph of the same context before, by names, go over tokens.
void note_sums(const ggml_cgraph *graph, std::map<std::string, int64_t> *terms);

}  // namespace zinc
#endif
