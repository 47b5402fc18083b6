// SSM_CONV: a channel in each lane, then norms of neighboring channels of the workgroup; see ssm_conv.comp.
#include "elements.h"

namespace zinc {
namespace {
struct Conv : OnLanes {
    static constexpr uint SIZE = 256;  // invocations
    const SsmConvParams p = *static_cast<const SsmConvParams *>(bound[SSM_CONV_BIND_PARAMS]);
    const Elements<float> x{bound[SSM_CONV_BIND_X]}, late{bound[SSM_CONV_BIND_LATE]}, w{bound[SSM_CONV_BIND_W]};
    const Elements<float> bias{bound[SSM_CONV_BIND_BIAS]};
    const uint channels = p.y.n[0], tokens = p.y.n[1], runs = (tokens + p.run - 1) / p.run;
    alignas(64) float values[SIZE + LANES], squares[SIZE + LANES];
    Conv(const Step &step, Room &room, uint64_t number) : OnLanes(step, room, number) {}

    static ZINC_INLINE F factor(F v) { return abs(v) < PRODUCT_MIN ? (F){} : v; }
    ZINC_INLINE F result(uint t, uint channel, uint sequence) const {
        const auto element = [&](const Elements<float> &from, const Tensor &tensor, uint i) {
            return from[Run{tensor.offset + i * tensor.s[0] + sequence * tensor.s[2], channel, channels, tensor.s[1]}];
        };
        F sum = {};
        for (uint i = 0; i < p.w.n[0]; ++i) {
            const F v = t + i < p.x.n[0] ? element(x, p.x, t + i) : element(late, p.late, t + i - p.x.n[0]);
            sum = sum + factor(v) * factor(w[Run{p.w.offset + i * p.w.s[0], channel, channels, p.w.s[1]}]);
        }
        F v = flush(sum);
        if (spec[SSM_CONV_SPEC_BIASED] != 0)
            v = flush(v + flush(bias[Run{p.bias.offset, channel, channels, p.bias.s[0]}]));
        return spec[SSM_CONV_SPEC_SILU] != 0 ? flush(silu(v, all(1.0f))) : v;
    }

    void normalize(uint count) {
        for (uint apart = p.size / 2; apart; apart /= 2)
            for (uint first = 0; first < count; first += p.size)
                for (uint r = first; r < first + apart; ++r)
                    squares[r] = squares[r] + squares[r + apart];
        for (uint first = 0; first < count; first += p.size) {
            const uint id = linear_group() * SIZE + first, channel = id % channels, sequence = id / channels / runs;
            const float scale = scalar::norm_scale(spec[SSM_CONV_SPEC_OP], squares[first], p.factor, p.eps);
            for (uint i = 0; i < 2; ++i) {
                if (channel < p.begins[i] || channel >= p.ends[i])
                    continue;
                float *to = static_cast<float *>(bound[i ? SSM_CONV_BIND_SECOND : SSM_CONV_BIND_FIRST]);
                const uint base = p.offsets[i] + (p.ends[i] - p.begins[i]) * sequence + channel - p.begins[i];
                for (uint r = 0; r < p.size; r += LANES) {
                    const F v = flush(load<F>(values + first + r) * scale) * p.scales[i];
                    keep(to, {base, r, p.size, 1}, flush(v), p.size - r);
                }
            }
        }
    }

    void run() {
        const uint begin = linear_group() * SIZE, stop = min(begin + SIZE, channels * runs * p.y.n[2]);
        for (uint id = begin, count; id < stop; id += count) {
            const uint channel = id % channels, first = id / channels % runs * p.run, sequence = id / channels / runs;
            count = min(min(stop - id, channels - channel), uint(LANES));
            F v = {};
            for (uint t = first; t < min(first + p.run, tokens); ++t) {
                v = result(t, channel, sequence);
                keep(static_cast<float *>(bound[SSM_CONV_BIND_Y]), place(p.y, uvec4(channel, t, sequence, 0u)), v,
                     count);
            }
            zinc::store(values + (id - begin), v);
            zinc::store(squares + (id - begin), flush(v * v));
        }
        if (spec[SSM_CONV_SPEC_NORMED] != 0 && stop > begin)
            normalize(stop - begin);
    }
};
void ssm_conv(const Step &step, uint64_t number, Room &room) { Conv(step, room, number).run(); }
}  // namespace

const NamedKernel CONVOLUTIONS[] = {{"graph_ssm_conv", &ssm_conv}, {nullptr, nullptr}};
}  // namespace zinc
