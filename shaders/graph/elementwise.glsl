// Operations element by element, for the kernel that defines Y_TYPE, p.y, buffer y and value().
//
// An invocation has an element, or, where y has 16 bits, the two elements of a word.
#include "tensor.glsl"
#include "numbers.glsl"
#include "float_types.glsl"

// The element of y at these indices, already flushed.
float value(uvec4 index);

void write_elements() {
    uint count = elements(p.y), i = linear_id() * (Y_TYPE == FLOAT_TYPE_F32 ? 1u : 2u);
    if (i >= count) {
        return;
    }
    uvec4 index = indices(p.y, i);
    uint low = encoded(value(index), Y_TYPE);
    if (Y_TYPE == FLOAT_TYPE_F32) {
        y[place(p.y, index)] = low;
        return;
    }
    uint word = (p.y.offset + i) >> 1;
    y[word] = low | (i + 1u < count ? encoded(value(indices(p.y, i + 1u)), Y_TYPE) << 16 : y[word] & 0xFFFF0000u);
}
