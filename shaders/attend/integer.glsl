// Arithmetic "integer": numbers become integers of 12 bits by a power of two, which follows from the largest number.
//
// Values of K and V are the integers of their blocks, as floats without the scale. q comes rounded: every number of a
// row is an integer of at most 2**11 times the row's power of two. So the sums of a block's products of q and k, and of
// a leaf's products of weights and V, are exact in any order, and only a product with a scale rounds.

// Whether a block of K ends before chunk number `chunk`, which is the first chunk of a load or comes after the last.
bool ends_block(uint chunk) {
    return CHUNKS_AHEAD * CHUNK == BLOCK || chunk % (BLOCK / CHUNK) == 0u || chunk == K_DIM / CHUNK;
}

vec2 block_dots[INTEGER ? VECTORS * KEY_PAIRS : 1u];  // [h][pair]: the dots of the block so far

// To dots: they gain the dots of the block, times the block's scale.
void add_block_dots() {
    for (uint h = 0u; h < VECTORS; ++h) {
        for (uint i = 0u; i < KEY_PAIRS; ++i) {
            uint slot = h * KEY_PAIRS + i;
            precise vec2 product = block_dots[slot] * vec2(block0[i].scale, block1[i].scale);
            precise vec2 sum = dots[slot] + product;
            dots[slot] = sum;
            block_dots[slot] = vec2(0.0);
        }
    }
}

// A weight times the scale of a block of V, as an integer.
float integer_weight(float p, Block block, float power) {
    precise float w = p * block.scale;
    precise float scaled = w * power;
    return roundEven(scaled);
}

shared float value_powers[INTEGER ? VALUE_POWERS : 1u];  // [wave][h][block of V]
float slice_powers[VECTORS * LANE_SLICES];  // [h][slice] of the lane's slices
const uint POWER_ROUNDS = (VECTORS * V_BLOCKS + LANES - 1u) / LANES;  // pairs (h, block) of a lane
const bool OWN_BLOCK = LANES % V_BLOCKS == 0u;  // all pairs of a lane have the same block
float tops[POWER_ROUNDS];
float scales_ahead[POWER_KEYS];

// To tops: the largest magnitudes of weights times scales of keys t ... t + POWER_KEYS - 1; absent keys weigh 0.
void add_tops(Item item, Leaf leaf, uint t) {
    [[unroll]] for (uint r = 0u; r < POWER_ROUNDS; ++r) {
        uint pair = min(r * LANES + lane, VECTORS * V_BLOCKS - 1u);
        uint block = OWN_BLOCK ? lane % V_BLOCKS : pair % V_BLOCKS;
        [[unroll]] for (uint j = 0u; j < POWER_KEYS && (r == 0u || !OWN_BLOCK); ++j) {
            scales_ahead[j] = v_block(locate(item, leaf, min(t + j, leaf.end - 1u)), block).scale;
        }
        [[unroll]] for (uint j = 0u; j < POWER_KEYS; ++j) {
            precise float w = wave_floats[wave_begin + (t + j) * VECTORS + pair / V_BLOCKS] * scales_ahead[j];
            tops[r] = max(tops[r], abs(w));
        }
    }
}

// To value_powers of the wave: the powers for the weights of its leaf's keys times the scales of each block of V.
// fold_sums has the barrier after it.
void find_value_powers(Item item, Leaf leaf) {
    [[unroll]] for (uint r = 0u; r < POWER_ROUNDS; ++r) {
        tops[r] = 0.0;
    }
    if (has_keys(leaf)) {
        uint t = leaf.begin & ~(POWER_KEYS - 1u);
        [[dont_unroll]] do {
            add_tops(item, leaf, t);
            t += POWER_KEYS;
        } while (t < leaf.end);
    }
    [[unroll]] for (uint r = 0u; r < POWER_ROUNDS; ++r) {
        if (r * LANES + lane < VECTORS * V_BLOCKS) {
            value_powers[wave * VECTORS * V_BLOCKS + r * LANES + lane] = integer_power(tops[r]);
        }
    }
}

// To slice_powers: the powers of the blocks that the lane's slices lie in.
void find_slice_powers(uint slice) {
    for (uint h = 0u; INTEGER && h < VECTORS; ++h) {
        for (uint s = 0u; s < LANE_SLICES; ++s) {
            uint block = min((slice + s * LANES) * SLICE / BLOCK, V_BLOCKS - 1u);
            slice_powers[h * LANE_SLICES + s] = value_powers[(wave * VECTORS + h) * V_BLOCKS + block];
        }
    }
}
