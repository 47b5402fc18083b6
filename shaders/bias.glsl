// What is added to a score, in log2 units: ALiBi's slope * -|key - row| (one product, one sum), then a mask's value (the
// same).  A mask hides a key by minus infinity; the score of a hidden key is EMPTY_M, as that of an absent one.

// s: the scores of two keys, at these positions.
vec2 biased(uint row, uint head, uvec2 position, vec2 s) {
    uint record = work[HEADER_ROW_TABLE] + row * ROW_WORDS;
    if (ALIBI != 0u) {
        float slope = uintBitsToFloat(work[work[HEADER_ALIBI_TABLE] + head]);
        vec2 distance = -vec2(abs(ivec2(position) - int(work[record + ROW_POSITION])));
        precise vec2 bias = slope * distance;
        precise vec2 sum = s + bias;
        s = sum;
    }
    for (uint i = 0u; MASK != 0u && i < 2u; ++i) {
        if (position[i] >= work[record + ROW_MASK_BEGIN] && position[i] < work[record + ROW_MASK_END]) {
            uint word = work[work[record + ROW_MASK] + position[i] - work[record + ROW_MASK_BEGIN]];
            precise float bias = uintBitsToFloat(word) * LOG2E;
            precise float sum = s[i] + bias;
            s[i] = word == HIDDEN ? EMPTY_M : sum;
        }
    }
    return s;
}
