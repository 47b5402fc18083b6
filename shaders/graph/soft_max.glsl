// Parts of a row's softmax: the largest score of a workgroup's row, and weights.

const float LOWEST = -3.4028235e38;
shared float largest[SUM_LANES];

float workgroup_most(float score) {
    uint r = gl_LocalInvocationID.x;
    largest[r] = score;
    for (uint apart = SUM_LANES / 2u; apart > 0u; apart /= 2u) {
        barrier();
        if (r < apart) {
            largest[r] = max(largest[r], largest[r + apart]);
        }
    }
    barrier();
    return largest[0];
}

// m, which weights are relative to; a NaN where there is no score.
float rounded_most(float most) {
    return most == LOWEST ? NAN : roundEven(most);
}

// 2**(s - m). It is 0 for an s of -infinity, and a NaN where s or m is a NaN or m is infinite.
float weight_of(float s, float m) {
    bool whole = abs(m) < INFINITY && !is_nan(s);
    return !whole ? NAN : weight(max(s, LOWEST), m);
}
