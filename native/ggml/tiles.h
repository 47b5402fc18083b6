// The tiles of products: which kernel a product takes, and how workgroups share its rows, columns and superblocks.
#pragma once
#include "recording.h"

namespace zinc {

constexpr uint64_t MOST_VECTOR_ROWS = 8;  // rows of x in a vector product
constexpr uint64_t LEAST_TILE = 16;       // columns

// The facts that all dispatches of a product share.
struct Product {
    const ggml_tensor *op;
    Bound y, added;
    bool adds;
    bool is_vector, by_units;  // by a vector kernel, for few rows of x; by matrix units
    uint64_t columns;  // is_vector: of a workgroup; otherwise about how many columns a matrix is multiplied with
    Bound ids;         // of experts; without experts the result
    Quantized x;       // if the weights are quantized
    uint32_t glu;      // 1 + the GLU_OP of two products of x, whose result is int8; 0: a single product
    const ggml_tensor *up;  // the second weights of a GLU; op has the gate's
};

inline bool has_experts(const ggml_tensor *op) { return op->op == GGML_OP_MUL_MAT_ID; }

mul_mat_constants tile_constants(const Product &p, uint64_t rows);  // rows: of w
mul_mat_vec_constants vector_constants(const Device &device, const Product &p);
bool uses_units(const Device &device, const Product &p);  // whether matrix units can compute the product faster
mul_mat_units_constants units_constants(const Device &device, const Product &p);  // zeros: the units cannot
uint32_t columns_of_tile(const Device &device, const Product &p);

}  // namespace zinc
