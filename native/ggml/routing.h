// Operations of a graph in one dispatch: routers of experts, and the sums of what experts give.
#ifndef ZINC_GGML_ROUTING_H
#define ZINC_GGML_ROUTING_H

#include <optional>

#include "recording.h"

namespace zinc {

// A router that begins with this SOFT_MAX, SIGMOID or ARGSORT; nothing where it is no router's, else whether it was
// recorded.
std::optional<bool> record_route(Recording &recording, ggml_tensor *first);

// A sum of experts' results, as a dispatch or as what a norm makes first.
struct ExpertsSum : Experts {
    sum_experts_params params;
    za_place places[4];
};
bool record_sum(Recording &recording, const ExpertsSum &sum);
bool record_norm_of(Recording &recording, ggml_tensor *norm, const ExpertsSum &sum);  // both, in one dispatch or two

// The products of experts' results with weights, and their sums, which begin with this MUL.
std::optional<bool> record_sum_experts(Recording &recording, ggml_tensor *first);

}  // namespace zinc
#endif
