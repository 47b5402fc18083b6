// Exact dot products of int8, four to a word, by OpSDot; 0: its format of four int8 in a word.
spirv_instruction(extensions = ["SPV_KHR_integer_dot_product"], capabilities = [6019, 6018], id = 4450)
int packed_dot(uint a, uint b, spirv_literal int format);

int dot4(uint a, uint b, int sum) {
    return packed_dot(a, b, 0) + sum;
}

int dot16(uvec4 a, uvec4 b, int sum) {
    return dot4(a.x, b.x, dot4(a.y, b.y, dot4(a.z, b.z, dot4(a.w, b.w, sum))));
}
