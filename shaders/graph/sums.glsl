// Sums and products that round on their own, and how a product's result is stored.

float add(float a, float b) {
    precise float sum = a + b;
    return sum;
}

float multiply(float a, float b) {
    precise float product = a * b;
    return product;
}

// Row m of w and row n of x: y gets the flushed sum, or the sum of that and what is added.
void store(uint m, uint n, float sum) {
    uvec4 at = uvec4(m, n, gl_WorkGroupID.z % p.y.n[2], gl_WorkGroupID.z / p.y.n[2]);
    if (m < p.y.n[0] && n < p.y.n[1]) {
        float result = flush(sum);
        y[place(p.y, at)] = ADD == 0u ? result : flush(add(result, flush(added[place(p.added, at)])));
    }
}
