// The sum of the results of a row's experts, for sum_experts.comp and norm_summed.comp.

// Element j of the sum of row `row`: the experts in order, each times its weight, then the added tensors.
float sum_at(uint j, uint row) {
    precise float sum = 0.0;
    for (uint e = 0u; e < p.experts.n[1]; ++e) {
        float value = flush(experts[place(p.experts, uvec4(j, e, row, 0u))]);
        precise float product = value * flush(weights[place(p.weights, uvec4(0u, e, row, 0u))]);
        sum = flush(sum + flush(product));
    }
    uint at = row * p.experts.n[0] + j;
    if (ADDED > 0u) {
        sum = flush(sum + flush(plus[p.added[0] + at]));
    }
    if (ADDED > 1u) {
        sum = flush(sum + flush(more[p.added[1] + at]));
    }
    return sum;
}
