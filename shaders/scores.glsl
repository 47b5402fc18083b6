// Step 1 of a leaf, the scores: lane = key, two keys per lane, or four, or eight.
//
// Q is the same for every lane and comes through scalar loads; each vector of it is loaded once for all chunks in
// flight.  Eight dimensions (a chunk) are summed on their own before they join the dot product.  find_scores, at the
// end, has the order of the loops.

#include "bias.glsl"
#include "chunks.glsl"

vec2 part[SIDE_BY_SIDE];  // [vector]: the dots of this chunk with a pair of keys

// The dots of one chunk (dimensions a, then b) of a query vector with a pair of keys, canonical.  Both keys have the
// query value in common, so that a GPU with dual issue takes them in one cycle.
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

// To part: the dots of q's chunk with the pair at `at`, each sum rounded once with its product.
void fused_dots(uint at) {
    for (uint n = 0u; n < SIDE_BY_SIDE; ++n) {
        precise vec2 product = qa[n].x * vec2(k0a[at].x, k1a[at].x);
        part[n] = product;
    }
    for (uint d = 1u; d < 4u; ++d) {
        for (uint n = 0u; n < SIDE_BY_SIDE; ++n) {
            part[n] = multiply_add(vec2(qa[n][d]), vec2(k0a[at][d], k1a[at][d]), part[n]);
        }
    }
    for (uint d = 0u; d < 4u; ++d) {
        for (uint n = 0u; n < SIDE_BY_SIDE; ++n) {
            part[n] = multiply_add(vec2(qb[n][d]), vec2(k0b[at][d], k1b[at][d]), part[n]);
        }
    }
}

// q's chunk and chunk j of those in use join dots.
void add_chunk(uint h, uint j) {
    for (uint i = 0u; i < KEY_PAIRS; ++i) {
        uint at = j * KEY_PAIRS + i;
        if (FUSED == 0u) {
            part[0] = chunk_dots(qa[0], qb[0], k0a[at], k0b[at], k1a[at], k1b[at]);
        } else {
            fused_dots(at);
        }
        for (uint n = 0u; n < SIDE_BY_SIDE; ++n) {
            precise vec2 sum = dots[(h + n) * KEY_PAIRS + i] + part[n];
            dots[(h + n) * KEY_PAIRS + i] = sum;
        }
    }
}

// From dot products to scores, EMPTY_M for absent keys.
void finish_scores(Item item, Leaf leaf) {
    vec3 factors = score_factors();
    uint first_key = leaf.index * KEYS_PER_LEAF + lane + item.key_shift;
    for (uint i = 0u; i < KEY_PAIRS; ++i) {
        bvec2 seen = present(leaf, i);
        for (uint h = 0u; h < VECTORS; ++h) {
            uvec2 position = first_key + uvec2(2u * i, 2u * i + 1u) * LANES;
            precise vec2 products = dots[h * KEY_PAIRS + i];
            if (doubled(K_STORAGE)) {
                products = products * 0.5;
            }
            vec2 s = scores_of(products, factors, vector_of(item, h), position);
            dots[h * KEY_PAIRS + i] = mix(vec2(EMPTY_M), s, seen);
        }
    }
}

// Step 1.  To dots: the scores of the lane's keys.
void find_scores(Item item, Leaf leaf) {
    barrier();  // in the single build for lavapipe only, which splits shaders at barriers and is faster with this one
    find_keys(item, leaf);
    for (uint i = 0u; i < VECTORS * KEY_PAIRS; ++i) {
        dots[i] = vec2(0.0);
    }
    uint q_heads = work[HEADER_Q_HEADS];
    [[dont_unroll]] for (uint c = 0u; c < K_DIM / CHUNK; c += CHUNKS_AHEAD) {
        load_chunks(c);
        for (uint ahead = 0u; ahead < CHUNKS_AHEAD; ahead += TOGETHER) {
            unpack_chunks(c, ahead);
            for (uint h = 0u; h < VECTORS; h += SIDE_BY_SIDE) {
                for (uint j = 0u; j < TOGETHER; ++j) {
                    load_q(item, q_heads, h, c + ahead + j);
                    add_chunk(h, j);
                }
            }
        }
    }
    finish_scores(item, leaf);
}
