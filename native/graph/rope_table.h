// The table that the kernel rope reads, for a kind of layer. It has the same bits as the table of
// zinc_attn/graph/rope.py.
#pragma once
#include <cstddef>
#include <cstdint>

namespace graph {

enum class RopeMode { NORMAL, NEOX, MROPE, IMROPE, VISION };

// ggml's parameters of ROPE; backward: ROPE_BACK.
struct Rope {
    RopeMode mode;
    int n_dims, n_ctx_orig;
    float freq_base, freq_scale, ext_factor, attn_factor, beta_fast, beta_slow;
    int sections[4];
    bool backward;
};

int rope_pairs(const Rope &rope);
int rope_step(const Rope &rope);  // from a pair's first element to its second

// 4 words per pair: the fraction of a turn, low word first; which position; the factor. factors: of the pairs, or NULL.
void rope_table(const Rope &rope, const float *factors, uint32_t *words);

// 2**x with the same bits on every machine, for ALiBi's slopes.
double exp2_of(double x);

// The largest power of two up to n, from which ggml counts its slopes of ALiBi.
inline uint32_t power_of_two_in(uint32_t n) { return 1u << (31 - __builtin_clz(n)); }

}  // namespace graph
