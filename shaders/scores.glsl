// Step 1 of a leaf, the scores: lane = key, two keys per lane, or four, or eight.
//
// Q is the same for every lane and comes through scalar loads; each vector of it is loaded once for all chunks in
// flight.  Eight dimensions (a chunk) are summed on their own before they join the dot product.

#include "softcap.glsl"
#include "bias.glsl"

// Chunks that are in use as floats at a time.  Where stored words are few registers, fewer floats leave the compiler
// more places for the sums, and it pairs more of them.
const uint TOGETHER = K_MASKED && VECTORS <= 8u && CHUNKS_AHEAD > 2u ? 2u : CHUNKS_AHEAD;

// The dots of one chunk (dimensions a, then b) of a query vector with two keys, canonical.  Both keys have the query
// value in common, so that a GPU with dual issue takes them in one cycle.
vec2 chunk_dots(vec4 qa, vec4 qb, vec4 k0a, vec4 k0b, vec4 k1a, vec4 k1b) {
    precise vec2 sum = qa.x * vec2(k0a.x, k1a.x);
    precise vec2 a1 = qa.y * vec2(k0a.y, k1a.y), a2 = qa.z * vec2(k0a.z, k1a.z), a3 = qa.w * vec2(k0a.w, k1a.w);
    sum = sum + a1;
    sum = sum + a2;
    sum = sum + a3;
    precise vec2 b0 = qb.x * vec2(k0b.x, k1b.x), b1 = qb.y * vec2(k0b.y, k1b.y);
    precise vec2 b2 = qb.z * vec2(k0b.z, k1b.z), b3 = qb.w * vec2(k0b.w, k1b.w);
    sum = sum + b0;
    sum = sum + b1;
    sum = sum + b2;
    sum = sum + b3;
    return sum;
}

// Query vectors whose dots are made side by side: fused sums are few instructions, and want others between them.
const uint SIDE_BY_SIDE = FUSED == 0u ? 1u : 2u - VECTORS % 2u;

// Key i of the lane.
uint key_of(uint i) {
    return lane + i * LANES;
}

// Which keys of the lane's pair g the row sees: its keys 2 g and 2 g + 1.
bvec2 present(Leaf leaf, uint g) {
    uint a = key_of(2u * g), b = key_of(2u * g + 1u);
    return bvec2(a >= leaf.begin && a < leaf.count, b >= leaf.begin && b < leaf.count);
}

