// Sums and products that round on their own, and how a product's result is stored.

float add(float a, float b) {
    precise float sum = a + b;
    return sum;
}

float multiply(float a, float b) {
    precise float product = a * b;
    return product;
}

// Row m of w and column n: y gets the flushed sum, or the sum of that and what is added.
void store(uint m, uint n, float sum) {
    uvec4 index = column_of_y(n) + uvec4(m, 0u, 0u, 0u);
    if (m < p.y.n[0] && index.y < p.y.n[1] && (EXPERTS == 0u || index.z < p.y.n[2])) {
        float result = EXPERTS != 0u && expert == p.experts[2] ? NAN : flush(sum);
        y[place(p.y, index)] = ADD == 0u ? result : flush(add(result, flush(added[place(p.added, index)])));
    }
}
