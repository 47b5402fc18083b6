// Sums and products that round on their own, and the store of a product's result.

float add(float a, float b) {
    precise float sum = a + b;
    return sum;
}

float multiply(float a, float b) {
    precise float product = a * b;
    return product;
}

// Store the result of row m of w and column n: flush(sum), or, with ADD, flush(flush(sum) + added).
void store(uint m, uint n, float sum) {
    uvec4 index = column_of_y(n) + uvec4(m, 0u, 0u, 0u);
    if (m < p.y.n[0] && index.y < p.y.n[1] && (EXPERTS == 0u || index.z < p.y.n[2])) {
        float result = EXPERTS != 0u && expert == p.experts[2] ? NAN : flush(sum);
        y[place(p.y, index)] = ADD == 0u ? result : flush(add(result, flush(added[place(p.added, index)])));
    }
}
