// Norms, softmaxes, sums and routers of rows: a workgroup has a row, and sums keep row_sum.glsl's order.
#include "elements.h"

namespace zinc {
namespace {
// The values of a row in SUM_LANES invocations: f gives the vector from element j on; lanes after the end are `rest`.
struct Parts {
    alignas(64) float lanes[SUM_LANES];

    template <typename T, typename J> ZINC_INLINE Parts(uint n, float rest, T f, J joined) {
        for (float &lane : lanes)
            lane = rest;
        for (uint j = 0; j < n; j += LANES) {
            F v = f(j);
            if (n - j < LANES)
                v = iota() < n - j ? v : all(rest);
            float *to = lanes + j % SUM_LANES;
            store(to, joined(load<F>(to), v));
        }
        for (uint apart = SUM_LANES / 2; apart >= LANES; apart /= 2)
            for (uint r = 0; r < apart; r += LANES)
                store(lanes + r, joined(load<F>(lanes + r), load<F>(lanes + r + apart)));
        for (uint apart = LANES / 2; apart; apart /= 2) {
            const F first = load<F>(lanes), second = load<F>(lanes + apart);
            store(lanes, joined(first, second));
        }
    }
};
template <typename T> ZINC_INLINE float row_sum(uint n, T f) {
    return Parts(n, 0.0f, f, [](F a, F b) { return a + b; }).lanes[0];
}
template <typename T> ZINC_INLINE float row_most(uint n, T f) {
    return Parts(n, LOWEST, f, [](F most, F s) { return s > most ? s : most; }).lanes[0];
}
float rounded(float most) { return rounded_most(all(most))[0]; }

template <bool QUANTIZED, bool SUMMED> struct Norm : OnLanes {
    using OnLanes::OnLanes;
    using Params = std::conditional_t<SUMMED, NormSummedParams, NormParams>;
    const Params p = *static_cast<const Params *>(bound[NORM_BIND_PARAMS]);
    float *const sums = static_cast<float *>(bound[NORM_BIND_X]), *const y = static_cast<float *>(bound[NORM_BIND_Y]);
    const Elements<float> x{sums}, a{bound[NORM_BIND_A]}, b{bound[NORM_BIND_B]};
    const uint OP = spec[NORM_SPEC_OP], FIRST = spec[NORM_SPEC_FIRST], SECOND = spec[NORM_SPEC_SECOND];

    struct Experts : OnLanes {
        using OnLanes::OnLanes;
        const NormSummedParams &p = *static_cast<const NormSummedParams *>(bound[NORM_BIND_PARAMS]);
        const Elements<float> experts{bound[NORM_SUMMED_BIND_EXPERTS]}, weights{bound[NORM_SUMMED_BIND_WEIGHTS]};
        const Elements<float> plus{bound[NORM_SUMMED_BIND_PLUS]}, more{bound[NORM_SUMMED_BIND_MORE]};
        const uint ADDED = spec[NORM_SUMMED_SPEC_ADDED];
#include "expert_sums.h"
    };

    // An operand's row, empty if the operation does not read the operand.
    static Run operand(uint op, const Tensor &t, const uvec4 &index) {
        return reads(op) ? place(t, repeated(t, index)) : Run{};
    }
    static ZINC_INLINE F number(uint op, const Elements<float> &elements, Run row, uint j, float scale) {
        if (!reads(op))
            return all(scale);
        row.x = j < row.n ? j : j % row.n;
        return flush(elements[row]);
    }

    void run(const Step &step, uint64_t group, Room &room) {
        const uint row = linear_group(), n = p.x.n[0], rows = p.x.n[1] * p.x.n[2] * p.x.n[3];
        if (row >= rows)
            return;
        uvec4 index = scalar::indices(p.x, row * n);
        const Run from = place(p.x, index), to = place(p.y, index), of_a = operand(FIRST, p.a, index);
        const Run of_b = operand(SECOND, p.b, index);
        const auto values = [&](uint j) { return flush(x[Run{from.base, j, n, from.step}]); };
        if constexpr (SUMMED) {
            Experts experts(step, room, group);
            for (uint j = 0; j < n; j += LANES)
                keep(sums, {from.base, j, n, 1}, experts.sum_at(Run{0, j, n, 1}, row), n - j);
        }
        const float mean = OP == NORM_OP_NORM ? scalar::flush(row_sum(n, values) * p.factor) : 0.0f;
        const float squares = row_sum(n, [&](uint j) {
            const F v = values(j) - mean;
            return flush(v * v);
        });
        const float scale = scalar::norm_scale(OP, squares, p.factor, p.eps);
        for (uint j = 0; j < n; j += LANES) {
            F v = (values(j) - mean) * scale;
            v = followed(FIRST, flush(v), number(FIRST, a, of_a, j, p.scales[0]));
            v = followed(SECOND, v, number(SECOND, b, of_b, j, p.scales[1]));
            keep(y, {to.base, j, n, to.step}, v, n - j);
        }
        if constexpr (QUANTIZED) {
            const uint blocks = p.joined > 1 ? n / X_BLOCK : blocks_of_row(n), joined = rows / p.joined;
            void *q = bound[NORM_QUANTIZED_BIND_Q], *scales = bound[NORM_QUANTIZED_BIND_SCALES];
            if constexpr (SUMMED)
                q = bound[NORM_SUMMED_BIND_Q], scales = bound[NORM_SUMMED_BIND_SCALES];
            const uint first = row % p.joined * blocks * joined + row / p.joined;
            for (uint i = 0; i < blocks; ++i)
                quantize_row_block(y, to, i, i * joined + first, q, scales);
        }
    }
};

template <bool QUANTIZED, bool SUMMED> void norm(const Step &step, uint64_t number, Room &room) {
    Norm<QUANTIZED, SUMMED>(step, room, number).run(step, number, room);
}

void sum_rows(const Step &step, uint64_t number, Room &room) {
    const OnLanes kernel(step, room, number);
    const SumRowsParams &p = *static_cast<const SumRowsParams *>(step.buffers[SUM_ROWS_BIND_PARAMS]);
    const Elements<float> x{step.buffers[SUM_ROWS_BIND_X]};
    const uint row = kernel.linear_group();
    if (row >= scalar::elements(p.y))
        return;
    const float sum = row_sum(p.terms, [&](uint j) {
        const uvec4 index = scalar::indices(p.x, row * p.terms + j);
        if (index.x + LANES <= p.x.n[0])
            return flush(x[OnLanes::place(p.x, index)]);
        F values = {};
        for (uint i = 0; i < min(p.terms - j, uint(LANES)); ++i)
            values[i] = x[scalar::place(p.x, scalar::indices(p.x, row * p.terms + j + i))];
        return flush(values);
    });
    static_cast<float *>(step.buffers[SUM_ROWS_BIND_Y])[scalar::place(p.y, scalar::indices(p.y, row))] =
        scalar::flush(sum * p.factor);
}

void soft_max(const Step &step, uint64_t number, Room &room) {
    const OnLanes kernel(step, room, number);
    const SoftMaxParams p = *static_cast<const SoftMaxParams *>(step.buffers[SOFT_MAX_BIND_PARAMS]);
    const Elements<float> x{step.buffers[SOFT_MAX_BIND_X]};
    const uint row = kernel.linear_group(), n = p.x.n[0], mask_type = step.spec[SOFT_MAX_SPEC_MASK_TYPE];
    if (row >= p.x.n[1] * p.x.n[2] * p.x.n[3])
        return;
    const uvec4 index = scalar::indices(p.x, row * n);
    const Run from = OnLanes::place(p.x, index), to = OnLanes::place(p.y, index);
    Run of_mask = mask_type == MASK_TYPE_NONE ? Run{} : OnLanes::place(p.mask, scalar::repeated(p.mask, index));
    const uint head = index.z, of_float = mask_type == MASK_TYPE_F32 ? FLOAT_TYPE_F32 : FLOAT_TYPE_F16;
    const bool first = head < p.heads;
    const float by = float(first ? head + 1 : 2 * (head - p.heads) + 1);
    const float slope = p.step == 0.0f ? 1.0f : scalar::weight((first ? p.step : p.half_step) * by, 0.0f);
    float *scores = reinterpret_cast<float *>(room.scratch);
    const float most = row_most(n, [&](uint j) {
        F t = flush(x[Run{from.base, j, n, from.step}]) * p.scale;
        if (mask_type != MASK_TYPE_NONE) {
            of_mask.x = j;
            t = t + slope * flush(loaded(step.buffers[SOFT_MAX_BIND_MASK], of_float, of_mask));
        }
        t = t * float(LOG2E);
        store(scores + j, t);
        return t;
    });
    const bool sinks = step.spec[SOFT_MAX_SPEC_HAS_SINKS] != 0;
    const float *of_sinks = static_cast<const float *>(step.buffers[SOFT_MAX_BIND_SINKS]);
    const float sink = sinks ? scalar::flush(of_sinks[p.sinks + head]) * float(LOG2E) : LOWEST;
    const F m = all(rounded(max(most, sink)));
    float total = row_sum(n, [&](uint j) {
        const F v = weight_of(load<F>(scores + j), m);
        store(scores + j, v);
        return v;
    });
    if (sinks)
        total = total + weight_of(all(sink), m)[0];
    const float inverse = scalar::quotient(1.0f, total);
    for (uint j = 0; j < n; j += LANES)
        keep(static_cast<float *>(step.buffers[SOFT_MAX_BIND_Y]), {to.base, j, n, to.step},
             flush(load<F>(scores + j) * inverse), n - j);
}

// The operations of route.comp.
struct Route : OnLanes {
    using OnLanes::OnLanes;
    const RouteParams p = *static_cast<const RouteParams *>(bound[ROUTE_BIND_PARAMS]);
    const Elements<float> x{bound[ROUTE_BIND_X]}, bias{bound[ROUTE_BIND_BIAS]};
    const uint gate = spec[ROUTE_SPEC_GATE], biased = spec[ROUTE_SPEC_BIASED], norm = spec[ROUTE_SPEC_NORM];
    const uint scaled = spec[ROUTE_SPEC_SCALED];

