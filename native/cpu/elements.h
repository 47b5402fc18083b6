// Elements of tensors as vectors of lanes along dimension 0, and int8 blocks of them.
#pragma once
#include "numbers.h"

namespace zinc {
// Indices x, x + 1, ... of a row of n elements, `step` apart from `base` on. After the last element the row repeats.
struct Run {
    uint base, x, n, step;
    operator uint() const { return base + x * step; }
    bool whole() const { return step == 1 && x + LANES <= n; }
    uint lane(uint i) const { return base + (x + i < n ? x + i : (x + i) % n) * step; }
};
static ZINC_INLINE Run operator+(uint base, const Run &run) { return {base + run.base, run.x, run.n, run.step}; }

// Numbers of a type W of words, each as 32 bits.
template <typename W> static ZINC_INLINE U words_of(const void *from, const Run &run) {
    const W *words = static_cast<const W *>(from);
    if (run.whole())
        return __builtin_convertvector((load<Vector<W, LANES>>(words + uint(run))), U);
    U values;
    for (uint i = 0; i < LANES; ++i)
        values[i] = words[run.lane(i)];
    return values;
}

// A buffer; a Run selects a vector of its elements.
template <typename T> struct Elements {
    const void *words;
    T operator[](uint i) const { return static_cast<const T *>(words)[i]; }
    ZINC_INLINE F operator[](const Run &run) const requires std::is_same_v<T, float> {
        if (run.n == 1)
            return all((*this)[uint(run)]);
        return (F)words_of<uint>(words, run);
    }
};

static ZINC_INLINE F loaded(const void *words, uint type, const Run &run) {
    if (type == FLOAT_TYPE_F32)
        return (F)words_of<uint>(words, run);
    const U halves = words_of<uint16_t>(words, run);
    return type == FLOAT_TYPE_BF16 ? (F)(halves << 16) : halves_to_floats<F>(halves);
}

// Stores the first `count` lanes as float32.
static ZINC_INLINE void keep(float *to, const Run &run, const F &v, uint count) {
    if (run.step == 1 && count >= LANES)
        return store(to + uint(run), v);
    for (uint i = 0; i < min(count, uint(LANES)); ++i)
        to[uint(run) + i * run.step] = v[i];
}

// The common part of kernels on lanes. A vector has the indices of its first element.
struct OnLanes : Invocation {
    const uvec3 gl_WorkGroupSize = uvec3(1, 1, 1);
    OnLanes(const Step &step, Room &room, uint64_t number) : Invocation(step, room, group_of(step, number), 0, 1) {}
    uint linear_group() const { return gl_WorkGroupID.x + gl_WorkGroupID.y * gl_NumWorkGroups.x; }
    static ZINC_INLINE Run place(const Tensor &t, const uvec4 &index) {
        return {t.offset + index.y * t.s[1] + index.z * t.s[2] + index.w * t.s[3], index.x, t.n[0], t.s[0]};
    }
    static ZINC_INLINE uvec4 repeated(const Tensor &t, const uvec4 &index) { return scalar::repeated(t, index); }
    static F root(F x) { return by_lane(x, [](float number) { return scalar::root(number); }); }
    static vec<F, 2> cos_sin(F x) {
        return {by_lane(x, [](float number) { return scalar::cos_sin(number).x; }),
                by_lane(x, [](float number) { return scalar::cos_sin(number).y; })};
    }

  private:
    template <typename T> static F by_lane(F x, T f) {
        for (uint i = 0; i < LANES; ++i)
            x[i] = f(x[i]);
        return x;
    }
};

// A block of 32 neighboring values as int8; see quantizing.glsl.
static ZINC_INLINE void quantize_block(const float *from, int8_t *q, uvec2 &scales) {
    constexpr uint VECTORS = X_BLOCK / LANES;
    F v[VECTORS];
    U sizes = {};
    ZINC_UNROLL for (uint i = 0; i < VECTORS; ++i) {
        v[i] = load<F>(from + i * LANES);
        const U size = (U)v[i] & scalar::MAGNITUDE;
        sizes = size > sizes ? size : sizes;
    }
    const uint top = folded<uint, LANES>(sizes, [](auto a, auto b) { return a > b ? a : b; });
    if (top < floatBitsToUint(QUANTIZED_MIN) || top >= scalar::INFINITE) {
        std::memset(q, 0, X_BLOCK);
        scales = uvec2(top < scalar::INFINITE ? 0u : 0x7FC00000u, 0u);
        return;
    }
    const float size = uintBitsToFloat(top), d = size * (1.0f / 127.0f);
    const float unit = size >= QUANTIZED_LARGE ? 1.0f / QUANTIZED_LARGE : 1.0f;
    const float inverse = scalar::reciprocal(d * unit);
    I sums[2] = {};
    ZINC_UNROLL for (uint i = 0; i < VECTORS; ++i) {
        I n = to_int(roundEven(v[i] * unit * inverse));
        n = n < -127 ? (I){} - 127 : n > 127 ? (I){} + 127 : n;
        store(q + i * LANES, __builtin_convertvector(n, Vector<int8_t, LANES>));
        sums[i * LANES / 16] += n;
    }
    const auto add = [](auto a, auto b) { return a + b; };
    const int low = folded<int, LANES>(sums[0], add), high = folded<int, LANES>(sums[1], add);
    scales = uvec2(floatBitsToUint(d), uint(low & 0xFFFF) | uint(high) << 16);
}

// Quantize block `block` of a row of x to block i of q and scales. Values after the row's end are 0.
static ZINC_INLINE void quantize_row_block(const float *x, const Run &row, uint block, uint i, void *q, void *scales) {
    const uint begin = block * X_BLOCK;
    float values[X_BLOCK];
    const float *from = x + row.base + begin;
    if (row.step != 1 || begin + X_BLOCK > row.n) {
        for (uint k = 0; k < X_BLOCK; ++k)
            values[k] = begin + k < row.n ? x[row.base + (begin + k) * row.step] : 0.0f;
        from = values;
    }
    quantize_block(from, static_cast<int8_t *>(q) + size_t(i) * X_BLOCK, static_cast<uvec2 *>(scales)[i]);
}
static ZINC_INLINE uint blocks_of_row(uint columns) {
    return (columns + SUPERBLOCK - 1) / SUPERBLOCK * (SUPERBLOCK / X_BLOCK);
}
}  // namespace zinc
