#include "tiles.h"

#include <algorithm>

#include "operations.h"
#include "weights.h"

namespace zinc {

constexpr uint64_t MANY = 16;       // products of more rows of x than these use matrix units
constexpr int64_t LARGE = 1 << 20;  // outputs of a product whose large workgroups fill a card

mul_mat_constants tile_constants(const Product &p, uint64_t rows) {
    mul_mat_constants c{};
    c.type = uint32_t(weight_type(p.op->src[0]->type));
    c.tile_rows = rows > 32 ? 64 : 32;
    c.tile_columns = p.columns > LEAST_TILE ? 32 : LEAST_TILE;
    c.own_rows = 4;
    c.own_columns = 4;
    c.workgroup_size = c.tile_rows / c.own_rows * c.tile_columns / c.own_columns;
    c.add = p.adds;
    c.experts = has_experts(p.op);
    return c;
}

// A wave computes a group of rows. If a row has several superblocks, several waves share them.
mul_mat_vec_constants vector_constants(const Device &device, const Product &p) {
    constexpr uint32_t WAVES = 8, SHARED = 16384;  // bytes
    const int type = weight_type(p.op->src[0]->type);
    const uint32_t ahead = type < 0 ? 1 : za_weight_types[type].ahead;
    const uint32_t superblocks = uint32_t((p.op->src[0]->ne[0] + SUPERBLOCK - 1) / SUPERBLOCK);
    const uint32_t waves = device.on_cpu ? 1 : std::min(WAVES, superblocks);
    mul_mat_vec_constants c{};
    c.type = uint32_t(type);
    c.columns = uint32_t(p.columns);
    c.workgroup_size = WAVE * waves;
    c.subgroups = device.wave32;
    c.superblocks = std::min(superblocks, SHARED / (128 * c.columns));
    c.ahead = device.on_cpu ? 0 : superblocks >= ahead * waves ? ahead : 1;
    c.add = p.adds;
    c.experts = has_experts(p.op);
    c.glu = p.glu;
    return c;
}

bool uses_units(const Device &device, const Product &p) {
    return weight_type(p.op->src[0]->type) >= 0 && device.units.m && p.columns > MANY &&
           units_constants(device, p).tile_rows;
}

mul_mat_units_constants units_constants(const Device &device, const Product &p) {
    mul_mat_units_constants c{};
    c.type = uint32_t(weight_type(p.op->src[0]->type));
    c.mat_m = device.units.m;
    c.mat_n = device.units.n;
    c.mat_k = device.units.k;
    c.add = p.adds;
    c.experts = has_experts(p.op);
    return za_units_tile(&c, device.units.subgroup, device.on_cpu, ggml_nelements(p.op) < LARGE) ? c : decltype(c){};
}

uint32_t columns_of_tile(const Device &device, const Product &p) {
    return p.by_units ? units_constants(device, p).tile_columns : tile_constants(p, 0).tile_columns;
}

}  // namespace zinc
