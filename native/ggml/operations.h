// The operations that are served, in one table.
#pragma once
#include <optional>

#include "recording.h"

namespace zinc {

struct Served {
    ggml_op op;
    const char *(*refused)(const Device &device, const ggml_tensor *op);  // why it is left to the CPU, or NULL
    bool (*record)(Recording &recording, ggml_tensor *op);                 // false: za_error says why
};

const Served *served_operation(ggml_op op);  // NULL: none

// Of a family each, in its file.
extern const std::vector<Served> ELEMENTWISE, ROWS_OPERATIONS, MOVES, ORDERING, PRODUCTS, RECURRENT;

// An operation that is recorded with the one before it: one of FOLLOW_OP_, and its operand or number.
struct Follower {
    uint32_t op;
    Bound other;
    float scale;
    const ggml_tensor *tensor;  // the operand, or NULL
};
// The operation behind `result`, which a kernel makes of x, if the kernel can do it, too: none where it would overwrite
// rows that are still read, of x or of what a first follower has. `result` becomes that operation's.
Follower follower(Recording &recording, std::initializer_list<const ggml_tensor *> x, const ggml_tensor **result,
                  bool scale);

// A router that begins with this SOFT_MAX, SIGMOID or ARGSORT; nothing where it is no router's, else whether it was
// recorded.
std::optional<bool> record_route(Recording &recording, ggml_tensor *first);

// A sum of experts' results, as a dispatch or as what a norm makes first.
struct ExpertsSum : Experts {
    sum_experts_params params;
    za_place places[4];
};
bool record_sum(Recording &recording, const ExpertsSum &sum);
// A norm of the sum, both in one dispatch or two; NULL: of what is there.
bool record_norm_of(Recording &recording, ggml_tensor *norm, const ExpertsSum *sum);
// The products of experts' results with weights, and their sums, which begin with this MUL.
std::optional<bool> record_sum_experts(Recording &recording, ggml_tensor *first);

inline float number_of(const ggml_tensor *op, int i) {
    float number;
    __builtin_memcpy(&number, &op->op_params[i], sizeof number);
    return number;
}

inline int float_type(const ggml_tensor *t) {  // a FLOAT_TYPE_; -1: none
    return t->type == GGML_TYPE_F32 ? FLOAT_TYPE_F32 : t->type == GGML_TYPE_F16 ? FLOAT_TYPE_F16
         : t->type == GGML_TYPE_BF16 ? FLOAT_TYPE_BF16 : -1;
}

inline bool is_f32(const ggml_tensor *t) { return !t || t->type == GGML_TYPE_F32; }

// Whether a kernel may write the tensor by words: where its elements have 16 bits, it is whole words but for the last.
inline bool in_words(const ggml_tensor *t) {
    return ggml_type_size(t->type) == 4 || (ggml_is_contiguous(t) && t->view_offs % 4 == 0);
}

inline bool is_product(const ggml_tensor *op) { return op->op == GGML_OP_MUL_MAT || op->op == GGML_OP_MUL_MAT_ID; }

inline const char *f32_refused(const Device &, const ggml_tensor *op) {
    return is_f32(op) && is_f32(op->src[0]) && is_f32(op->src[1]) ? nullptr : "type";
}

inline uint64_t pieces(uint64_t n, uint64_t size) { return (n + size - 1) / size; }

}  // namespace zinc
