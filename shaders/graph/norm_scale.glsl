// The factor that a norm multiplies a row by. total: the sum of squares; factor: 1 / elements. It needs numbers.glsl.
float norm_scale(uint op, float total, float factor, float eps) {
    float size = root(total);
    precise float scaled = total * factor;
    precise float above = flush(scaled) + eps;
    float inverse_size = quotient(1.0, flush(size > eps ? size : eps));
    return op == NORM_OP_L2 ? flush(inverse_size) : inverse_root(flush(above));
}
