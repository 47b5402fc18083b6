// The algebra of attention states. canonical/state.py is its twin in NumPy. It needs floats.glsl.
//
// A state (m, l, o) summarizes attention over a set of keys: m is an integer in log2 units at or near the largest
// score, l = sum of 2**(s - m), o = sum of 2**(s - m) v. Attention itself is o / l. Nothing is divided before the end,
// so states of disjoint key sets merge. Because m is an integer, every rescale is an exact power of two, and a merge
// rounds in its one sum alone. A power below 2**-48 is 0, and so is a result below 2**-100.

#define NEGATIVE_INFINITY uintBitsToFloat(0xFF800000u)

// The merge of two states a and b, for one component (l, or o) of each. power_a and power_b are the powers of two that
// bring a and b to the common m; b in merge_scaled is a product with its power already.
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

// The powers of two that bring two states to the common m = max(ma, mb).
vec2 merge_powers(float ma, float mb) {
    float top = max(ma, mb);
    precise vec2 d = vec2(ma, mb) - top;
    return vec2(pow2(d.x), pow2(d.y));
}

// Whether a state is that of no keys. Its l is 0, and l is at least 1/2 in every other state.
bool is_empty(float l) {
    return l < 0.25;
}

// Natural log-sum-exp of a state: m ln 2 + ln l.
float natural_lse(float m, float l) {
    return is_empty(l) ? NEGATIVE_INFINITY : ln(l, m);
}

// An attention sink is a key with a score and no value. It is merged into the state (m, l) last. The result is the
// power of two by which the state's o is multiplied afterwards. sink: the word of a HEAD record.
float merge_sink(uint sink, inout float m, inout float l) {
    if (sink == HIDDEN) {
        return 1.0;
    }
    float s = uintBitsToFloat(sink);
    float whole = roundEven(s);
    vec2 powers = merge_powers(m, whole);
    m = max(m, whole);
    l = merge(l, powers.x, weight(s, whole), powers.y);
    return powers.x;
}

// out = o / l, and 0 for the empty state. o_power: the result of merge_sink, or 1.
vec2 normalize(vec2 o, float o_power, float l) {
    precise vec2 scaled = o * o_power;
    precise vec2 quotient = flush(scaled) * reciprocal(l);
    return is_empty(l) ? vec2(0.0) : flush(quotient);
}
