// FLASH_ATTN_EXT through the C library: what is taken, and how a call is made of it.
#ifndef ZINC_GGML_ATTENTION_H
#define ZINC_GGML_ATTENTION_H

#include "device.h"
#include "ggml-backend.h"
#include "lists.h"

namespace zinc {

// Opens the library for the shape, so that what is taken can be run.
bool attention_supported(Device *device, const ggml_tensor *op);

// The lists of the last operation: all layers of a step have the same, unless their cells were written in other orders.
class Plan {
  public:
    // False where the mask has a NaN or +inf.
    bool make(const ggml_tensor *op);
    const Lists &lists() const { return lists_; }

  private:
    std::vector<uint32_t> order_;  // what lists_ was made of
    std::vector<char> mask_;
    std::vector<uint64_t> numbers_;
    Lists lists_;
    bool valid_ = false;
};

ggml_status attend(Device *device, Plan *plan, ggml_tensor *op);  // the reason of a failure is on stderr

}  // namespace zinc
#endif
