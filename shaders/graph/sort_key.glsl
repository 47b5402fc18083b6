// The order of float32 numbers as an order of whole numbers.

const uint NONE = 0xFFFFFFFFu;  // the key of a NaN, which is last

// The key of a number, from its bits. Zeros of either sign are equal; a descending order complements the key.
uint key_of(uint bits, bool descending) {
    uint magnitude = bits & 0x7FFFFFFFu;
    uint key = magnitude == 0u ? 0x80000000u : bits >= 0x80000000u ? ~bits : bits | 0x80000000u;
    return magnitude > 0x7F800000u ? NONE : descending ? ~key : key;
}
