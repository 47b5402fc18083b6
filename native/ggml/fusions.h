// The fusions: nodes of a graph that are recorded together. FUSIONS lists them. fusions.cpp has their conditions, each
// of which asks Recording::fuses. The files of the operations have their dispatches.
#pragma once
#include "../graph/vulkan.h"
#include "ggml-impl.h"

namespace zinc {

class Recording;

struct Fusion {
    const char *name;
    const char *nodes;   // "RMS_NORM(x) MUL(0, a)": MUL of node 0 by another tensor a; / is "or", ? "may be missing"
    const char *others;  // the nodes whose results other nodes may read, too
    uint32_t saves;      // the most dispatches that the fusion saves
};
enum Fuse {
    ADDEND, GATED, RMS, FOLLOWER, TURNED, INT8, ROUTER, EXPERTS, SUMMED, CONCAT, ACTIVATED, NORMED, STATES, GATHERED,
    SETTLED, FUSES
};
extern const Fusion FUSIONS[FUSES];

struct Route {
    const ggml_tensor *logits, *bias, *order;  // order: the first indices of each row of `sorted`
    ggml_tensor *sorted, *result;
    route_constants constants;
    float least, most, factor, added;
};

struct Experts {
    const ggml_tensor *reads[4];  // the experts' results, their weights, and up to two tensors that are added
    ggml_tensor *y;
    uint32_t added;
};

struct Conv {
    const ggml_tensor *reads[4];  // x (of a CONCAT: both operands), w, bias
    ggml_tensor *y, *norms[2], *results[2];  // a result is the norm or the norm's SCALE
    ssm_conv_constants constants;
};

// The tensor that the next operation adds to a product, and the sum; NULL: the next operation adds nothing.
ggml_tensor *addend(const Recording &r, const ggml_tensor *product, ggml_tensor **sum);
// The GLU of a product and the next product, if a dispatch can make the GLU as int8 for its only reader; or NULL.
ggml_tensor *glu_of(const Recording &r, const ggml_tensor *product);
// The MUL by weights of an RMS_NORM of a single row, if the product that reads the MUL can make both; or NULL.
const ggml_tensor *rms_of(const Recording &r, const ggml_tensor *product);
// The ROPE of a norm, if the norm's dispatch can make the ROPE, too; or NULL. reads: the tensors that the norm reads.
ggml_tensor *rope_of_norm(const Recording &r, std::initializer_list<const ggml_tensor *> reads,
                          const ggml_tensor *norm);
bool is_route(const Recording &r, ggml_tensor *first, Route *route);  // first: SOFT_MAX, SIGMOID or ARGSORT
bool is_sum_of_experts(const Recording &r, ggml_tensor *products, Experts *sum);
ggml_tensor *norm_of(const Recording &r, const Experts &sum);  // the next node, or NULL
// Whether the norm and the sum are a single dispatch: the norm's result overlaps no tensor that the sum reads or
// writes. other: the operand of the norm's follower.
bool norm_fuses_sum(const Experts &sum, const ggml_tensor *norm, const ggml_tensor *other);
Conv conv_with(const Recording &r, ggml_tensor *op);

}  // namespace zinc
