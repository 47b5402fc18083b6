// A lane turns its block of 32 float32 values into the block's float16 numbers and the stored number of each value. The
// including shader says with is() which type the block has.
//
// The procedure is that of cache/blocks.py, with one rounding per operation. Operands and results of float operations
// are 0 or normal numbers, because a value is 0 or has a magnitude of 2**-40 to 2**60.

const float CUBES = 256.0;  // iq4_nl sums x**3 of multiples of x, so that no difference of the sums is denormal
const uint SIGN = 0x80000000u;

shared uint staged[WAVE * BLOCK];
vec2 sums = vec2(0.0);  // iq4_nl: the sums of weight * t * x and of weight * t * t

// Where value i of a lane's block lies in shared memory: for the same i, lanes use different banks.
uint staged_at(uint lane, uint i) {
    return lane * BLOCK + ((i + lane) % BLOCK);
}

// A float as an integer of the same order, in which zeros of either sign are equal.
int ordered(uint x) {
    int magnitude = int(x & ~SIGN);
    return x < SIGN ? magnitude : -magnitude;
}

// The float16 numbers of a block (its scale in the low bits, its minimum above), and the float32 numbers of the stored
// number (x - least) * inverse + offset of a value x.
struct Measures {
    uint halves;
    float least;
    float inverse;
    float offset;
};

Measures measure(uint lane) {
    uint most = staged[staged_at(lane, 0u)], least = most, extreme = 0u;  // of the largest magnitude, the first
    for (uint i = 0u; i < BLOCK; ++i) {
        uint x = staged[staged_at(lane, i)];
        extreme = (x & ~SIGN) > (extreme & ~SIGN) ? x : extreme;
        most = ordered(x) > ordered(most) ? x : most;
        least = ordered(x) < ordered(least) ? x : least;
    }
    bool wide = is(STORAGE_Q5_0) || is(STORAGE_Q5_1);
    if (is(STORAGE_Q4_1) || is(STORAGE_Q5_1)) {
        precise float range = uintBitsToFloat(most) - uintBitsToFloat(least);
        uint whole = ordered(most) == ordered(least) ? 0u : floatBitsToUint(range);
        uint d = divide(whole, floatBitsToUint(wide ? 31.0 : 15.0));
        uint halves = to_float16(d, 0) | to_float16(least, 0) << 16;
        return Measures(halves, uintBitsToFloat(least), inverse(d), 0.5);
    }
    if (is(STORAGE_Q8_0)) {
        uint d = divide(extreme & ~SIGN, floatBitsToUint(127.0));
        return Measures(to_float16(d, 0), 0.0, inverse(d), 0.0);
    }
    if (is(STORAGE_IQ4_NL)) {  // the scale follows from all numbers
        return Measures(0u, 0.0, inverse(divide(extreme, floatBitsToUint(-127.0))), 0.0);
    }
    uint d = divide(extreme, floatBitsToUint(wide ? -16.0 : -8.0));
    return Measures(to_float16(d, 0), 0.0, inverse(d), wide ? 16.5 : 8.5);
}

int table(uint q) {
    return bitfieldExtract(int(IQ4_NL[q >> 2]), int(8u * (q & 3u)), 8);
}

// The entry of iq4_nl's table nearest to `scaled`, the larger entry of two equally near; 0 for a block of zeros.
uint nearest(float scaled, float x, bool zero) {
    precise float twice = scaled + scaled;
    uint q = 0u;
    for (uint i = 0u; i < 15u; ++i) {
        q += uint(twice >= float(table(i) + table(i + 1u)));
    }
    float t = float(table(q));
    precise float y = x * CUBES;
    precise float weight = y * y;
    precise float entry = weight * t;
    precise vec2 products = vec2(entry * y, entry * t);
    precise vec2 both = sums + products;
    sums = both;
    return zero ? 0u : q;
}

// The float16 numbers of a block, after each value has its number.
uint block_halves(Measures by) {
    bool fitted = is(STORAGE_IQ4_NL) && by.inverse != 0.0;
    return fitted ? to_float16(divide(floatBitsToUint(sums.x), floatBitsToUint(sums.y)), -8) : by.halves;
}

// The stored number of a value of a block.
uint block_number(uint bits, Measures by) {
    float x = uintBitsToFloat(bits);
    precise float shifted = x - by.least;
    precise float scaled = shifted * by.inverse;
    if (is(STORAGE_IQ4_NL)) {
        return nearest(scaled, x, by.inverse == 0.0);
    }
    if (is(STORAGE_Q8_0)) {  // to nearest, ties away from zero
        int whole = int(scaled);
        precise float rest = scaled - float(whole);
        precise float twice = rest + rest;
        return uint(whole + int(twice)) & 0xFFu;
    }
    precise float from_zero = scaled + by.offset;
    return min(uint(from_zero), is(STORAGE_Q5_0) || is(STORAGE_Q5_1) ? 31u : 15u);
}
