// Where elements of tensors lie.  Numbers count elements; dimension 0 is the innermost, as in ggml.

uint elements(Tensor t) {
    return t.n[0] * t.n[1] * t.n[2] * t.n[3];
}

// The number of an invocation in a grid of one or two dimensions.
uint linear_id() {
    return gl_GlobalInvocationID.x + gl_GlobalInvocationID.y * gl_NumWorkGroups.x * gl_WorkGroupSize.x;
}

// The indices of element i, counted through dimensions 0, 1, ...  Divisions are slow, and few are needed.
uvec4 indices(Tensor t, uint i) {
    uvec4 at = uvec4(i, 0u, 0u, 0u);
    if (at.x >= t.n[0]) {
        at.y = at.x / t.n[0];
        at.x -= at.y * t.n[0];
        if (at.y >= t.n[1]) {
            at.z = at.y / t.n[1];
            at.y -= at.z * t.n[1];
            if (at.z >= t.n[2]) {
                at.w = at.z / t.n[2];
                at.z -= at.w * t.n[2];
            }
        }
    }
    return at;
}

uint place(Tensor t, uvec4 at) {
    return t.offset + at.x * t.s[0] + at.y * t.s[1] + at.z * t.s[2] + at.w * t.s[3];
}

// The indices in t that repeats over a larger tensor.
uvec4 repeated(Tensor t, uvec4 at) {
    for (uint d = 0u; d < 4u; ++d) {
        if (at[d] >= t.n[d]) {
            at[d] = t.n[d] == 1u ? 0u : at[d] % t.n[d];
        }
    }
    return at;
}
