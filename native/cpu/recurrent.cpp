// Recurrent layers: a lane has a row of a state. Sums along a row have the order of states.glsl: sums of the parts that
// its lanes have there, and then sums of halves of the parts.
#include "elements.h"

namespace zinc {
namespace {
// LANES rows of a workgroup's head at a time: vector i of `size` vectors has element i of each row.
struct States : OnLanes {
    const uint size, parts = LANES_OF_STATE(size);
    F *const s = reinterpret_cast<F *>(room.scratch);
    const float *rows[LANES];

    States(const Step &step, Room &room, uint64_t number)
        : OnLanes(step, room, number), size(spec[DELTA_NET_SPEC_SIZE]) {}
    template <typename T> static const T &params(const Step &step) { return *static_cast<const T *>(step.buffers[0]); }
    uint rows_of_group() const { return 32 / parts * spec[DELTA_NET_SPEC_OWN]; }
    const float *at(uint binding, size_t element) const { return static_cast<const float *>(bound[binding]) + element; }
    static ZINC_INLINE F above(F x, float least) { return abs(x) < least ? (F){} : x; }
    static ZINC_INLINE float above(float x, float least) { return abs(x) < least ? 0.0f : x; }

    // Transposes eight elements of eight rows at a time.
    void load_rows() const {
        uint i = 0;
        if constexpr (LANES >= 8)
            for (; i + 8 <= size; i += 8)
                for (uint row = 0; row < LANES; row += 8) {
                    F8 r[8];
                    ZINC_UNROLL for (uint k = 0; k < 8; ++k) r[k] = load<F8>(rows[row + k] + i);
                    transpose(r);
                    ZINC_UNROLL for (uint k = 0; k < 8; ++k)
                        zinc::store(reinterpret_cast<float *>(s + i + k) + row, r[k]);
                }
        for (; i < size; ++i)
            for (uint row = 0; row < LANES; ++row)
                s[i][row] = rows[row][i];
        for (i = 0; i < size; ++i)
            s[i] = above(s[i], STATE_MIN);
    }
    void store_rows(float *to, uint count) const {
        uint i = 0;
        if constexpr (LANES >= 8)
            for (; i + 8 <= size && count == LANES; i += 8)
                for (uint row = 0; row < LANES; row += 8) {
                    F8 r[8];
                    ZINC_UNROLL for (uint k = 0; k < 8; ++k)
                        r[k] = load<F8>(reinterpret_cast<const float *>(s + i + k) + row);
                    transpose(r);
                    ZINC_UNROLL for (uint k = 0; k < 8; ++k) zinc::store(to + size_t(row + k) * size + i, r[k]);
                }
        for (; i < size; ++i)
            for (uint row = 0; row < count; ++row)
                to[size_t(row) * size + i] = s[i][row];
    }
    // The sum over i of the numbers that f gives.
    template <typename T> ZINC_INLINE F sum_of(T f) const {
        F partial[8] = {};
        const uint whole = size / 32 * 32;
        if (parts == 8)
            for (uint i = 0; i < whole; i += 32)
                ZINC_UNROLL for (uint part = 0; part < 8; ++part)
                    ZINC_UNROLL for (uint k = 0; k < 4; ++k) partial[part] = partial[part] + f(i + 4 * part + k);
        for (uint i = parts == 8 ? whole : 0; i < size; ++i)
            partial[i / 4 % parts] = partial[i / 4 % parts] + f(i);
        for (uint apart = parts / 2; apart; apart /= 2)
            for (uint i = 0; i < apart; ++i)
                partial[i] = partial[i] + partial[i + apart];
        return partial[0];
    }
};

void delta_net(const Step &step, uint64_t number, Room &room) {
    States g(step, room, number);
    const DeltaNetParams &p = States::params<DeltaNetParams>(step);
    const bool by_channel = step.spec[DELTA_NET_SPEC_BY_CHANNEL] != 0;
    const uint head = g.gl_WorkGroupID.y, sequence = g.gl_WorkGroupID.z, all_rows = p.state.n[1], tokens = p.v.n[2];
    const auto begin = [&](uint binding, const Tensor &t, uint planes) {
        return g.at(binding, scalar::place(t, uvec4(0u, head % t.n[1], 0u, sequence / (p.v.n[3] / planes))));
    };
    const float *q = begin(DELTA_NET_BIND_Q, p.q, p.q.n[3]), *k = begin(DELTA_NET_BIND_K, p.k, p.k.n[3]);
    const float *v = begin(DELTA_NET_BIND_V, p.v, p.v.n[3]), *gate = begin(DELTA_NET_BIND_GATE, p.gate, p.v.n[3]);
    const float *beta = begin(DELTA_NET_BIND_BETA, p.beta, p.v.n[3]);
    const uint *ids = static_cast<const uint *>(step.buffers[DELTA_NET_BIND_IDS]);
    const uint named = step.spec[DELTA_NET_SPEC_NAMED] != 0 ? ids[p.ids + sequence] : sequence;
    float *outputs = static_cast<float *>(step.buffers[DELTA_NET_BIND_OUTPUTS]) + p.outputs;
    float *kept = static_cast<float *>(step.buffers[DELTA_NET_BIND_KEPT]) + p.kept;
    float *decays = reinterpret_cast<float *>(g.s + g.size), *ks = decays + g.size, *qs = ks + g.size;
    const uint first = g.gl_WorkGroupID.x * g.rows_of_group(), end = min(first + g.rows_of_group(), all_rows);
    for (uint row = first; row < end; row += LANES) {
        const uint count = min(end - row, uint(LANES));
        for (uint i = 0; i < LANES; ++i)
            g.rows[i] = g.at(DELTA_NET_BIND_STATE,
                             scalar::place(p.state, uvec4(0u, row + min(i, count - 1), head, named)));
        g.load_rows();
        for (uint t = 0; t < tokens; ++t) {
            for (uint i = 0; i < g.size; ++i) {
                if (i == 0 || by_channel)
                    decays[i] = States::above(scalar::exponential(scalar::flush(gate[t * p.gate.s[2] + i])), DECAY_MIN);
                else
                    decays[i] = decays[0];
                ks[i] = States::above(k[t * p.k.s[2] + i], STATE_MIN);
                qs[i] = States::above(q[t * p.q.s[2] + i], STATE_MIN);
            }
            const F sum = g.sum_of([&](uint i) {
                g.s[i] = g.s[i] * decays[i];
                return g.s[i] * ks[i];
            });
            const Run of_v{t * p.v.s[2] + row, 0, count, 1};
            const F delta = States::above((flush((F)words_of<uint>(v, of_v)) - sum) *
                                              scalar::flush(beta[t * p.beta.s[2]]), FACTOR_MIN);
            const F output = g.sum_of([&](uint i) {
                g.s[i] = States::above(g.s[i] + ks[i] * delta, STATE_MIN);
                return g.s[i] * qs[i];
            });
            const Run to{((sequence * tokens + t) * p.v.n[1] + head) * all_rows + row, 0, count, 1};
            keep(outputs, to, flush(output * p.scale), count);
            if (const uint slot = tokens - 1 - t; slot < p.slots)
                g.store_rows(kept + slot * p.steps[1] + sequence * p.steps[0] + (head * all_rows + row) * g.size,
                             count);
        }
    }
}

void ssm_scan(const Step &step, uint64_t number, Room &room) {
    States g(step, room, number);
    const SsmScanParams &p = States::params<SsmScanParams>(step);
    const bool by_element = step.spec[SSM_SCAN_SPEC_BY_ELEMENT] != 0;
    const uint group = g.gl_WorkGroupID.y, sequence = g.gl_WorkGroupID.z, of_head = p.x.n[0], tokens = p.x.n[2];
    const uint all_rows = of_head * p.x.n[1], of_group = all_rows / p.b.n[1];
    const uint first = group * of_group + g.gl_WorkGroupID.x * g.rows_of_group();
    const uint end = min(first + g.rows_of_group(), (group + 1) * of_group);
    const uint named = static_cast<const uint *>(step.buffers[SSM_SCAN_BIND_IDS])[p.ids + sequence];
    const float *a = g.at(SSM_SCAN_BIND_A, p.a);
    float *outputs = static_cast<float *>(step.buffers[SSM_SCAN_BIND_OUTPUTS]) + p.outputs;
    float *kept = static_cast<float *>(step.buffers[SSM_SCAN_BIND_KEPT]) + p.kept;
    float *bs = reinterpret_cast<float *>(g.s + g.size), *cs = bs + g.size;
    const auto decay = [](F by, F factor) { return States::above(exponential(flush(by * flush(factor))), DECAY_MIN); };
    for (uint row = first; row < end; row += LANES) {
        const uint count = min(end - row, uint(LANES));
        uint heads[LANES];
        for (uint i = 0; i < LANES; ++i) {
            const uint row_index = row + min(i, count - 1);
            heads[i] = row_index / of_head;
            g.rows[i] = g.at(SSM_SCAN_BIND_STATE,
                             scalar::place(p.state, uvec4(0u, row_index % of_head, heads[i], named)));
        }
        g.load_rows();
        for (uint t = 0; t < tokens; ++t) {
            const uvec4 index(0u, 0u, t, sequence);
            const float *b = g.at(SSM_SCAN_BIND_B, scalar::place(p.b, index) + group * g.size);
            const float *c = g.at(SSM_SCAN_BIND_C, scalar::place(p.c, index) + group * g.size);
            for (uint i = 0; i < g.size; ++i)
                bs[i] = States::above(b[i], STATE_MIN), cs[i] = States::above(c[i], STATE_MIN);
            F by, of_a;
            for (uint i = 0; i < LANES; ++i) {
                by[i] = *g.at(SSM_SCAN_BIND_DT, scalar::place(p.dt, uvec4(heads[i], t, sequence, 0u)));
                of_a[i] = a[by_element ? 0 : heads[i]];
            }
            by = flush(softplus(flush(by)));
            const F shared_factor = decay(by, of_a);
            const Run of_x{scalar::place(p.x, index) + row, 0, count, 1};
            const F x = flush((F)words_of<uint>(step.buffers[SSM_SCAN_BIND_X], of_x));
            const F added = States::above(x * by, FACTOR_MIN);
            const F output = g.sum_of([&](uint i) {
                F factors = shared_factor;
                if (by_element) {
                    for (uint lane = 0; lane < LANES; ++lane)
                        factors[lane] = a[heads[lane] * g.size + i];
                    factors = decay(by, factors);
                }
                g.s[i] = States::above(g.s[i] * factors + bs[i] * added, STATE_MIN);
                return g.s[i] * cs[i];
            });
            keep(outputs, {(sequence * tokens + t) * all_rows + row, 0, count, 1}, flush(output), count);
            if (const uint slot = tokens - 1 - t; slot < p.slots)
                g.store_rows(kept + slot * p.steps[1] + sequence * p.steps[0] + row * g.size, count);
        }
    }
}
}  // namespace

const NamedKernel RECURRENT[] = {{"graph_delta_net", &delta_net}, {"graph_ssm_scan", &ssm_scan}, {nullptr, nullptr}};
}  // namespace zinc
