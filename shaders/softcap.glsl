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