    static F in_log2(F value) { return flush(value) * float(LOG2E); }
    static F part_of(F value, F m, float inverse_total) { return flush(weight_of(in_log2(value), m) * inverse_total); }

    // The softmax, or the share of the sum, of n values, which are whole vectors.
    static void soft_max_of(float *values, uint n) {
        const F m = all(rounded(row_most(n, [&](uint j) { return in_log2(load<F>(values + j)); })));
        const float total = row_sum(n, [&](uint j) { return weight_of(in_log2(load<F>(values + j)), m); });
        const float inverse = scalar::quotient(1.0f, total);
        for (uint j = 0; j < n; j += LANES)
            store(values + j, part_of(load<F>(values + j), m, inverse));
    }
    void normalize(float *chosen, uint count) const {
        if (norm == ROUTE_NORM_OP_SOFT_MAX)
            return soft_max_of(chosen, count);
        float sum = scalar::flush(row_sum(count, [&](uint j) { return flush(load<F>(chosen + j)); }));
        sum = sum < p.most ? sum : p.most;
        sum = scalar::flush(sum > p.least ? sum : p.least);
        for (uint j = 0; j < count; j += LANES)
            store(chosen + j, flush(quotient(flush(load<F>(chosen + j)), sum)));
    }

    void run() {
        const uint row = linear_group(), n = p.x.n[0], count = p.ids.n[0];
        if (row >= p.x.n[1])
            return;
        alignas(64) float values[ROUTE_PIECE + LANES], chosen[CHOSEN_PIECE + LANES] = {};
        alignas(64) uint keys[ROUTE_PIECE + LANES];
        for (uint j = 0; j < n; j += LANES)
            store(values + j, x[Run{p.x.offset + row * p.x.s[1], j, n, p.x.s[0]}]);
        if (gate == GATE_OP_SOFT_MAX)
            soft_max_of(values, n);
        for (uint j = 0; j < n; j += LANES) {
            F value = load<F>(values + j);
            if (gate == GATE_OP_SIGMOID)
                store(values + j, value = flush(sigmoid(flush(value))));
            if (biased == 1)
                value = flush(flush(value) + flush(bias[Run{p.bias.offset + row * p.bias.s[1], j, n, p.bias.s[0]}]));
            store(keys + j, iota() + j < n ? key_of((U)value) : ~(U){});
        }
        uint *const ids = static_cast<uint *>(bound[ROUTE_BIND_IDS]);
        for (uint e = 0; e < n; ++e) {
            I before = {};  // minus the number of experts before it
            for (uint j = 0; j < n; j += LANES) {
                const U other = load<U>(keys + j);
                before += (I)(other < keys[e]) | ((I)(other == keys[e]) & (I)(iota() + j < e));
            }
            int slot = 0;
            for (int i = 0; i < LANES; ++i)
                slot -= before[i];
            if (uint(slot) < count) {
                ids[p.ids.offset + uint(slot) * p.ids.s[0] + row * p.ids.s[1]] = e;
                chosen[slot] = values[e];
            }
        }
        if (norm != ROUTE_NORM_OP_NONE)
            normalize(chosen, count);
        for (uint j = 0; j < count; j += LANES) {
            const F value = load<F>(chosen + j);
            const Run to{p.y.offset + row * p.y.s[1], j, count, p.y.s[0]};
            keep(static_cast<float *>(bound[ROUTE_BIND_Y]), to,
                 scaled == 1 ? flush(flush(value) * p.factor + p.added) : value, count - j);
        }
    }
    static ZINC_INLINE U key_of(U bits) {  // for a descending order; see sort_key.glsl
        for (int i = 0; i < LANES; ++i)
            bits[i] = scalar::key_of(bits[i], true);
        return bits;
    }
};
void route(const Step &step, uint64_t number, Room &room) { Route(step, room, number).run(); }
}  // namespace

const NamedKernel ROWS[] = {{"graph_norm", &norm<false, false>},
                            {"graph_norm_quantized", &norm<true, false>},
                            {"graph_norm_summed", &norm<true, true>},
                            {"graph_sum_rows", &sum_rows},
                            {"graph_soft_max", &soft_max},
                            {"graph_route", &route},
                            {nullptr, nullptr}};
}  // namespace zinc
