// Elements of x as bits, and rows that indices name.

// Element `index` of x, an element of `bits` bits.
uint x_bits(uint index, uint bits) {
    uint per_word = 32u / bits;
    return x[index / per_word] >> (index % per_word * bits) & 0xFFFFFFFFu >> (32u - bits);
}

uint bits_of(uint type) {
    return type == MOVE_TYPE_I8 ? 8u : type == MOVE_TYPE_F32 || type == MOVE_TYPE_I32 ? 32u : 16u;
}

uvec4 sizes_of(Tensor t) {
    return uvec4(t.n[0], t.n[1], t.n[2], t.n[3]);
}

// The indices of the first element of row `row`. The last index is n[3] or more for a row that does not exist.
uvec4 row_indices(Tensor t, uint row) {
    uint plane = row / t.n[1];
    return uvec4(0u, row % t.n[1], plane % t.n[2], plane / t.n[2]);
}

// The row, of `rows` rows, that ids name for the row with the indices `row`. All bits are set if ids name none. words:
// words of an index.
uint named_row(uvec4 row, uint rows, uint words) {
    uint index = place(p.ids, uvec4(row.y, row.z % p.ids.n[1], row.w % p.ids.n[2], 0u)) * words;
    bool there = ids[index] < rows && (words == 1u || ids[index + words - 1u] == 0u);
    return there ? ids[index] : 0xFFFFFFFFu;
}
