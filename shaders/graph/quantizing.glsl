// Rows of float32 values as int8, with a scale for each 32: d = the largest magnitude / 127, q = round(x / d). A block
// whose magnitudes are all below 2**-60 is a block of zeros. A block with an infinity or a NaN has d = NaN and q = 0.
//
// Eight invocations have a block, and each has a word of q. Block b of row r of R is block b * R + r of the result, and
// rows end with whole superblocks. The including shader has the buffers packed (uint: q) and packed_scales (uvec2: d,
// and the sums of both halves of q), tensor.glsl and numbers.glsl.

const uint BLOCK_LANES = 8u;  // invocations that share a block
uint first_scale = 0u;  // where the scales begin in their buffer

shared uint most[gl_WorkGroupSize.x];  // largest magnitude of an invocation's values
shared int parts[gl_WorkGroupSize.x];  // sum of an invocation's numbers

uint blocks_of_row(uint columns) {
    return (columns + SUPERBLOCK - 1u) / SUPERBLOCK * (SUPERBLOCK / X_BLOCK);
}

// The indices in t where an invocation's part of block i begins. False for a block after the last row.
bool block_at(Tensor t, uint i, out uvec4 index) {
    uint rows = t.n[1] * t.n[2] * t.n[3], row = i % rows, plane = row / t.n[1];
    index = uvec4(i / rows * X_BLOCK + 4u * (gl_LocalInvocationID.x % BLOCK_LANES), row % t.n[1], plane % t.n[2],
                  plane / t.n[2]);
    return i / rows < blocks_of_row(t.n[0]);
}

// Four numbers of a block whose largest magnitude is `top`.
ivec4 numbers(vec4 v, float top) {
    float unit = top >= QUANTIZED_LARGE ? 1.0 / QUANTIZED_LARGE : 1.0;  // keeps the reciprocal's steps normal
    precise float d = top * (1.0 / 127.0);
    precise float near = d * unit;
    precise vec4 scaled = v * unit;
    scaled = scaled * reciprocal(near);
    return clamp(ivec4(roundEven(scaled)), ivec4(-127), ivec4(127));
}

// Store four values of block i, if the block exists. The whole workgroup calls this function.
void quantize(vec4 v, uint i, bool exists) {
    uint invocation = gl_LocalInvocationID.x, lane = invocation % BLOCK_LANES, first = invocation - lane;
    uvec4 sizes = floatBitsToUint(v) & MAGNITUDE;
    most[invocation] = max(max(sizes.x, sizes.y), max(sizes.z, sizes.w));
    barrier();
    uint top = 0u;
    for (uint k = 0u; k < BLOCK_LANES; ++k) {
        top = max(top, most[first + k]);
    }
    bool zero = top < floatBitsToUint(QUANTIZED_MIN), usual = !zero && top < INFINITE;
    ivec4 n = usual ? numbers(v, uintBitsToFloat(top)) : ivec4(0);
    parts[invocation] = n.x + n.y + n.z + n.w;
    barrier();
    if (!exists) {
        return;
    }
    packed[i * BLOCK_LANES + lane] = uint(n.x & 255) | uint(n.y & 255) << 8 | uint(n.z & 255) << 16 | uint(n.w) << 24;
    if (lane == 0u) {
        precise float d = uintBitsToFloat(top) * (1.0 / 127.0);
        int low = parts[invocation] + parts[invocation + 1u] + parts[invocation + 2u] + parts[invocation + 3u];
        int high = parts[invocation + 4u] + parts[invocation + 5u] + parts[invocation + 6u] + parts[invocation + 7u];
        uint bits = usual ? floatBitsToUint(d) : zero ? 0u : 0x7FC00000u;
        packed_scales[first_scale + i] = uvec2(bits, uint(low & 0xFFFF) | uint(high) << 16);
    }
}
