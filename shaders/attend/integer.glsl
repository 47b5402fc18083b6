// Arithmetic "integer": numbers rounded to integers of 12 bits, by a power of two that their largest has.
//
// K and V have the integers of their blocks as floats, without the scale.  q comes rounded: every number of a row is an
// integer of at most 2**11 times one power of two.  So a block's products of q and k, and a leaf's of weights and V, and
// their sums, are exact in any order, and only what meets a scale rounds.

// The power that makes numbers of at most `top` integers of at most 2**(INTEGER_BITS + 1).  A top of 0 counts as 2**-107.
float integer_power(float top) {
    uint exponent = max(floatBitsToUint(top) & 0x7F800000u, 20u << 23);
    return uintBitsToFloat((254u + INTEGER_BITS << 23) - exponent);
}

float inverse_power(float power) {
    return uintBitsToFloat((254u << 23) - floatBitsToUint(power));
}

// Whether chunk number `chunk` begins a block of K, or is behind the last one.
bool ends_block(uint chunk) {
    return chunk % (BLOCK / CHUNK) == 0u || chunk == K_DIM / CHUNK;
}

// A weight times the scale of a block of V, as an integer.
float integer_weight(float p, Block block, float power) {
    precise float w = p * block.scale;
    precise float scaled = w * power;
    return roundEven(scaled);
}

shared float value_powers[INTEGER ? VALUE_POWERS : 1u];  // [wave][h][block of V]
float slice_powers[VECTORS * LANE_SLICES];  // [h][slice] of the lane's slices

// To value_powers of the wave: those of the weights of its leaf's keys, times the scales of each block of V.  fold_sums
// has the barrier behind it.
void find_value_powers(Item item, Leaf leaf) {
    for (uint at = lane; INTEGER && at < VECTORS * V_BLOCKS; at += LANES) {
        uint h = at / V_BLOCKS, block = at % V_BLOCKS;
        float top = 0.0;
        for (uint t = leaf.begin; t < leaf.count; ++t) {
            precise float w = weights[own + t * VECTORS + h] * v_block(locate(item, leaf, t), block).scale;
            top = max(top, abs(w));
        }
        value_powers[wave * VECTORS * V_BLOCKS + at] = integer_power(top);
    }
}

// To slice_powers.
void find_slice_powers(uint slice) {
    for (uint h = 0u; INTEGER && h < VECTORS; ++h) {
        for (uint s = 0u; s < LANE_SLICES; ++s) {
            uint block = min((slice + s * LANES) * SLICE / BLOCK, V_BLOCKS - 1u);
            slice_powers[h * LANE_SLICES + s] = value_powers[(wave * VECTORS + h) * V_BLOCKS + block];
        }
    }
}
