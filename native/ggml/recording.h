// A graph of ggml's that is recorded: how its tensors are bound, and the dispatches of its operations.
#pragma once
#include <initializer_list>
#include <map>

#include "fusions.h"
#include "memory.h"
#include "plan.h"

namespace zinc {

// Where a tensor is for a kernel.
struct Bound {
    za_place place;
    tensor view;  // in units of its elements
};

// A tensor that lies in a buffer while nothing is written there.
struct Source {
    VkBuffer buffer;
    size_t begin, end;
    int64_t ne[4];
    size_t nb[4];
    explicit Source(const ggml_tensor *t);
    Source() = default;
    bool is(const ggml_tensor *t) const;
};

// Rows of a product's second operand as int8.
struct Quantized : Source {
    Scratch q, scales;
};

// BY_EXPERT's list of the ids that a tensor has.
struct Grouped : Source {
    uint32_t experts, columns;
    Scratch list;
};

uint64_t blocks_of(const ggml_tensor *x);  // of 32 numbers as int8: a row has whole superblocks

class Recording {
  public:
    Recording(Device *device, Plan *plan, ggml_cgraph *graph);

    // Each false: za_error says why.
    bool run();
    // beside: it writes other parts of what the dispatch before it writes.
    template <typename Params>
    bool dispatch(int kernel, const Constants &constants, const Params &params, std::initializer_list<za_place> places,
                  bool independent = false) {
        static_assert(sizeof params <= 4 * GRAPH_PARAMS_WORDS, "a record has 64 words");
        return device->recorder->dispatch(kernel, constants, &params, sizeof params, places, independent);
    }
    bool quantized(const ggml_tensor *x, Quantized *copy);
    bool grouped(const ggml_tensor *ids, uint32_t experts, uint32_t columns, Grouped *list);
    // Where a node's kernel is to write its result y as int8, too, as a product reads it, or NULL. joined: also where a
    // row of x is several rows of y, which are whole blocks.
    const Quantized *int8_copy(const ggml_tensor *y, bool packs_rows = false);

    // Whether so many users read a node's result, and nothing else reads its bytes, so that a dispatch that has these
    // users, too, need not write them: it is no output, and if in place, then of what nothing else uses, from the node
    // that is recorded on. A view's bytes are its source's.
    bool is_hidden(const ggml_tensor *node, int uses = 1) const;
    // The next node that is no view, if it alone uses the node's result, or that in another shape; else NULL.
    ggml_tensor *only_user(const ggml_tensor *node) const;
    // The node of this operation that alone reads, as this operand, what the node that is recorded gives, or a view.
    const ggml_tensor *only_reader(ggml_op op, int operand) const;
    // The node after one that is no view, or NULL.
    ggml_tensor *after(const ggml_tensor *node) const;
    // Whether a node's operands lie where they were when it was recorded.
    bool has_sources(const ggml_tensor *node) const;
    // Whether no node from the one that is recorded to `last` makes a tensor.
    bool is_before(const ggml_tensor *t, const ggml_tensor *last) const { return number(root_of(t)) >= number(last); }
    // Whether from the node that is recorded to `last`, nothing but the results of these two is used by others.
    bool hides(const ggml_tensor *last, const ggml_tensor *result) const;
    // The next node, if it copies the states after an operation's scores. of_sequence: elements of a sequence's state.
    // apart: no other sequence's state is read where one is written. rows: of states, one of which is read; each element
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
    bool is_settled(const ggml_tensor *q) const { return root_of(q) == settled_; }
    bool fuses(Fuse fusion) const { return fuses_[fusion]; }
    void take(ggml_tensor *node);  // it is recorded together with the one before

    Device *const device;
    Plan *const plan;
    // Where the words are that a rotation's frequencies make, by its parameters.
    std::map<std::vector<char>, za_place> rotations;

  private:
    bool lay(const ggml_tensor *tensor, bool as_pieces);
    bool give_back();
    bool lay_operands(const ggml_tensor *node);
    bool record(ggml_tensor *node);
    void changed(const ggml_tensor *node);
    int number(const ggml_tensor *node) const;  // from the one that is recorded on; n_nodes: none
    bool reserve(const ggml_tensor *x, Quantized *copy);

    ggml_cgraph *graph_;
    int at_ = 0;        // the node that is recorded
    bool fuses_[FUSES];
    const ggml_tensor *settled_ = nullptr, *gathered_ = nullptr;
    std::vector<Quantized> quantized_;
    std::vector<const ggml_tensor *> lent_;  // that lie in pieces while the graph runs
    std::vector<Grouped> grouped_;
    Quantized int8_copy_{};  // of the node that is recorded, where it has one
};

inline const ggml_tensor *shaped(const ggml_tensor *t) {       // the tensor that has this or another shape here
    return t->op == GGML_OP_RESHAPE ? shaped(t->src[0]) : t;
}
size_t unit_of(const ggml_tensor *t);                           // bytes of an element; of blocks 2
Bound bound(const Device &device, const ggml_tensor *t);        // its elements; of blocks half words, n[0] values
bool fits(const Device &device, const ggml_tensor *t);          // one binding holds it
bool overlap(const ggml_tensor *a, const ggml_tensor *b);       // of their bytes
bool is_view(const ggml_tensor *node);                          // or a leaf: nothing is computed
const char *refused_by(const Device &device, const ggml_tensor *op);  // why an operation is left to the CPU, or NULL

}  // namespace zinc
