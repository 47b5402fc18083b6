// a * b + c, the step of a dot product and of a sum of weighted values: rounded twice, or, in arithmetic "fused", once.
//
// ARITHMETIC, a specialization constant, is CANONICAL; FUSED_NATIVE if the device's fma() rounds once, or else
// FUSED_EMULATED, with the same result; or INTEGER_SUMS, whose products and sums are integers that float32 holds, so
// that fma() is exact in any case.

const bool FUSED = ARITHMETIC == FUSED_NATIVE || ARITHMETIC == FUSED_EMULATED;

// The sum of two numbers, and the part that its rounding lost (Knuth).
vec2 two_sum(vec2 a, vec2 b, out vec2 lost) {
    precise vec2 sum = a + b;
    precise vec2 b_part = sum - a;
    precise vec2 a_part = sum - b_part;
    precise vec2 a_lost = a - a_part;
    precise vec2 b_lost = b - b_part;
    precise vec2 both_lost = a_lost + b_lost;
    lost = both_lost;
    return sum;
}

// a * b + c, rounded once (Boldo, Melquiond). The product has two parts (Dekker), and both sums have the parts that
// they lose. The losses are added by rounding to odd, so that the last sum rounds as if nothing had been rounded
// before. This needs parts that are 0 or normal: a * b is a multiple of 2**-126, and no sum reaches 2**127.
vec2 fma_emulated(vec2 a, vec2 b, vec2 c) {
    vec2 a_high = uintBitsToFloat(floatBitsToUint(a) & 0xFFFFF000u);
    vec2 b_high = uintBitsToFloat(floatBitsToUint(b) & 0xFFFFF000u);
    precise vec2 a_low = a - a_high, b_low = b - b_high;
    precise vec2 product = a * b;
    precise vec2 high = a_high * b_high, cross = a_low * b_high, other = a_high * b_low, low = a_low * b_low;
    precise vec2 rest = product - high;
    rest = rest - cross;
    rest = rest - other;
    rest = low - rest;
    vec2 c_lost, sum_lost;
    vec2 small = two_sum(c, rest, c_lost);
    vec2 sum = two_sum(product, small, sum_lost);
    vec2 lost;
    vec2 tail = two_sum(c_lost, sum_lost, lost);
    // Rounding to odd: an even tail that lost something moves by one unit towards it.
    uvec2 bits = floatBitsToUint(tail);
    uvec2 step = uvec2((ivec2(bits ^ floatBitsToUint(lost)) >> 31) | 1);
    uvec2 inexact = uvec2(notEqual(lost, vec2(0.0))) & ~bits & 1u;
    precise vec2 rounded = sum + uintBitsToFloat(bits + step * inexact);
    return rounded;
}

vec2 multiply_add(vec2 a, vec2 b, vec2 c) {
    if (ARITHMETIC == FUSED_EMULATED) {
        return fma_emulated(a, b, c);
    }
    if (ARITHMETIC != CANONICAL) {
        precise vec2 sum = fma(a, b, c);
        return sum;
    }
    precise vec2 product = a * b;
    precise vec2 sum = c + product;
    return sum;
}