// To dots: the scores of the lane's keys, EMPTY_M for absent ones.
void find_scores(Item item, Leaf leaf) {
    barrier();  // in the single build for lavapipe only, which splits shaders at barriers and is faster with this one
    // Absent keys read a place that exists: their own slot of the tile, or, in small tiles, the last key's.
    uint last = TILE == KEYS_PER_LEAF ? KEYS_PER_LEAF - 1u : max(leaf.count, 1u) - 1u;
    uvec2 key0[KEY_PAIRS], key1[KEY_PAIRS];
    for (uint g = 0u; g < KEY_PAIRS; ++g) {
        key0[g] = locate(item, leaf, min(key_of(2u * g), last));
        key1[g] = locate(item, leaf, min(key_of(2u * g + 1u), last));
    }
    for (uint i = 0u; i < VECTORS * KEY_PAIRS; ++i) {
        dots[i] = vec2(0.0);
    }
    uint q_heads = work[HEADER_Q_HEADS];
    [[dont_unroll]] for (uint c = 0u; c < K_DIM / CHUNK; c += CHUNKS_AHEAD) {
        uvec4 k0[CHUNKS_AHEAD * KEY_PAIRS], k1[CHUNKS_AHEAD * KEY_PAIRS];  // where K_MASKED: the words in flight
        Block block0[KEY_PAIRS], block1[KEY_PAIRS];  // all chunks in flight lie in a block of four
        for (uint i = 0u; K_BITS <= 8u && i < KEY_PAIRS; ++i) {
            block0[i] = k_block(key0[i], c / 4u);
            block1[i] = k_block(key1[i], c / 4u);
        }
        for (uint j = 0u; K_MASKED && j < CHUNKS_AHEAD; ++j) {
            for (uint i = 0u; i < KEY_PAIRS; ++i) {
                k0[j * KEY_PAIRS + i] = k_chunk(key0[i], c + j, 0u);
                k1[j * KEY_PAIRS + i] = k_chunk(key1[i], c + j, 0u);
            }
        }
        for (uint g = 0u; g < CHUNKS_AHEAD; g += TOGETHER) {
            const uint FLOATS = TOGETHER * KEY_PAIRS;
            vec4 k0a[FLOATS], k0b[FLOATS], k1a[FLOATS], k1b[FLOATS];
            for (uint j = 0u; j < TOGETHER; ++j) {
                for (uint i = 0u; i < KEY_PAIRS; ++i) {
                    uint at = j * KEY_PAIRS + i;
                    if (K_MASKED) {
                        masked_k(k0[g * KEY_PAIRS + at], c + g + j, block0[i], k0a[at], k0b[at]);
                        masked_k(k1[g * KEY_PAIRS + at], c + g + j, block1[i], k1a[at], k1b[at]);
                    } else {
                        load_k(key0[i], c + g + j, block0[i], k0a[at], k0b[at]);
                        load_k(key1[i], c + g + j, block1[i], k1a[at], k1b[at]);
                    }
                }
            }
            for (uint h = 0u; h < VECTORS; h += SIDE_BY_SIDE) {
                for (uint j = 0u; j < TOGETHER; ++j) {
                    vec4 qa[SIDE_BY_SIDE], qb[SIDE_BY_SIDE];
                    for (uint n = 0u; n < SIDE_BY_SIDE; ++n) {
                        uvec2 vector = vector_of(item, h + n);
                        uint from = (vector.x * q_heads + vector.y) * (K_DIM / 4u) + 2u * (c + g + j);
                        qa[n] = q[from];
                        qb[n] = q[from + 1u];
                    }
                    for (uint i = 0u; i < KEY_PAIRS; ++i) {
                        uint at = j * KEY_PAIRS + i;
                        vec2 part[SIDE_BY_SIDE];  // the dots of the chunk's dimensions, of both keys
                        for (uint n = 0u; n < SIDE_BY_SIDE; ++n) {
                            precise vec2 product = qa[n].x * vec2(k0a[at].x, k1a[at].x);
                            part[n] = product;
                        }
                        if (FUSED == 0u) {
                            part[0] = chunk_dots(qa[0], qb[0], k0a[at], k0b[at], k1a[at], k1b[at]);
                        }
                        for (uint d = 1u; FUSED != 0u && d < 4u; ++d) {
                            for (uint n = 0u; n < SIDE_BY_SIDE; ++n) {
                                part[n] = multiply_add(vec2(qa[n][d]), vec2(k0a[at][d], k1a[at][d]), part[n]);
                            }
                        }
                        for (uint d = 0u; FUSED != 0u && d < 4u; ++d) {
                            for (uint n = 0u; n < SIDE_BY_SIDE; ++n) {
                                part[n] = multiply_add(vec2(qb[n][d]), vec2(k0b[at][d], k1b[at][d]), part[n]);
                            }
                        }
                        for (uint n = 0u; n < SIDE_BY_SIDE; ++n) {
                            precise vec2 sum = dots[(h + n) * KEY_PAIRS + i] + part[n];
                            dots[(h + n) * KEY_PAIRS + i] = sum;
                        }
                    }
                }
            }
        }
    }
    float scale = uintBitsToFloat(work[HEADER_SCORE_SCALE]);
    vec2 cap = uintBitsToFloat(uvec2(work[HEADER_SOFTCAP], work[HEADER_SOFTCAP_INVERSE]));
    uint first_key = leaf.index * KEYS_PER_LEAF + lane + item.key_shift;
    for (uint i = 0u; i < KEY_PAIRS; ++i) {
        bvec2 seen = present(leaf, i);
        for (uint h = 0u; h < VECTORS; ++h) {
            precise vec2 s = dots[h * KEY_PAIRS + i] * scale;
            if (SOFTCAP != 0u) {
                s = vec2(soft_capped(s.x, cap), soft_capped(s.y, cap));
            }
            if (ALIBI != 0u || MASK != 0u) {
                uvec2 vector = vector_of(item, h);
                s = biased(vector.x, vector.y, first_key + uvec2(2u * i, 2u * i + 1u) * LANES, s);
            }
            dots[h * KEY_PAIRS + i] = mix(vec2(EMPTY_M), s, seen);
        }
    }
}
