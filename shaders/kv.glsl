// Loads of K and V in their stored dtype, as float32.  All conversions are exact.
//
// A tile holds 64 tokens of one KV head.  K: (head_dim / 8, 64, 8), so that neighbouring lanes (keys) read
// neighbouring 16- or 32-byte pieces.  V: (64, head_dim), so that neighbouring lanes (dimension slices) do.
// V is bound under three names, one per load width; the width follows from SLICE, a constant.

#ifdef KV_F16
layout(set = 0, binding = ATTEND_BIND_K, std430) restrict readonly buffer K4 { uvec4 k_words4[]; };
layout(set = 0, binding = ATTEND_BIND_V, std430) readonly buffer V1 { uint v_words1[]; };
layout(set = 0, binding = ATTEND_BIND_V, std430) readonly buffer V2 { uvec2 v_words2[]; };
layout(set = 0, binding = ATTEND_BIND_V, std430) readonly buffer V4 { uvec4 v_words4[]; };

// Dimensions 8 chunk .. 8 chunk + 7 of one key, as two vec4.
void load_k(uint tile, uint chunk, uint key, out vec4 low, out vec4 high) {
    uvec4 w = k_words4[(tile * (HEAD_DIM / CHUNK) + chunk) * LEAF + key];
    low = vec4(unpackHalf2x16(w.x), unpackHalf2x16(w.y));
    high = vec4(unpackHalf2x16(w.z), unpackHalf2x16(w.w));
}

// Dimensions SLICE slice .. SLICE slice + SLICE - 1 of one value row, into v[first ...].
void load_v(uint tile, uint key, uint slice, uint first) {
    uint at = (tile * LEAF + key) * (HEAD_DIM / SLICE) + slice;
    if (SLICE == 2u) {
        v[first] = unpackHalf2x16(v_words1[at]);
    } else if (SLICE == 4u) {
        uvec2 w = v_words2[at];
        v[first] = unpackHalf2x16(w.x);
        v[first + 1u % PAIRS] = unpackHalf2x16(w.y);
    } else {
        for (uint i = 0u; i < SLICE / 8u; ++i) {
            uvec4 w = v_words4[at * (SLICE / 8u) + i];
            v[first + (4u * i) % PAIRS] = unpackHalf2x16(w.x);
            v[first + (4u * i + 1u) % PAIRS] = unpackHalf2x16(w.y);
            v[first + (4u * i + 2u) % PAIRS] = unpackHalf2x16(w.z);
            v[first + (4u * i + 3u) % PAIRS] = unpackHalf2x16(w.w);
        }
    }
}
#endif

#ifdef KV_F32
layout(set = 0, binding = ATTEND_BIND_K, std430) restrict readonly buffer K4 { vec4 k_words4[]; };
layout(set = 0, binding = ATTEND_BIND_V, std430) readonly buffer V2 { vec2 v_words2[]; };
layout(set = 0, binding = ATTEND_BIND_V, std430) readonly buffer V4 { vec4 v_words4[]; };

void load_k(uint tile, uint chunk, uint key, out vec4 low, out vec4 high) {
    uint at = 2u * ((tile * (HEAD_DIM / CHUNK) + chunk) * LEAF + key);
    low = k_words4[at];
    high = k_words4[at + 1u];
}

void load_v(uint tile, uint key, uint slice, uint first) {
    uint at = (tile * LEAF + key) * (HEAD_DIM / SLICE) + slice;
    if (SLICE == 2u) {
        v[first] = v_words2[at];
    } else {
        for (uint i = 0u; i < SLICE / 4u; ++i) {
            vec4 w = v_words4[at * (SLICE / 4u) + i];
            v[first + (2u * i) % PAIRS] = w.xy;
            v[first + (2u * i + 1u) % PAIRS] = w.zw;
        }
    }
}
#endif
