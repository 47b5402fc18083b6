// The algebra of attention states, and the float functions that it needs.
//
// A state (m, l, o) summarizes attention over a set of keys: m is an integer in log2 units at or near the
// largest score, l = sum of 2**(s - m), o = sum of 2**(s - m) v.  Attention itself is o / l; nothing is divided
// before the end, so states of disjoint key sets merge.  Because m is an integer, every rescale is an exact
// power of two and a merge rounds in its one add alone; a power below 2**-48 is 0, and so is a result below 2**-100.
//
// FUSED, of the shader that includes this: how multiply_add rounds.
//
// `precise` (NoContraction) on every float operation: no fused multiply-add, no reassociation, on any driver.

#define NEGATIVE_INFINITY uintBitsToFloat(0xFF800000u)

// 2**d for an integer d <= 0; 0 below the cut-off.
float pow2(float d) {
    return d < CUTOFF ? 0.0 : uintBitsToFloat(uint(int(max(d, CUTOFF)) + 127) << 23);
}

// Magnitudes below 2**-100 become +0, so that neither denormal handling nor the sign of zero can show.
float flush(float x) {
    return abs(x) < FLUSH ? 0.0 : x;
}

vec2 flush(vec2 x) {
    return mix(x, vec2(0.0), lessThan(abs(x), vec2(FLUSH)));
}

// The merge of two states a and b, one component (l, or o) of each.  power_a and power_b are the powers of two that
// bring them to the common m; in merge_scaled, b is so scaled already.
float merge_scaled(float a, float power_a, float b) {
    precise float x = a * power_a;
    precise float sum = x + b;
    return flush(sum);
}

vec2 merge_scaled(vec2 a, float power_a, vec2 b) {
    precise vec2 x = a * power_a;
    precise vec2 sum = x + b;
    return flush(sum);
}

float merge(float a, float power_a, float b, float power_b) {
    precise float scaled = b * power_b;
    return merge_scaled(a, power_a, scaled);
}

vec2 merge(vec2 a, float power_a, vec2 b, float power_b) {
    precise vec2 scaled = b * power_b;
    return merge_scaled(a, power_a, scaled);
}

// A step of a polynomial y of x by Horner's rule.
#define HORNER(x, c) y = y * x; y = y + c;

// 2**(s - m) for a score s <= m + 1/2: an exact power of two times a polynomial on [-1/2, 1/2].
float weight(float s, float m) {
    float whole = roundEven(s);
    precise float x = s - whole;
    precise float y = EXP2_C6;
    HORNER(x, EXP2_C5) HORNER(x, EXP2_C4) HORNER(x, EXP2_C3) HORNER(x, EXP2_C2) HORNER(x, EXP2_C1)
    HORNER(x, EXP2_C0)
    precise float d = whole - m;
    precise float p = y * pow2(d);
    return p;
}

// 1 / x for x >= 1/4: three Newton steps from an integer seed; rcp(1) = 1.
float reciprocal(float x) {
    precise float y = uintBitsToFloat(RCP_SEED - floatBitsToUint(x));
    for (int i = 0; i < 3; ++i) {
        precise float xy = x * y;
        precise float error = 1.0 - xy;
        precise float step = y * error;
        y = y + step;
    }
    return y;
}

// The powers of two that bring two states to the common m = max(ma, mb).
vec2 merge_powers(float ma, float mb) {
    float top = max(ma, mb);
    precise vec2 d = vec2(ma, mb) - top;
    return vec2(pow2(d.x), pow2(d.y));
}

// True for the state of no keys.  l is 0 there and at least 1/2 in every other state.
bool is_empty(float l) {
    return l < 0.25;
}

