// Exact dot products of int8, four to a word.

#ifdef DOT_PRODUCT
spirv_instruction(extensions = ["SPV_KHR_integer_dot_product"], capabilities = [6019, 6018], id = 4450)
int packed_dot(uint a, uint b, spirv_literal int format);  // OpSDot; format 0: four int8 in a word

int dot4(uint a, uint b, int sum) {
    return packed_dot(a, b, 0) + sum;
}
#else
ivec4 signed_bytes(uint w) {
    return ivec4(bitfieldExtract(int(w), 0, 8), bitfieldExtract(int(w), 8, 8), bitfieldExtract(int(w), 16, 8), int(w) >> 24);
}

int dot4(uint a, uint b, int sum) {
    ivec4 x = signed_bytes(a) * signed_bytes(b);
    return x.x + x.y + (x.z + x.w) + sum;
}
#endif

int dot16(uvec4 a, uvec4 b, int sum) {
    return dot4(a.x, b.x, dot4(a.y, b.y, dot4(a.z, b.z, dot4(a.w, b.w, sum))));
}
