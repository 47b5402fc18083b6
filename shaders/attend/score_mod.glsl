// From dot products to scores, in log2 units: scale, softcap, and then the biases and the mask, a product and a sum
// each. A bias adds the head's slope times a term, and a mask adds its value times the head's factor. A mask hides a
// key by minus infinity, and a hidden key has the score of an absent key, EMPTY_M.

// Logit softcap, in log2 units: cap * tanh(t / cap) of a scaled score t. cap: the cap and its reciprocal.
float soft_capped(float t, vec2 cap) {
    precise float x = t * cap.y;
    precise float capped = cap.x * hyperbolic_tangent(x);
    precise float s = capped * LOG2E;
    return s;
}

// s plus the head's slope, a word of its record, times a term of the two keys.
vec2 sloped(uint head, uint word, vec2 term, vec2 s) {
    float slope = uintBitsToFloat(HEAD_WORD(head, word));
    precise vec2 bias = slope * term;
    precise vec2 sum = s + bias;
    return sum;
}

// The scores s of two keys, at these positions, with biases and mask. canonical/constants.py has the terms, too.
vec2 biased(uint row, uint head, uvec2 position, vec2 s) {
    float factor = uintBitsToFloat(HEAD_WORD(head, HEAD_MASK));
    uint record = work[HEADER_ROW_TABLE] + row * ROW_WORDS;
    vec2 distance = vec2(ivec2(position) - int(work[record + ROW_POSITION]));
    if ((BIASES & BIAS_ALIBI) != 0u) {
        s = sloped(head, HEAD_ALIBI, -abs(distance), s);
    }
    for (uint i = 0u; MASK != 0u && i < 2u; ++i) {
        if (position[i] >= work[record + ROW_MASK_BEGIN] && position[i] < work[record + ROW_MASK_END]) {
            uint word = work[work[record + ROW_MASK] + position[i] - work[record + ROW_MASK_BEGIN]];
            precise float bias = uintBitsToFloat(word) * factor;
            precise float sum = s[i] + bias;
            s[i] = word == HIDDEN ? EMPTY_M : sum;
        }
    }
    return s;
}

// Numbers that all scores have in common: the scale, the cap and its reciprocal.
vec3 score_factors() {
    return uintBitsToFloat(uvec3(work[HEADER_SCORE_SCALE], work[HEADER_SOFTCAP], work[HEADER_SOFTCAP_INVERSE]));
}

// The scores of two keys, at these positions, from their dot products with a query vector (row, head).
vec2 scores_of(vec2 products, vec3 factors, uvec2 vector, uvec2 position) {
    precise vec2 s = products * factors.x;
    if (SOFTCAP != 0u) {
        s = vec2(soft_capped(s.x, factors.yz), soft_capped(s.y, factors.yz));
    }
    if (BIASES != 0u || MASK != 0u) {
        s = biased(vector.x, vector.y, position, s);
    }
    return s;
}
