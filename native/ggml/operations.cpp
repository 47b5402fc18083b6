#include "operations.h"

#include <array>

#include "attention.h"
#include "weights.h"

namespace zinc {

static const char *attention_refused(const Device &device, const ggml_tensor *op) {
    return attention_supported(const_cast<Device *>(&device), op) ? nullptr : "";  // attention_supported says why
}

static std::array<const Served *, GGML_OP_COUNT> all() {
    static const std::vector<Served> attention = {{GGML_OP_FLASH_ATTN_EXT, attention_refused, attend}};
    std::array<const Served *, GGML_OP_COUNT> table{};
    for (const std::vector<Served> *family :
         {&ELEMENTWISE, &ROWS_OPERATIONS, &MOVES, &ORDERING, &PRODUCTS, &RECURRENT, &attention})
        for (const Served &served : *family) table[served.op] = &served;
    return table;
}

const Served *served_operation(ggml_op op) {
    static const std::array<const Served *, GGML_OP_COUNT> table = all();
    return table[op];
}

const char *refused_by(const Device &device, const ggml_tensor *op) {
    const Served *served = served_operation(op->op);
    if (!served) return "operation";
    if (const char *reason = served->refused(device, op)) return reason;
    const bool reads_pieces = is_product(op) || op->op == GGML_OP_GET_ROWS;
    if (reads_pieces && !op->src[0]->view_src && weight_type(op->src[0]->type) >= 0 && stay_blocks(op->src[0]))
        return "another device reads its weights";
    if (op->op == GGML_OP_FLASH_ATTN_EXT) return fits(device, op) ? nullptr : "size";  // attention checks K, V and q
    if (!is_product(op) && !fits(device, op)) return "size";  // products check their weights and results
    for (int i = is_product(op) ? 1 : 0; i < GGML_MAX_SRC; ++i)
        if (op->src[i] && !fits(device, op->src[i])) return "size";
    return nullptr;
}

}  // namespace zinc
