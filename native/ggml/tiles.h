// The tiles of products: which of the kernels, and how their workgroups share rows, columns and superblocks.
#pragma once
#include "recording.h"

namespace zinc {

constexpr uint64_t FEW = 8;          // rows of x that vector products take
constexpr uint64_t LEAST_TILE = 16;  // columns

// What the dispatches of an operation have in common.
struct Product {
    const ggml_tensor *op;
    Bound y, added;
    bool adds;
    bool few, units;         // columns come one by one; by matrix units
    uint64_t columns;        // of a workgroup where they are few, else that about so many meet a matrix
    Bound ids;               // of experts; else the result
    Quantized x;             // of quantized weights
};

inline bool has_experts(const ggml_tensor *op) { return op->op == GGML_OP_MUL_MAT_ID; }

mul_mat_constants tile_of(const Product &p, uint64_t rows);  // of w

mul_mat_vec_constants few_of(const Device &device, const Product &p);

bool by_units(const Device &device, const Product &p);  // whether matrix units pay, and have the type

mul_mat_units_constants units_of(const Device &device, const Product &p);  // zeros: these units have not the type

uint32_t columns_of_tile(const Device &device, const Product &p);

}  // namespace zinc
