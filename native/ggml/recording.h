// The recording of a graph of ggml's: how kernels bind its tensors, and the dispatches of its operations.
#pragma once
#include <initializer_list>
#include <map>

#include "fusions.h"
#include "memory.h"
#include "plan.h"

namespace zinc {

// A tensor as a kernel binds it: the bytes, and the offset, sizes and steps of its elements in these bytes.
struct Bound {
    za_place place;
    tensor view;
};

// The tensor that was the source of a copy. The copy is valid until a node writes to the tensor's bytes.
struct Source {
    VkBuffer buffer;
    size_t begin, end;
    int64_t ne[4];
    size_t nb[4];
    explicit Source(const ggml_tensor *t);
    Source() = default;
    bool is(const ggml_tensor *t) const;
};

// The rows of a product's second operand as int8.
struct Quantized : Source {
    Scratch q, scales;
};

// The list that BY_EXPERT makes of a tensor of ids.
struct Grouped : Source {
    uint32_t experts, columns;
    Scratch list;
};

uint64_t blocks_of(const ggml_tensor *x);  // blocks of 32 int8 numbers; a row is padded to whole superblocks

class Recording {
  public:
    Recording(Device *device, Plan *plan, ggml_cgraph *graph);

    // Functions that return false have set za_error.
    bool run();
    // independent: the dispatch writes other parts of the result than the dispatch before it, and does not wait for it.
    template <typename Params>
    bool dispatch(int kernel, const Constants &constants, const Params &params, std::initializer_list<za_place> places,
                  bool independent = false) {
        static_assert(sizeof params <= 4 * GRAPH_PARAMS_WORDS, "a record has 64 words");
        return device->recorder->dispatch(kernel, constants, &params, sizeof params, places, independent);
    }
    bool quantized(const ggml_tensor *x, Quantized *copy);
    bool grouped(const ggml_tensor *ids, uint32_t experts, uint32_t columns, Grouped *list);
    // Memory for the result y of a node as int8, which the node's kernel then writes besides y. NULL: no product reads
    // y as int8. packs_rows: the kernel can also write several rows of y as a single row of int8.
    const Quantized *int8_copy(const ggml_tensor *y, bool packs_rows = false);

    // The functions below ask about the graph from the current node on: the node that is being recorded.

    // Whether exactly `uses` nodes read a node's result, and nothing else reads its bytes. A dispatch that does the
    // work of these nodes, too, need not write the result. False for an output of the graph. A node that writes in
    // place (view_src) is hidden only if its source is hidden. The bytes of a view are the bytes of its source.
    bool is_hidden(const ggml_tensor *node, int uses = 1) const;
    // The next node that is no view, if it is the only user of the node's result in any shape; else NULL.
    ggml_tensor *only_user(const ggml_tensor *node) const;
    // The only reader of the current node's result, or of a view of it, if it has this operation and this operand.
    const ggml_tensor *only_reader(ggml_op op, int operand) const;
    // The next node that is no view, or NULL.
    ggml_tensor *after(const ggml_tensor *node) const;
    // Whether no node has overwritten a tensor since an earlier node was recorded.
    bool keeps(const ggml_tensor *t, const ggml_tensor *since) const;
    // Whether a tensor exists before the current node: no node from the current node to `last` makes it.
    bool is_before(const ggml_tensor *t, const ggml_tensor *last) const { return number(root_of(t)) >= number(last); }
    // Whether other nodes use no results of the nodes from the current node to `last`, except `result` and `last`.
    bool hides(const ggml_tensor *last, const ggml_tensor *result) const;
    // The next node, if it copies the states that an operation writes after its outputs. of_sequence: elements of a
    // sequence's state. apart: a sequence's state is written where no other sequence's state is read. rows: the states
    // of which the operation reads a row; an element may be written where the same element is read.
    ggml_tensor *copy_of_states(const ggml_tensor *op, uint64_t outputs, uint64_t of_sequence, uint64_t sequences,
                                bool apart, const ggml_tensor *rows) const;
    // Whether a gated delta net is the only reader of the row of states that the node gathers. The net then reads the
    // row in place, and the node needs no dispatch.
    bool gathers_state(const ggml_tensor *node);
    const ggml_tensor *gathered(const ggml_tensor *state) const {
        return state->view_src && state->view_src == gathered_ ? gathered_ : nullptr;
    }
    // Whether attention is the only reader of the node's result, as q. The node then flushes small magnitudes to 0, for
    // attention, and is_settled is true of its result.
    bool settles_q(const ggml_tensor *node);
    bool is_settled(const ggml_tensor *q) const { return root_of(q) == settled_; }
    bool fuses(Fuse fusion) const { return fuses_[fusion]; }
    bool lay_operands(const ggml_tensor *node);  // converts weights to the layout that the node's kernels read
    void take(ggml_tensor *node);  // the current dispatch does the work of the nodes up to this node

    Device *const device;
    Plan *const plan;
    // The tables of rotations, by the parameters of the rotation.
    std::map<std::vector<char>, za_place> rotations;

  private:
    bool lay(const ggml_tensor *tensor, bool as_pieces);
    bool give_back();
    bool record(ggml_tensor *node);
    void changed(const ggml_tensor *node);
    int number(const ggml_tensor *node) const;  // from the current node on; n_nodes: the node is not there
    bool reserve(const ggml_tensor *x, Quantized *copy);

    ggml_cgraph *graph_;
    int current_ = 0;  // the number of the current node
    bool fuses_[FUSES];
    const ggml_tensor *settled_ = nullptr, *gathered_ = nullptr;
    std::vector<Quantized> quantized_;
    std::vector<const ggml_tensor *> lent_;  // weights that lie in pieces only while the graph runs
    std::vector<Grouped> grouped_;
    Quantized int8_copy_{};  // of the current node's result; no buffer: there is none
};

inline const ggml_tensor *shaped(const ggml_tensor *t) {  // the tensor that t reshapes, or t itself
    return t->op == GGML_OP_RESHAPE ? shaped(t->src[0]) : t;
}
size_t unit_of(const ggml_tensor *t);                      // bytes of an element; 2 for blocks
Bound bound(const Device &device, const ggml_tensor *t);   // in elements; blocks count as half words, n[0] as values
tensor dense(const tensor &rows, uint32_t columns);        // the same rows, of `columns` elements each, without gaps
// Takes scratch memory for dense(x.view, columns), of elements of 4 bytes.
bool scratch_rows(const Device &device, const Bound &x, uint32_t columns, Bound *rows);
bool fits(const Device &device, const ggml_tensor *t);     // whether one binding can hold the tensor
bool overlap(const ggml_tensor *a, const ggml_tensor *b);  // whether they have bytes in common
bool is_view(const ggml_tensor *node);                     // whether it computes nothing: a view or a leaf
const char *refused_by(const Device &device, const ggml_tensor *op);  // why an operation is left to the CPU, or NULL

}  // namespace zinc
