// Step 2 of a leaf, the weights: m is the rounded maximum of the scores, and weights are 2**(score - m).
//
// Maxima and sums over the keys change the lanes' roles. Scores and weights go to shared memory as [key][h]; a lane
// then reduces its quarters, which are pairs [h][key mod 4], and every lane combines the four quarters of each vector.

// To wave_floats: the dots of every lane, as [key][h].
void share_dots() {
    for (uint h = 0u; h < VECTORS; ++h) {
        for (uint i = 0u; i < KEY_PAIRS; ++i) {
            wave_floats[wave_begin + key_of(2u * i) * VECTORS + h] = dots[h * KEY_PAIRS + i].x;
            wave_floats[wave_begin + key_of(2u * i + 1u) * VECTORS + h] = dots[h * KEY_PAIRS + i].y;
        }
    }
    barrier();
}

// The vector of the lane's quarter g. Lanes after the last quarter repeat the last vector; their results are not read.
uint vector_of_quarter(uint g) {
    return min(g * (LANES / WEIGHT_PARTIALS) + lane / WEIGHT_PARTIALS, VECTORS - 1u);
}

// To state.m, to dots and wave_floats (the weights), and to quarters (sums of weights), from the scores in dots.
void find_weights(Leaf leaf) {
    uint quarter = lane % WEIGHT_PARTIALS;
    share_dots();
    for (uint g = 0u; g < LANE_QUARTERS; ++g) {
        uint h = vector_of_quarter(g);
        quarters[g] = EMPTY_M;
        for (uint t = 0u; t < KEYS_PER_LEAF; t += WEIGHT_PARTIALS) {
            quarters[g] = max(quarters[g], wave_floats[wave_begin + (t + quarter) * VECTORS + h]);
        }
    }
    barrier();
    for (uint g = 0u; g < LANE_QUARTERS; ++g) {
        wave_floats[wave_begin + g * LANES + lane] = quarters[g];
    }
    barrier();
    for (uint h = 0u; h < VECTORS; ++h) {
        uint first = wave_begin + h * WEIGHT_PARTIALS;
        state.m[h] = roundEven(max(max(wave_floats[first], wave_floats[first + 1u]),
                                   max(wave_floats[first + 2u], wave_floats[first + 3u])));
    }
    barrier();
    for (uint i = 0u; i < KEY_PAIRS; ++i) {
        bvec2 seen = present(leaf, i);
        for (uint h = 0u; h < VECTORS; ++h) {
            vec2 s = dots[h * KEY_PAIRS + i];
            if (MASK != 0u) {
                seen = greaterThan(s, vec2(EMPTY_M));
            }
            vec2 p = mix(vec2(0.0), vec2(weight(s.x, state.m[h]), weight(s.y, state.m[h])), seen);
            if (FUSED || doubled(V_STORAGE)) {
                precise vec2 scaled = p * weight_scale();
                p = scaled;
            }
            dots[h * KEY_PAIRS + i] = p;
        }
    }
    share_dots();
    for (uint g = 0u; g < LANE_QUARTERS; ++g) {
        uint h = vector_of_quarter(g);
        precise float sum = 0.0;
        for (uint t = 0u; t < KEYS_PER_LEAF; t += WEIGHT_PARTIALS) {
            sum = sum + wave_floats[wave_begin + (t + quarter) * VECTORS + h];
        }
        quarters[g] = sum;
    }
}

// The sum of a leaf's weights, from the sums of its quarters.
float sum_of_quarters(vec2 q01, vec2 q23) {
    precise float c01 = q01.x + q01.y;
    precise float c23 = q23.x + q23.y;
    precise float sum = c01 + c23;
    if (FUSED || doubled(V_STORAGE)) {
        sum = sum * weight_unscale();
    }
    return sum;
}
