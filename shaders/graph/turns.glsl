// Sine and cosine of fractions of a turn, and of radians. They need numbers.glsl.

// (cos, sin) of z radians, at most an eighth of a turn, plus `quarter` quarters of a turn.
vec2 cos_sin_near(float z, uint quarter) {
    precise float square = z * z, y, sine, cosine;
    SIN_POLY(y, square)
    y = y * square;
    y = y * z;
    sine = z + y;
    COS_POLY(y, square)
    y = y * square;
    y = y * square;
    precise float half_square = 0.5 * square;
    cosine = 1.0 - half_square;
    cosine = cosine + y;
    vec2 pair = (quarter & 1u) == 1u ? vec2(-sine, cosine) : vec2(cosine, sine);
    return (quarter & 2u) == 2u ? -pair : pair;
}

// A fraction of a turn is x + 2**32 y of 2**-64 turns.
uvec2 negated(uvec2 phase) {
    return uvec2(~phase.x + 1u, ~phase.y + uint(phase.x == 0u));
}

vec2 cos_sin_of_turns(uvec2 phase) {
    uint quarter = (phase.y + 0x20000000u) >> 30;
    uvec2 rest = uvec2(phase.x, phase.y - (quarter << 30));
    bool negative = int(rest.y) < 0;
    uvec2 size = negative ? negated(rest) : rest;
    uint zeros = size.y == 0u ? 32u : 0u;  // leading zeros, in whole words
    size = size.y == 0u ? uvec2(0u, size.x) : size;
    uint more = uint(31 - findMSB(size.y | 1u));
    uint top = (size.y << more) | ((size.x >> 1) >> (31u - more));
    precise float near = float(top >> 8) * 256.0 + float(top & 255u);
    precise float z = near * uintBitsToFloat((95u - zeros - more) << 23);
    z = z * TURN;
    return cos_sin_near(negative ? -z : z, quarter);
}

// (cos, sin) of x radians.
vec2 cos_sin(float x) {
    uint bits = floatBitsToUint(x);
    if ((bits & MAGNITUDE) >= INFINITE) {
        return vec2(NAN);
    }
    if (abs(x) < TURN_SMALL) {
        return cos_sin_near(x, 0u);
    }
    uint bit = (bits >> 23 & 0xFFu) - 118u, shift = bit & 31u;  // the first bit of INVERSE_TURN that counts
    uvec4 table = uvec4(0u);
    for (uint i = 0u; i < 5u; ++i) {  // compilers know these indices, so the table is no memory
        uvec4 words = uvec4(INVERSE_TURN[i], INVERSE_TURN[i + 1u], INVERSE_TURN[i + 2u], INVERSE_TURN[i + 3u]);
        table = i == bit >> 5 ? words : table;
    }
    uvec3 window = (table.xyz << shift) | ((table.yzw >> 1) >> (31u - shift));
    uvec2 phase;
    uint high, carry, last, last_high;
    umulExtended(significand(bits), window[1], high, phase.x);
    umulExtended(significand(bits), window[2], last_high, last);
    phase.x = uaddCarry(phase.x, last_high, carry);
    phase.y = high + carry + significand(bits) * window[0];
    return cos_sin_of_turns(x < 0.0 ? negated(phase) : phase);
}
