// Activation functions of unary.comp and glu.comp. They need numbers.glsl.

float silu(float x, float alpha) {
    precise float exponent = alpha * -x;
    precise float below = 1.0 + exponential(exponent);
    return quotient(x, below);
}

float sigmoid(float x) {
    precise float below = 1.0 + exponential(-x);
    return quotient(1.0, below);
}

float gelu(float x) {
    float near = x < GELU_LEAST ? GELU_LEAST : x;
    precise float cubic = GELU_A * near;
    cubic = cubic * near;
    cubic = 1.0 + cubic;
    precise float linear = GELU_B * near, half_x = 0.5 * near;
    precise float inner = linear * cubic;
    precise float gate = 1.0 + tanh_of(inner);
    gate = half_x * gate;
    return gate;
}

float gelu_quick(float x) {
    precise float exponent = GELU_QUICK * x;
    precise float below = 1.0 + exponential(exponent);
    precise float result = x * quotient(1.0, below);
    return result;
}

float gelu_erf(float x) {
    precise float scaled = x * SQRT_HALF, half_x = 0.5 * x;
    precise float gate = 1.0 + error_function(scaled);
    gate = half_x * gate;
    return gate;
}
