// MOVE of whole pieces of rows: copies, GET_ROWS and SET_ROWS of one type, and between float types, whose elements are
// neighbors. Other moves are the GLSL's.
#include "elements.h"

namespace zinc {
namespace {
constexpr uint ALL = 0xFFFFFFFFu;

Kernel generated() {
    const NamedKernel *kernel = GENERATED;
    while (std::strcmp(kernel->name, "graph_move") != 0)
        ++kernel;
    return kernel->kernel;
}

template <typename W> void copy(void *to, size_t place, const void *from, size_t first, uint apart, uint count) {
    W *target = static_cast<W *>(to) + place;
    const W *source = static_cast<const W *>(from) + first;
    if (apart == 1)
        std::memmove(target, source, count * sizeof(W));
    else
        for (uint i = 0; i < count; ++i)
            target[i] = source[size_t(i) * apart];
}

struct Move : OnLanes {
    using OnLanes::OnLanes;
    const MoveParams p = *static_cast<const MoveParams *>(bound[MOVE_BIND_PARAMS]);
    const uint op = spec[MOVE_SPEC_OP], source = spec[MOVE_SPEC_SOURCE], target = spec[MOVE_SPEC_TARGET];
    const uint size = target == MOVE_TYPE_I8 ? 1 : target == MOVE_TYPE_F32 || target == MOVE_TYPE_I32 ? 4 : 2;

    bool served() const {
        const bool floats = source <= MOVE_TYPE_BF16 && target <= MOVE_TYPE_BF16 && p.x.s[0] == 1;
        return p.y.s[0] == 1 && (source == target || floats) && source < MOVE_TYPE_Q8_0 && op != MOVE_OP_WRAP &&
               op != MOVE_OP_PAD;
    }
    // The row, of `rows`, that ids name for the row at `position`; see rows.glsl.
    uint named(const uvec4 &position, uint rows) const {
        const uint *ids = static_cast<const uint *>(bound[MOVE_BIND_IDS]);
        const uvec4 id(position.y, position.z % p.ids.n[1], position.w % p.ids.n[2], 0u);
        const uint index = scalar::place(p.ids, id) * p.id_words;
        const bool there = ids[index] < rows && (p.id_words == 1 || ids[index + p.id_words - 1] == 0);
        return there ? ids[index] : ALL;
    }
    void piece(size_t to, const uvec4 &from, uint count) const {
        const uint first = scalar::place(p.x, from);
        const void *x = bound[MOVE_BIND_X];
        void *y = bound[MOVE_BIND_Y];
        if (source == target)
            return (size == 4   ? copy<uint>
                    : size == 2 ? copy<uint16_t>
                                : copy<uint8_t>)(y, to, x, first, p.x.s[0], count);
        for (uint i = 0; i < count; i += LANES) {
            const F v = loaded(x, source, Run{first, i, count, 1});
            const uint there = min(count - i, uint(LANES));
            if (target == MOVE_TYPE_F32)
                keep(static_cast<float *>(y), {uint(to), i, count, 1}, v, there);
            else
                encode(v, static_cast<uint16_t *>(y) + to + i, there);
        }
    }
    void encode(const F &v, uint16_t *to, uint count) const {
#if defined(__AVX512F__)
        if (target == MOVE_TYPE_F16 && count == LANES && !_mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q))
            return store(to, _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif defined(__F16C__)
        if (target == MOVE_TYPE_F16 && count == LANES && !_mm256_movemask_ps(_mm256_cmp_ps(v, v, _CMP_UNORD_Q)))
            return store(to, _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
#endif
        for (uint i = 0; i < count; ++i)
            to[i] = uint16_t(scalar::encoded(v[i], target));
    }
    // Elements begin ... end - 1 of the row of y that begins at `position`; x_row: the row of x where ids name one.
    void row(const uvec4 &position, uint x_row, uint begin, uint end) const {
        const size_t to = scalar::place(p.y, position);
        if (op != MOVE_OP_LINEAR) {
            if (x_row == ALL)
                std::memset(static_cast<char *>(bound[MOVE_BIND_Y]) + (to + begin) * size, 255, (end - begin) * size);
            else
                piece(to + begin, uvec4(begin, x_row, position.zw()), end - begin);
            return;
        }
        const uint number = p.y.n[0] * (position.y + p.y.n[1] * (position.z + p.y.n[2] * position.w));
        for (uint i = begin, count; i < end; i += count) {
            const uvec4 from = scalar::indices(p.x, number + i);
            count = min(end - i, p.x.n[0] - from.x);
            piece(to + i, from, count);
        }
    }

    void run() const {  // an invocation has the elements of a word, and rows begin within words
        const bool set = op == MOVE_OP_SET_ROWS;
        const Tensor &rows = set ? p.x : p.y;
        const uint each = 4 / size, columns = p.y.n[0], lanes = (columns + each - 2) / each + 1;
        const uint stop = (linear_group() + 1) * 256, count = rows.n[1] * rows.n[2] * rows.n[3];
        for (uint id = linear_group() * 256, last; id < stop && id / lanes < count; id = last) {
            const uint number = id / lanes, plane = number / rows.n[1], first = id % lanes;
            last = min(stop, (number + 1) * lanes);
            uvec4 position(0u, number % rows.n[1], plane % rows.n[2], plane / rows.n[2]);
            uint x_row = position.y;
            if (set && (position.y = named(position, p.y.n[1])) == ALL)
                continue;
            if (op == MOVE_OP_GET_ROWS)
                x_row = named(position, p.x.n[1]);
            const uint skipped = scalar::place(p.y, position) % each, end = (first + last - id) * each;
            const uint begin = max(first * each, skipped) - skipped;
            row(position, x_row, begin, max(begin, min(end - skipped, columns)));
        }
    }
};

void move(const Step &step, uint64_t number, Room &room) {
    static const Kernel other = generated();
    const Move kernel(step, room, number);
    return kernel.served() ? kernel.run() : other(step, number, room);
}
}  // namespace

const NamedKernel MOVES[] = {{"graph_move", move}, {nullptr, nullptr}};
}  // namespace zinc
