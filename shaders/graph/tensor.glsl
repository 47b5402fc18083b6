// Where elements of tensors lie.  Numbers count elements; dimension 0 is the innermost, as in ggml.

uint elements(Tensor t) {
    return t.n[0] * t.n[1] * t.n[2] * t.n[3];
}

// The number of an invocation in a grid of one or two dimensions.
uint linear_id() {
    return gl_GlobalInvocationID.x + gl_GlobalInvocationID.y * gl_NumWorkGroups.x * gl_WorkGroupSize.x;
}

// The indices of element i, counted through dimensions 0, 1, ...
uvec4 indices(Tensor t, uint i) {
    uint row = i / t.n[0], plane = row / t.n[1];
    return uvec4(i % t.n[0], row % t.n[1], plane % t.n[2], plane / t.n[2]);
}

uint place(Tensor t, uvec4 at) {
    return t.offset + at.x * t.s[0] + at.y * t.s[1] + at.z * t.s[2] + at.w * t.s[3];
}

// The indices in t that repeats over a larger tensor.
uvec4 repeated(Tensor t, uvec4 at) {
    return at % uvec4(t.n[0], t.n[1], t.n[2], t.n[3]);
}
