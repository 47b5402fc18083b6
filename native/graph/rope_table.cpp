// Double arithmetic with each operation rounded, in the order of zinc_attn/graph/rope.py. Compile with
// -ffp-contract=off. frexp, ldexp, floor and ceil are exact.
#include "rope_table.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

namespace graph {

static const double LN2 = 0.6931471805599453, INVERSE_TURN = 0.15915494309189535, SQRT_HALF = 0.7071067811865476;

static double log2_of(double x) {
    int exponent;
    double m = std::frexp(x, &exponent);
    if (m < SQRT_HALF) m *= 2.0, --exponent;
    const double t = (m - 1.0) / (m + 1.0), square = t * t;
    double total = 0.0;
    for (int odd = 23; odd > 0; odd -= 2) total = total * square + 1.0 / odd;
    return exponent + 2.0 * t * total / LN2;
}

double exp2_of(double x) {
    const double whole = std::floor(x + 0.5), z = (x - whole) * LN2;
    double total = 1.0;
    for (int n = 15; n > 0; --n) total = 1.0 + total * z / n;
    return std::ldexp(total, int(whole));
}

int rope_pairs(const Rope &rope) { return rope.mode == RopeMode::VISION ? rope.n_dims : rope.n_dims / 2; }

int rope_step(const Rope &rope) { return rope.mode == RopeMode::NORMAL ? 1 : rope_pairs(rope); }

struct Section {
    int which, power;  // which of a token's positions, and the exponent of the frequency
};

static Section section_of(const Rope &rope, int pair) {
    if (rope.mode == RopeMode::NORMAL || rope.mode == RopeMode::NEOX) return {0, pair};
    const int *s = rope.sections, begins[4] = {0, s[0], s[0] + s[1], s[0] + s[1] + s[2]};
    const int sector = pair % (begins[3] + s[3]);
    if (rope.mode == RopeMode::IMROPE) return {sector < 3 * s[sector % 3] ? sector % 3 : 3, pair};
    const int which = (sector >= begins[1]) + (sector >= begins[2]) + (sector >= begins[3]);
    return {which, rope.mode == RopeMode::VISION ? sector - begins[which] : pair};
}

// YaRN: the number of the pair that makes this many rotations in the original context.
static double corrected(const Rope &rope, double rotations) {
    return rope.n_dims * log2_of(rope.n_ctx_orig / rotations * INVERSE_TURN) / (2.0 * log2_of(rope.freq_base));
}

// YaRN: the part of each pair's frequency that is not scaled.
static std::vector<double> mixes_of(const Rope &rope) {
    std::vector<double> mixes(size_t(rope_pairs(rope)));
    if (rope.ext_factor == 0.0f) return mixes;
    double low = 0.0, high = 0.0;
    if (rope.n_ctx_orig > 0) {
        low = std::max(0.0, std::floor(corrected(rope, rope.beta_fast)));
        high = std::min(rope.n_dims - 1.0, std::ceil(corrected(rope, rope.beta_slow)));
    }
    const double width = std::max(0.001, high - low);
    for (size_t pair = 0; pair < mixes.size(); ++pair)
        mixes[pair] = (1.0 - std::min(1.0, std::max(0.0, (double(pair) - low) / width))) * rope.ext_factor;
    return mixes;
}

void rope_table(const Rope &rope, const float *factors, uint32_t *words) {
    double scale = rope.attn_factor;
    if (rope.ext_factor != 0.0f) scale *= 1.0 - 0.1 * (log2_of(rope.freq_scale) * LN2);
    const float factor = float(scale);
    const double base = log2_of(rope.freq_base);
    const std::vector<double> mixes = mixes_of(rope);
    for (int pair = 0; pair < rope_pairs(rope); ++pair, words += 4) {
        const Section section = section_of(rope, pair);
        const double mix = mixes[size_t(pair)];
        const double frequency = exp2_of(-2.0 * section.power / rope.n_dims * base) / (factors ? factors[pair] : 1.0f);
        const double turns = frequency * (rope.freq_scale * (1.0 - mix) + mix) * INVERSE_TURN;
        uint64_t fraction = uint64_t((turns - std::floor(turns)) * 18446744073709551616.0);
        if (rope.backward) fraction = 0 - fraction;
        words[0] = uint32_t(fraction), words[1] = uint32_t(fraction >> 32), words[2] = uint32_t(section.which);
        std::memcpy(words + 3, &factor, sizeof factor);
    }
}

}  // namespace graph
