// The table of the operations that the back end serves, and what the files of operations share.
#pragma once
#include <optional>

#include "recording.h"

namespace zinc {

struct Served {
    ggml_op op;
    const char *(*refused)(const Device &device, const ggml_tensor *op);  // why it is left to the CPU, or NULL
    bool (*record)(Recording &recording, ggml_tensor *op);                // false: za_error says why
};

const Served *served_operation(ggml_op op);  // NULL: the operation is not served

// Each family of operations has its table in its own file.
extern const std::vector<Served> ELEMENTWISE, ROWS_OPERATIONS, MOVES, ORDERING, PRODUCTS, RECURRENT;

// An operation that a kernel does on its result: one of FOLLOW_OP_, and its operand or number.
struct Follower {
    uint32_t op;
    Bound other;
    float scale;
    const ggml_tensor *tensor;  // the operand, or NULL
};
// The next operation on `result`, if the kernel of `result` can do it, too. *result becomes the follower's result. x:
// the tensors that the kernel reads, the operand of a first follower among them. FOLLOW_OP_NONE: there is no such
// operation, or it would overwrite rows of x that are still to be read.
Follower follower(Recording &recording, std::initializer_list<const ggml_tensor *> x, const ggml_tensor **result,
                  bool scale);

// Whether the router that begins with this SOFT_MAX, SIGMOID or ARGSORT was recorded. No value: no router begins here.
std::optional<bool> record_route(Recording &recording, ggml_tensor *first);

// A sum of experts' results, which has its own dispatch or is a part of a norm's dispatch.
struct ExpertsSum : Experts {
    sum_experts_params params;
    za_place places[4];
};
bool record_sum(Recording &recording, const ExpertsSum &sum);
// Records a sum and its norm, in one dispatch or two. sum NULL: the norm's operand exists already.
bool record_norm_of(Recording &recording, ggml_tensor *norm, const ExpertsSum *sum);
// Records the products of experts' results with their weights, which begin with this MUL, and their sums.
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

// Whether a kernel may write the tensor word by word. A tensor of 16-bit elements must be whole words, except the last.
inline bool in_words(const ggml_tensor *t) {
    return ggml_type_size(t->type) == 4 || (ggml_is_contiguous(t) && t->view_offs % 4 == 0);
}

inline bool is_product(const ggml_tensor *op) { return op->op == GGML_OP_MUL_MAT || op->op == GGML_OP_MUL_MAT_ID; }

inline const char *f32_refused(const Device &, const ggml_tensor *op) {
    return is_f32(op) && is_f32(op->src[0]) && is_f32(op->src[1]) ? nullptr : "type";
}

}  // namespace zinc
