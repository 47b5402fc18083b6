// Operations of a graph in one dispatch: routers of experts, and the sums of what experts give.
#ifndef ZINC_GGML_ROUTING_H
#define ZINC_GGML_ROUTING_H

#include <optional>

#include "recording.h"

namespace zinc {

// A router that begins with this SOFT_MAX, SIGMOID or ARGSORT; nothing where it is no router's, else whether it was
// recorded.
std::optional<bool> record_route(Recording &recording, ggml_tensor *first);

// The products of experts' results with weights, and their sums, which begin with this MUL.
std::optional<bool> record_sum_experts(Recording &recording, ggml_tensor *first);

}  // namespace zinc
#endif
