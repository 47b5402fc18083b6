// Rotary positions, for rope.comp and norm.comp. The including shader has the fields of ROPE's parameters, the buffers
// positions and table, and numbers.glsl.
#include "turns.glsl"

// Pair k of a token, turned: x0 * (c * m) - x1 * (s * m), x0 * (s * m) + x1 * (c * m).
vec2 turned(vec2 pair, uint k, uint token) {
    uint entry = p.table + ROPE_WORDS * k;
    uvec2 fraction = uvec2(table[entry], table[entry + 1u]), phase;
    uint position = positions[p.positions + table[entry + 2u] * p.stride + token];
    umulExtended(position, fraction.x, phase.y, phase.x);
    phase.y += position * fraction.y - (int(position) < 0 ? fraction.x : 0u);
    precise vec2 factors = cos_sin_of_turns(phase) * uintBitsToFloat(table[entry + 3u]);
    precise vec2 x0_parts = pair.x * factors, x1_parts = pair.y * factors;
    precise float first = x0_parts.x - x1_parts.y, second = x0_parts.y + x1_parts.x;
    return vec2(flush(first), flush(second));
}

// The bits of a float32 as they are stored.
uint settled(uint bits) {
    return (bits & 0x7FFFFFFFu) < floatBitsToUint(p.least) ? 0u : bits;
}
