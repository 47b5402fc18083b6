// Operations element by element: the value() of each kernel's GLSL on vectors of lanes.
#include "elements.h"

namespace zinc {
namespace {
#define LOAD(buffer, type, index) loaded(buffer.words, type, index)
#include "elementwise.h"

struct SumExperts : OnLanes {
    using OnLanes::OnLanes;
    const SumExpertsParams p = *static_cast<const SumExpertsParams *>(bound[SUM_EXPERTS_BIND_PARAMS]);
    const Elements<float> experts{bound[SUM_EXPERTS_BIND_EXPERTS]}, weights{bound[SUM_EXPERTS_BIND_WEIGHTS]};
    const Elements<float> plus{bound[SUM_EXPERTS_BIND_PLUS]}, more{bound[SUM_EXPERTS_BIND_MORE]};
    static constexpr uint Y_TYPE = FLOAT_TYPE_F32, Y = SUM_EXPERTS_BIND_Y;
    const uint ADDED = spec[0];
#include "expert_sums.h"
    F value(const uvec4 &index) { return sum_at(Run{0, index.x, p.y.n[0], 1}, index.y); }
};

struct Fit : OnLanes {
    using OnLanes::OnLanes;
    const FitParams p = *static_cast<const FitParams *>(bound[FIT_BIND_PARAMS]);
    static constexpr uint Y_TYPE = FLOAT_TYPE_F32, Y = FIT_BIND_Y;
    F value(const uvec4 &index) {
        const F v = index.x < p.x.n[0] ? loaded(bound[FIT_BIND_X], FLOAT_TYPE_F32, place(p.x, index)) : (F){};
        const U lane = iota() + index.x;
        return lane >= p.x.n[0] | ((U)v & scalar::MAGNITUDE) < floatBitsToUint(p.least) ? (F){} : v;
    }
};

constexpr uint GROUP = 256;  // elements of a workgroup, and of a 16-bit y twice as many

// The value() of K for a workgroup's elements, in pieces of rows.
template <typename K, typename F> void each_piece(K &kernel, uint group, F piece) {
    const Tensor &y = kernel.p.y;
    const uint size = kernel.Y_TYPE == FLOAT_TYPE_F32 ? GROUP : 2 * GROUP;
    const uint end = min((group + 1) * size, scalar::elements(y));
    for (uint i = group * size; i < end;) {
        const uvec4 index = scalar::indices(y, i);
        const uint count = min(end - i, y.n[0] - index.x);
        piece(index, count);
        i += count;
    }
}

template <typename K, uint Y> void run_elements(const Step &step, uint64_t number, Room &room) {
    K kernel(step, room, number);
    each_piece(kernel, kernel.linear_group(), [&](uvec4 index, uint count) {
        const Run row = OnLanes::place(kernel.p.y, index);
        for (uint i = 0; i < count; i += LANES, index.x += LANES) {
            const F v = kernel.value(index);
            const Run to{row.base, index.x, row.n, row.step};
            if (kernel.Y_TYPE == FLOAT_TYPE_F32)
                keep(static_cast<float *>(kernel.bound[Y]), to, v, count - i);
            else
                for (uint k = 0; k < min(count - i, uint(LANES)); ++k)
                    static_cast<uint16_t *>(kernel.bound[Y])[uint(to) + k] = scalar::encoded(v[k], kernel.Y_TYPE);
        }
    });
}

// A workgroup has 32 blocks of int8, block b of row r is number b * rows + r.
template <typename F> void each_block(const OnLanes &kernel, const Tensor &t, F block) {
    const uint rows = t.n[1] * t.n[2] * t.n[3], end = blocks_of_row(t.n[0]) * rows, first = 32 * kernel.linear_group();
    for (uint i = first; i < min(first + 32, end); ++i) {
        const uint row = i % rows, plane = row / t.n[1];
        block(uvec4(0, row % t.n[1], plane % t.n[2], plane / t.n[2]), i / rows, i);
    }
}

void quantize(const Step &step, uint64_t number, Room &room) {
    const OnLanes kernel(step, room, number);
    const Tensor &t = static_cast<const QuantizeParams *>(step.buffers[QUANTIZE_BIND_PARAMS])->x;
    const float *x = static_cast<const float *>(step.buffers[QUANTIZE_BIND_X]);
    each_block(kernel, t, [&](const uvec4 &index, uint b, uint i) {
        const Run row = OnLanes::place(t, index);
        quantize_row_block(x, row, b, i, step.buffers[QUANTIZE_BIND_Q], step.buffers[QUANTIZE_BIND_SCALES]);
    });
}

void glu_quantized(const Step &step, uint64_t number, Room &room) {
    Glu kernel(step, room, number);
    const Tensor &t = kernel.p.y;
    float *y = static_cast<float *>(step.buffers[GLU_BIND_Y]);
    each_block(kernel, t, [&](uvec4 index, uint b, uint i) {
        const Run row = OnLanes::place(t, index);
        for (index.x = b * X_BLOCK; index.x < min((b + 1) * X_BLOCK, t.n[0]); index.x += LANES)
            keep(y, {row.base, index.x, row.n, row.step}, kernel.value(index), t.n[0] - index.x);
        quantize_row_block(y, row, b, i, step.buffers[GLU_QUANTIZED_BIND_Q], step.buffers[GLU_QUANTIZED_BIND_SCALES]);
    });
}
}  // namespace

const NamedKernel ELEMENTWISE[] = {{"graph_binary", &run_elements<Binary, BINARY_BIND_Y>},
                                   {"graph_unary", &run_elements<Unary, UNARY_BIND_Y>},
                                   {"graph_glu", &run_elements<Glu, GLU_BIND_Y>},
                                   {"graph_add_id", &run_elements<AddId, ADD_ID_BIND_Y>},
                                   {"graph_sum_experts", &run_elements<SumExperts, SUM_EXPERTS_BIND_Y>},
                                   {"graph_fit", &run_elements<Fit, FIT_BIND_Y>},
                                   {"graph_quantize", &quantize},
                                   {"graph_glu_quantized", &glu_quantized},
                                   {nullptr, nullptr}};
}  // namespace zinc
