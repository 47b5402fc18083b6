// Operands of products of floats.

// Where the workgroup's matrix of weights begins.
uvec4 matrix_of_w() {
    if (EXPERTS != 0u) {
        return uvec4(0u, 0u, matrix, 0u);
    }
    uvec2 plane = uvec2(gl_WorkGroupID.z % p.y.n[2], gl_WorkGroupID.z / p.y.n[2]);
    return uvec4(0u, 0u, plane.x / (p.x.n[2] / p.w.n[2]), plane.y / (p.x.n[3] / p.w.n[3]));
}

// Element `index` of a type, from its word, w[index] or w[index / 2].
float element(uint type, uint word, uint index) {
    uint bits = bitfieldExtract(word, int(16u * (index % 2u)), 16);
    float value = uintBitsToFloat(type == FLOAT_TYPE_F32 ? word : bits << 16);
    value = type == FLOAT_TYPE_F16 ? unpackHalf2x16(bits).x : value;
    return abs(value) < PRODUCT_MIN ? 0.0 : value;
}
