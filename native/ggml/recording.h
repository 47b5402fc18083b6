// A graph of ggml's that is recorded: how its tensors are bound, and the dispatches of its operations.
#ifndef ZINC_GGML_RECORDING_H
#define ZINC_GGML_RECORDING_H

#include <initializer_list>
#include <map>

#include "fusions.h"
#include "memory.h"
#include "plan.h"

namespace zinc {

// Where a tensor is for a kernel.
struct Bound {
    za_place place;
    tensor at;  // in units of its elements
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
    uint32_t experts, columns, tiles;
    Scratch list;
};

struct Groups {
    uint32_t of[3];
};
Groups grid(uint64_t groups);  // x first, then y
uint64_t blocks_of(const ggml_tensor *x);  // of 32 numbers as int8: a row has whole superblocks

class Recording : public Nodes {
  public:
    Recording(Device *device, Plan *plan, ggml_cgraph *graph);

    // Each false: za_error says why.
    bool run();
    // beside: it writes other parts of what the dispatch before it writes.
    template <typename Params>
    bool dispatch(int kernel, const Constants &constants, const Params &params, std::initializer_list<za_place> places,
                  uint32_t written, Groups groups, bool beside = false) {
        static_assert(sizeof params <= 4 * GRAPH_PARAMS_WORDS, "a record has 64 words");
        return dispatch_words(kernel, constants, &params, sizeof params, places, written, groups, beside);
    }
    bool quantized(const ggml_tensor *x, Quantized *found);
    bool grouped(const ggml_tensor *ids, uint32_t experts, uint32_t columns, Grouped *found);
    // Where a node's kernel is to write its result y as int8, too, as a product reads it, or NULL.
    const Quantized *beside(const ggml_tensor *y, bool joined = false);
    void take(ggml_tensor *node);  // it is recorded together with the one before

    Device *const device;
    Plan *const plan;
    // Where the words are that a rotation's frequencies make, by its parameters.
    std::map<std::vector<char>, za_place> rotations;

  private:
    bool dispatch_words(int kernel, const Constants &constants, const void *params, size_t bytes,
                        std::initializer_list<za_place> places, uint32_t written, const Groups &groups,
                        bool beside);
    bool lay(const ggml_tensor *tensor, bool as_pieces);
    bool lay_operands(const ggml_tensor *node);
    bool record(ggml_tensor *node);
    void changed(const ggml_tensor *node);
    bool reserve(const ggml_tensor *x, Quantized *made);

    std::vector<Quantized> quantized_;
    std::vector<Grouped> grouped_;
    Quantized beside_{};  // of the node that is recorded, where it has one
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
#endif