// Natural log-sum-exp of a state: m ln 2 + ln l.
float natural_lse(float m, float l) {
    uint bits = floatBitsToUint(l);
    int exponent = int(bits >> 23) - 127;
    float mantissa = uintBitsToFloat((bits & 0x7FFFFFu) | 0x3F800000u);
    bool upper = mantissa > SQRT2;
    precise float halved = mantissa * 0.5;
    precise float x = (upper ? halved : mantissa) - 1.0;
    precise float e = m + float(upper ? exponent + 1 : exponent);
    precise float z = x * x;
    precise float y = LN_D7;
    HORNER(x, LN_D6) HORNER(x, LN_D5) HORNER(x, LN_D4) HORNER(x, LN_D3) HORNER(x, LN_D2)
    HORNER(x, LN_D1) HORNER(x, LN_D0)
    y = y * x;
    y = y * z;
    precise float low = e * LN2_LO;
    y = y + low;
    precise float half_z = 0.5 * z;
    y = y - half_z;
    precise float high = e * LN2_HI;
    precise float ln = x + y;
    ln = ln + high;
    return is_empty(l) ? NEGATIVE_INFINITY : ln;
}

// An attention sink is a key with score s and no value.  It is merged into the state (m, l) last; the result is the
// power of two that the state's o has from then on.
float merge_sink(float s, inout float m, inout float l) {
    float whole = roundEven(s);
    vec2 powers = merge_powers(m, whole);
    m = max(m, whole);
    l = merge(l, powers.x, weight(s, whole), powers.y);
    return powers.x;
}

// out = o / l, and 0 for the empty state.  o_power: what merge_sink returned, or 1.
vec2 normalize(vec2 o, float o_power, float l) {
    precise vec2 scaled = o * o_power;
    precise vec2 quotient = flush(scaled) * reciprocal(l);
    return is_empty(l) ? vec2(0.0) : flush(quotient);
}

// Logit softcap: cap * tanh(t / cap) of a scaled score t, in log2 units.
//
// tanh by its odd polynomial where 1 - 2**(-2 |x| log2 e) would cancel, else from that power of two, whose
// weight() is the one the softmax uses.  min() keeps an infinite t / cap away from the polynomial of weight().  cap:
// the cap and its reciprocal.
float soft_capped(float t, vec2 cap) {
    precise float x = t * cap.y;
    float size = min(abs(x), TANH_MAX);
    precise float exponent = size * (-2.0 * LOG2E);
    precise float e = weight(exponent, 0.0);
    precise float above = 1.0 - e;
    precise float below = 1.0 + e;
    precise float large = above * reciprocal(below);

    precise float z = size * size;
    precise float y = TANH_E4;
    HORNER(z, TANH_E3) HORNER(z, TANH_E2) HORNER(z, TANH_E1) HORNER(z, TANH_E0)
    y = y * z;
    y = y * size;
    precise float small = size + y;

    float tanh_size = size < TANH_SMALL ? small : large;
    precise float capped = cap.x * (x < 0.0 ? -tanh_size : tanh_size);
    precise float s = capped * LOG2E;
    return s;
}

// a * b + c, the step of a dot product and of a sum of weighted values: rounded twice, or, of arithmetic "fused", once.
//
// FUSED, a specialization constant: 0 for the canonical arithmetic; FUSED_NATIVE where the device's fma() rounds once,
// FUSED_EMULATED where it has none that does.  All drivers agree on both, because the rounded sum is one number.

// The sum of two numbers, and what its rounding lost (Knuth).
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

// a * b + c, rounded once (Boldo, Melquiond): the product in two parts (Dekker), both sums with what they lose, and the
// losses added by rounding to odd, so that the last sum rounds as if nothing had been rounded before.  Exact where
// every part is 0 or normal: where a * b is a multiple of 2**-126, and no sum reaches 2**127.
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
    // to odd: an even tail that lost something moves by one unit towards it
    uvec2 bits = floatBitsToUint(tail);
    uvec2 step = uvec2((ivec2(bits ^ floatBitsToUint(lost)) >> 31) | 1);
    uvec2 inexact = uvec2(notEqual(lost, vec2(0.0))) & ~bits & 1u;
    precise vec2 rounded = sum + uintBitsToFloat(bits + step * inexact);
    return rounded;
}

vec2 multiply_add(vec2 a, vec2 b, vec2 c) {
    if (FUSED == FUSED_EMULATED) {
        return fma_emulated(a, b, c);
    }
    if (FUSED == FUSED_NATIVE) {
        precise vec2 sum = fma(a, b, c);
        return sum;
    }
    precise vec2 product = a * b;
    precise vec2 sum = c + product;
    return sum;
}
