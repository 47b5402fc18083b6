// The fusions: nodes of a graph that are recorded together. FUSIONS lists all; fusions.cpp has their conditions, each of
// which asks Recording::fuses, and the files of the operations have their dispatches.
#pragma once
#include "../graph/vulkan.h"
#include "ggml-impl.h"

namespace zinc {

class Recording;

struct Fusion {
    const char *name;
    const char *nodes;   // /: or; ?: may be missing; operands: numbers of these nodes, and letters of other tensors
    const char *others;  // whose results others may read, too
    uint32_t saves;      // dispatches
};
enum Fuse {
    ADDEND, FOLLOWER, INT8, ROUTER, EXPERTS, SUMMED, CONCAT, ACTIVATED, NORMED, STATES, GATHERED, SETTLED, FUSES
};
extern const Fusion FUSIONS[FUSES];

struct Route {
    const ggml_tensor *logits, *bias, *order;  // order: the first indices of each row of `sorted`
    ggml_tensor *sorted, *result;
    route_constants constants;
    float least, most, factor, added;
};

struct Experts {
    const ggml_tensor *reads[4];  // experts, their weights, and what is added
    ggml_tensor *y;
    uint32_t added;
};

struct Conv {
    const ggml_tensor *reads[4];  // x, what is after it, w, bias
    ggml_tensor *y, *norms[2], *results[2];  // a result is the norm or its SCALE
    ssm_conv_constants constants;
};

// What is added to a product, where the next operation does that and no more.
ggml_tensor *addend(const Recording &r, const ggml_tensor *product, ggml_tensor **sum);
bool is_route(const Recording &r, ggml_tensor *first, Route *route);  // first: SOFT_MAX, SIGMOID or ARGSORT
bool is_sum_of_experts(const Recording &r, ggml_tensor *products, Experts *sum);
ggml_tensor *norm_of(const Recording &r, const Experts &sum);  // the next node, or NULL
// Whether this norm is made in the sum's dispatch: it spares what that reads and writes. other: a follower's operand.
bool norm_fuses_sum(const Experts &sum, const ggml_tensor *norm, const ggml_tensor *other);
Conv conv_with(const Recording &r, ggml_tensor *op);

}  // namespace zinc
