// The fusions: which nodes of a graph are recorded together. FUSIONS lists all of them; fusions.cpp has the condition of
// each, and asks `fuses` in it. The dispatches are in the files of the operations.
#ifndef ZINC_GGML_FUSIONS_H
#define ZINC_GGML_FUSIONS_H

#include <initializer_list>

#include "../graph/vulkan.h"
#include "ggml-impl.h"

namespace zinc {

struct Fusion {
    const char *name;
    const char *nodes;   // /: or; ?: may be missing; operands are numbers of these nodes and letters of other tensors
    const char *others;  // who else may read what these nodes but the last compute
    uint32_t saves;      // dispatches
};

enum Fuse { ADDEND, FOLLOWER, INT8, ROUTER, EXPERTS, SUMMED, CONCAT, ACTIVATED, NORMED, STATES, GATHERED, SETTLED, FUSES };
extern const Fusion FUSIONS[FUSES];

// ADD, MUL or SCALE of a node's result, and the other operand; or NULL.
struct Next {
    ggml_tensor *op;
    const ggml_tensor *other;
};

// A router, and the numbers that its dispatch takes.
struct Route {
    const ggml_tensor *logits, *bias, *order;  // order: the first indices of each row of `sorted`
    ggml_tensor *sorted, *result;
    route_constants constants;
    float least, most, factor, added;
};

// Products of experts' results with weights, and their sum.
struct Experts {
    const ggml_tensor *reads[4];  // experts, their weights, and what is added
    ggml_tensor *y;
    uint32_t added;
    // Whether its norm is made in the same dispatch: the norm, with a follower's other operand, spares what that reads.
    bool join(const ggml_tensor *norm, const ggml_tensor *other) const;
};

// A convolution, and up to two norms of its rows, each with SCALE or without.
struct Conv {
    const ggml_tensor *reads[4];  // x, what is after it, w, bias
    ggml_tensor *y, *norms[2], *results[2];
    ssm_conv_constants constants;
};

// The nodes of a graph from the one that is recorded on.
class Nodes {
  public:
    explicit Nodes(ggml_cgraph *graph);

    Next addend(const ggml_tensor *product) const;
    // reads: tensors of which the dispatch reads rows while it writes others.
    Next follower(std::initializer_list<const ggml_tensor *> reads, const ggml_tensor *node, bool scale) const;
    // The operand of a near product that y, or y in another shape, is. joined: also several rows of y, which are whole
    // blocks, as one.
    const ggml_tensor *product_operand(const ggml_tensor *y, bool joined) const;
    bool route(ggml_tensor *first, Route *route) const;  // first: SOFT_MAX, SIGMOID or ARGSORT
    bool experts(ggml_tensor *products, Experts *experts) const;
    ggml_tensor *norm_of(const Experts &sum) const;
    Conv conv(ggml_tensor *op) const;
    // The next node, if it copies the states behind an operation's scores. of_sequence: elements of a sequence's state.
    // apart: no other sequence's state is read where one is written. rows: of states, of which one is read; each element
    // is written where it, or no other, was read.
    ggml_tensor *copy_of_states(const ggml_tensor *op, uint64_t scores, uint64_t of_sequence, uint64_t sequences,
                                bool apart, const ggml_tensor *rows) const;
    // Whether only a gated delta net reads a row of states that the node gathers: it then takes it from where it lies.
    bool gathers_state(const ggml_tensor *node);
    const ggml_tensor *gathered(const ggml_tensor *state) const {
        return state->view_src && state->view_src == gathered_ ? gathered_ : nullptr;
    }
    // Whether only attention reads the node's result, as q: it is then made as attention takes it, and known for it.
    bool settles_q(const ggml_tensor *node);
    bool is_settled(const ggml_tensor *q) const;

    bool fuses(Fuse fusion) const { return fuses_[fusion]; }

    // Whether so many users read a node's result, and nothing else reads its bytes, so that a dispatch that has these
    // users, too, need not write them: it is no output, and if in place, then of what nothing else uses, from the node
    // that is recorded on. A view's bytes are its source's.
    bool is_hidden(const ggml_tensor *node, int uses = 1) const;
    // Whether from the node that is recorded to `last`, nothing but the results of these two is used by others.
    bool hides(const ggml_tensor *last, const ggml_tensor *result) const;
    // The next node that is no view, if it alone uses the node's result, or that in another shape; else NULL.
    ggml_tensor *only_user(const ggml_tensor *node) const;
    // The node of an operation that alone reads a node's result or a view of it, as this operand; else NULL.
    const ggml_tensor *only_reader(const ggml_tensor *node, ggml_op op, int operand) const;
    // The node after one that is no view, or NULL.
    ggml_tensor *after(const ggml_tensor *node) const;
    // Whether a node's operands lie where they were when it was recorded.
    bool has_sources(const ggml_tensor *node) const;

  protected:
    ggml_cgraph *const graph_;
    int at_ = 0;  // the node that is recorded

  private:
    int index_of(const ggml_tensor *node) const;  // from at_ on; n_nodes: none
    bool fuses_[FUSES];
    const ggml_tensor *settled_ = nullptr, *gathered_ = nullptr;
};

}  // namespace zinc
#endif
