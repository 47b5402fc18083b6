// ROPE: rope.comp's units, whose turns a workgroup makes once for the rows of a token.
#include "elements.h"

namespace zinc {
namespace {
struct Rope : OnLanes {
    using OnLanes::OnLanes;
    const RopeParams p = *static_cast<const RopeParams *>(bound[ROPE_BIND_PARAMS]);
    const uint type = spec[ROPE_SPEC_TYPE];
    const uint *const table = static_cast<const uint *>(bound[ROPE_BIND_TABLE]);
    const uint *const positions = static_cast<const uint *>(bound[ROPE_BIND_POSITIONS]);
    vec2 *const turns = reinterpret_cast<vec2 *>(room.scratch);  // of pairs first ... end - 1 of a token
    uint token = ~0u, first = 0, end = 0;

    void turn(uint new_token, uint begin, uint stop) {
        if (new_token == token && begin >= first && stop <= end)
            return;
        token = new_token, first = begin, end = stop;
        for (uint k = begin; k < stop; ++k) {
            const uint *entry = table + p.table + ROPE_WORDS * k;
            const uint position = positions[p.positions + entry[2] * p.stride + token];
            uvec2 phase;
            umulExtended(position, entry[0], phase.y, phase.x);
            phase.y += position * entry[1] - (int(position) < 0 ? entry[0] : 0u);
            turns[k] = scalar::cos_sin_of_turns(phase) * uintBitsToFloat(entry[3]);
        }
    }
    float get(uint index) const {
        if (type == FLOAT_TYPE_F32)
            return static_cast<const float *>(bound[ROPE_BIND_X])[index];
        return scalar::widened(static_cast<const uint16_t *>(bound[ROPE_BIND_X])[index], type, 0);
    }
    void put(uint index, float x) const {
        const uint bits = floatBitsToUint(x);
        if (type == FLOAT_TYPE_F32)
            static_cast<uint *>(bound[ROPE_BIND_Y])[index] =
                (bits & scalar::MAGNITUDE) < floatBitsToUint(p.least) ? 0u : bits;
        else
            static_cast<uint16_t *>(bound[ROPE_BIND_Y])[index] = uint16_t(scalar::encoded(x, type));
    }
    void pairs(const Run &x, const Run &y, uint begin, uint stop) const {
        const uint between = p.step == 1 ? 2 : 1;
        for (uint k = begin; k < stop; ++k) {
            const uint e = p.first + k * between, other = e + p.step;
            const float x0 = scalar::flush(get(x.base + e * x.step)), x1 = scalar::flush(get(x.base + other * x.step));
            const float cosine = turns[k].x, sine = turns[k].y;
            put(y.base + e * y.step, scalar::flush(x0 * cosine - x1 * sine));
            put(y.base + other * y.step, scalar::flush(x0 * sine + x1 * cosine));
        }
    }

    void run() {
        const uint size = type == FLOAT_TYPE_F32 || p.step == 1 ? 1 : 2;  // pairs of a unit
        const uint units = (p.y.n[0] / 2 + size - 1) / size, turning = p.pairs / size;
        const uint rows = p.y.n[1] * p.y.n[2] * p.y.n[3], stop = (linear_group() + 1) * 256;
        for (uint id = linear_group() * 256, last; id < stop && id / units < rows; id = last) {
            const uint begin = id % units, row = id / units;
            last = min(stop, (row + 1) * units);
            const uvec4 index = scalar::indices(p.y, row * p.y.n[0]);
            const Run x = place(p.x, index), y = place(p.y, index);
            if (begin < turning) {
                const uint from = begin * size, to = min(begin + last - id, turning) * size;
                turn(index.z, from, to);
                pairs(x, y, from, to);
            }
            for (uint u = max(begin, turning); u < begin + last - id; ++u)
                for (uint i = 0; i < 2 * size; ++i) {
                    uint e = 2 * size * (u - turning) + i;
                    e += e < p.first ? 0 : 2 * p.pairs;
                    if (e < p.y.n[0])
                        put(y.base + e * y.step, get(x.base + e * x.step));
                }
        }
    }
};
void rope(const Step &step, uint64_t number, Room &room) { Rope(step, room, number).run(); }
}  // namespace

const NamedKernel ROPE[] = {{"graph_rope", &rope}, {nullptr, nullptr}};
}  // namespace zinc
