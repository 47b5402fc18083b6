// The order of float32 numbers as that of whole ones.

const uint NONE = 0xFFFFFFFFu;  // a NaN's, which is last

// Of a number's bits; descending ones are upside down, zeros of either sign are equal.
uint key_of(uint bits, bool descending) {
    uint magnitude = bits & 0x7FFFFFFFu;
    uint key = magnitude == 0u ? 0x80000000u : bits >= 0x80000000u ? ~bits : bits | 0x80000000u;
    return magnitude > 0x7F800000u ? NONE : descending ? ~key : key;
}
