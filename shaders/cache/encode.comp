// Encode new rows: float32 values of K and V become the words of a row tensor, byte for byte as cache/rows.py has them.
//
//   A lane has a block, 32 dimensions of K (z = 0) or of V (z = 1) of one token and KV head, filled up with zeros.
//   load        the workgroup's 32 blocks go to shared memory; neighboring lanes read neighboring values
//   measure     the scale of the lane's block, and the factors of its numbers
//   number      each value's stored number; as many as a word holds are packed and written
//   pair        the float16 scales of two neighboring blocks become one word
//
// The procedure is that of cache/blocks.py. Drivers do not agree on division, on the rounding to float16 and on
// denormals, so integer operations make quotients and narrow floats. Every other float operation is a product, a sum or
// a conversion, and its operands and results are 0 or normal: a value is 0 or has a magnitude of 2**-40 to 2**60.
//
// Grid: x = row, y = enough to give every block a lane, z = K, V. Workgroups without a block return at once.
#version 450
#extension GL_GOOGLE_include_directive : require
#include "../contract.glsl"

layout(local_size_x = 32) in;
layout(constant_id = ENCODE_SPEC_K_SIZE) const uint K_SIZE = 64u;  // head_dim
layout(constant_id = ENCODE_SPEC_V_SIZE) const uint V_SIZE = 64u;  // v_head_dim
layout(constant_id = ENCODE_SPEC_K_DIM) const uint K_DIM = 64u;    // the same, as a row has them
layout(constant_id = ENCODE_SPEC_V_DIM) const uint V_DIM = 64u;
layout(constant_id = ENCODE_SPEC_LATENT) const uint LATENT = 0u;
layout(constant_id = ENCODE_SPEC_K_STORAGE) const uint K_STORAGE = 0u;
layout(constant_id = ENCODE_SPEC_V_STORAGE) const uint V_STORAGE = 0u;
const uint VECTORS = 1u, ROWS_AHEAD = 4u, PASS_SUMS = 2048u, LANES = WAVE;  // of pass 1; rows' sizes ignore them
#include "../attend/attend_sizes.glsl"
#include "../floats.glsl"
#include "../narrow.glsl"

// k or v, whichever of K and V the workgroup encodes. If both are equal, a compiler finds a constant.
uint part(uint k, uint v) {
    return gl_WorkGroupID.z == 0u ? k : v;
}

bool is(uint storage) {
    return gl_WorkGroupID.z == 0u ? K_STORAGE == storage : V_STORAGE == storage;
}

#include "../quantize.glsl"

layout(set = 0, binding = ENCODE_BIND_WORK, std430) restrict readonly buffer Work { uint work[]; };
layout(set = 0, binding = ENCODE_BIND_VALUES, std430) restrict readonly buffer Values { uint values[]; };
layout(set = 0, binding = ENCODE_BIND_ROWS, std430) restrict writeonly buffer Rows { uint rows[]; };

const uint V_WORDS = LATENT == 1u ? 0u : V_VALUES;  // where a row's parts begin: K values, V values, K scales, V scales
const uint V_SCALES_AT = K_VALUES + V_WORDS + K_SCALES;
const uint TOKEN_WORDS = V_SCALES_AT + (LATENT == 1u ? 0u : V_SCALES);
const uint ONE = 0x3F800000u;

// The stored number of a value. head_scale: the float32 of fp8_e4m3, 256 times the head's scale.
uint number(uint bits, Measures by, uint head_scale) {
    if (is(STORAGE_F32)) {
        return bits;
    }
    if (is(STORAGE_BF16)) {
        return bits >> 16;
    }
    if (is(STORAGE_F16)) {
        return to_float16(bits, 0);
    }
    if (is(STORAGE_FP8_E4M3)) {
        return to_e4m3(divide(bits, head_scale), 8);
    }
    return block_number(bits, by);
}

// Write block `block` of the row that begins at word `row`. The result is the block's float16 numbers.
uint encode(uint lane, uint block, uint row, uint head_scale) {
    Measures by = Measures(0u, 0.0, 0.0, 0.0);
    if (part(K_HALVES, V_HALVES) > 0u) {
        by = measure(lane);
    }
    uint bits = part(K_BITS, V_BITS), each = 32u / bits, fifth = 0u;  // a block's values are `bits` words
    uint first = block * bits, end = part(K_VALUES, V_WORDS);
    for (uint word = 0u; word < bits; ++word) {
        uint packed = 0u;
        for (uint i = 0u; i < each; ++i) {
            uint q = number(staged[staged_at(lane, word * each + i)], by, head_scale);
            fifth |= (q >> 4 & 1u) << (word * each + i);
            packed |= (q & 0xFFFFFFFFu >> (32u - bits)) << (i * bits);
        }
        if (first + word < end) {
            rows[row + part(0u, K_VALUES) + first + word] = packed;
        }
    }
    uint shared_at = row + part(K_VALUES + V_WORDS, V_SCALES_AT);
    if (part(K_FIFTH, V_FIFTH) == 1u) {
        rows[shared_at + part(K_PAIRED, V_PAIRED) + block] = fifth;
    }
    if (part(K_HALVES, V_HALVES) == 2u) {
        rows[shared_at + block] = by.halves;
    }
    return block_halves(by);
}

// The workgroup's blocks, from number `first` on, go to shared memory.
void load(uint first, uint units, uint rows_heads) {
    uint lane = gl_LocalInvocationID.x, size = part(K_SIZE, V_SIZE);
    uint begin = part(0u, rows_heads * K_SIZE);  // K of all rows comes before V
    for (uint i = 0u; i < WAVE; ++i) {
        uint row_head = (first + i) / units, dim = (first + i) % units * BLOCK + lane;
        bool there = row_head < rows_heads && dim < size;
        staged[staged_at(i, lane)] = there ? values[begin + row_head * size + dim] : 0u;
    }
}

void main() {
    uint lane = gl_LocalInvocationID.x, heads = work[HEADER_ROW_KV_HEADS], rows_heads = gl_NumWorkGroups.x * heads;
    uint blocks = part(K_BLOCKS, V_BLOCKS), units = blocks + blocks % 2u;  // of a head; a workgroup has whole pairs
    uint first = (gl_WorkGroupID.y * gl_NumWorkGroups.x + gl_WorkGroupID.x) * WAVE;
    uint row = first / (units * heads), record = work[HEADER_APPEND_TABLE] + row * APPEND_WORDS;
    if (row >= gl_NumWorkGroups.x || work[record + APPEND_POSITION] == NO_TOKEN) {
        return;  // rows without a token come last
    }
    load(first, units, rows_heads);
    barrier();
    uint row_head = (first + lane) / units, block = (first + lane) % units, halves = 0u;
    bool there = row_head < rows_heads && block < blocks;
    if (there) {
        uint head = row_head % heads * work[HEADER_GROUP];
        uint head_scale = is(STORAGE_FP8_E4M3) ? HEAD_WORD(head, part(HEAD_K_SCALE, HEAD_V_SCALE)) : ONE;
        halves = encode(lane, block, row_head * TOKEN_WORDS, head_scale);
    }
    if (K_HALVES == 1u || V_HALVES == 1u) {
        barrier();
        staged[lane] = halves;
        barrier();
        if (there && block % 2u == 0u && part(K_HALVES, V_HALVES) == 1u) {
            uint word = row_head * TOKEN_WORDS + part(K_VALUES + V_WORDS, V_SCALES_AT) + block / 2u;
            rows[word] = staged[lane] | staged[lane + 1u] << 16;
        }
    }
}
