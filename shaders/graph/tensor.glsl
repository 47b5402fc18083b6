// Where elements of tensors lie. Numbers count elements; dimension 0 is the innermost, as in ggml.

uint elements(Tensor t) {
    return t.n[0] * t.n[1] * t.n[2] * t.n[3];
}

// The number of an invocation in a grid of one or two dimensions.
uint linear_id() {
    return gl_GlobalInvocationID.x + gl_GlobalInvocationID.y * gl_NumWorkGroups.x * gl_WorkGroupSize.x;
}

// The indices of element i, counted through dimensions 0, 1, ... Divisions are slow, and few are needed.
uvec4 indices(Tensor t, uint i) {
    uvec4 index = uvec4(i, 0u, 0u, 0u);
    if (index.x >= t.n[0]) {
        index.y = index.x / t.n[0];
        index.x -= index.y * t.n[0];
        if (index.y >= t.n[1]) {
            index.z = index.y / t.n[1];
            index.y -= index.z * t.n[1];
            if (index.z >= t.n[2]) {
                index.w = index.z / t.n[2];
                index.z -= index.w * t.n[2];
            }
        }
    }
    return index;
}

uint place(Tensor t, uvec4 index) {
    return t.offset + index.x * t.s[0] + index.y * t.s[1] + index.z * t.s[2] + index.w * t.s[3];
}

// The indices in t, which repeats over a larger tensor.
uvec4 repeated(Tensor t, uvec4 index) {
    for (uint d = 0u; d < 4u; ++d) {
        if (index[d] >= t.n[d]) {
            index[d] = t.n[d] == 1u ? 0u : index[d] % t.n[d];
        }
    }
    return index;
}
