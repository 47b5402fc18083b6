// Dot products of int8, and the sums that zinc_attn/graph/products.py defines, for few rows of x and many.

// The exact dot product of four int8 in a word each, by OpSDot; 0 is its format of such words.
spirv_instruction(extensions = ["SPV_KHR_integer_dot_product"], capabilities = [6019, 6018], id = 4450)
int packed_dot(uint a, uint b, spirv_literal int format);

int dot4(uint a, uint b, int sum) {
    return packed_dot(a, b, 0) + sum;
}

int dot16(uvec4 a, uvec4 b, int sum) {
    return dot4(a.x, b.x, dot4(a.y, b.y, dot4(a.z, b.z, dot4(a.w, b.w, sum))));
}

// The sums of both halves of a block of x; and below the block's scale and these sums.
ivec2 sums_of_x(uvec2 words) {
    return ivec2(bitfieldExtract(int(words.y), 0, 16), int(words.y) >> 16);
}

vec3 scales_of_x(uvec2 words) {
    return vec3(uintBitsToFloat(words.x), sums_of_x(words));
}

// mxfp4's smallest scale whose product with x's d counts: the scale is 2**-126 at least, and the product is not
// flushed. Smaller scales are 0, or -infinity, which block_scales has for exponent 0. For a NaN the result is a NaN.
float least_scale(float d) {
    int exponent = floatBitsToInt(d) >> 23;
    return exponent == 255 ? d : intBitsToFloat(max(154 - exponent, 1) << 23);
}

// To sum and minima: sum gains the products of a block's weights, and minima, for types of 256 values, the products of
// the block's minima. w: block_scales of the block; x: the scale of x's block, and the sums of both halves; dots: the
// dot products of both halves, or their sum; least: whether least_scale matters, which it does for mxfp4 alone.
void add_products(vec4 w, vec3 x, vec2 dots, bool least, inout float sum, inout float minima) {
    if (IS_256) {
        float whole = SCALED ? dots.x : HALVES ? w.x * dots.x + w.y * dots.y : w.x * dots.x;
        sum = add(sum, multiply(x.x, whole));
        if (HAS_MINIMUM) {
            minima = add(minima, multiply(x.x, HAS_HALVES ? w.z * x.y + w.w * x.z : w.z * (x.y + x.z)));
        }
    } else {
        float both = least && w.x < least_scale(x.x) ? 0.0 : multiply(w.x, x.x);
        sum = add(sum, multiply(both, dots.x));
        if (HAS_MINIMUM) {
            sum = add(sum, multiply(multiply(w.y, x.x), x.y + x.z));
        }
    }
}

// The superblock's sum. scale: superblock_scale.
float superblock_sum(vec2 scale, float sum, float minima) {
    float scaled = IS_256 ? flush(multiply(scale.x, sum)) : sum;
    return IS_256 && HAS_MINIMUM ? add(scaled, -flush(multiply(scale.y, minima))) : scaled;
}
