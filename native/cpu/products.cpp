// Products y = w x of shaders/graph, of quantized weights and of floats: a lane has a row of w, and a workgroup does
// the work of the shader's workgroup. The decoders of quantized weights and the order of sums are the GLSL's text.
#include "contract.h"

namespace zinc {
namespace {
constexpr uint WIDE = 32 / LANES;  // vectors of a group of 32 rows

// The columns of a workgroup, in kernels of few and of many rows of x, which have the same buffers.
template <typename Params> struct Columns : Invocation {
    static constexpr bool FLOATS = std::is_same_v<Params, MulMatFloatParams>;
    static constexpr uint FIRST = FLOATS ? MUL_MAT_FLOAT_BIND_ADDED : MUL_MAT_BIND_ADDED;
    const Params &p = *static_cast<const Params *>(bound[0]);
    const float *const added = static_cast<const float *>(bound[FIRST]);
    const uint *const ids = static_cast<const uint *>(bound[FIRST + 1]);
    float *const y = static_cast<float *>(bound[FIRST + 2]);
    const uvec3 gl_WorkGroupSize = uvec3(1, 1, 1);
    const bool TILED;
    const uint ADD, EXPERTS, groups, most;  // groups of 32 rows, and columns at most

    Columns(const Step &step, Room &room, uint64_t number, bool tiled)
        : Invocation(step, room, group_of(step, number), 0, 1), TILED(tiled),
          ADD(spec[MUL_MAT_SPEC_ADD + FLOATS]), EXPERTS(spec[MUL_MAT_SPEC_EXPERTS + FLOATS]),
          groups(tiled ? spec[MUL_MAT_SPEC_TILE_ROWS + FLOATS] / 32 : 1),
          most(tiled ? spec[MUL_MAT_SPEC_TILE_COLUMNS + FLOATS] : spec[MUL_MAT_VEC_SPEC_COLUMNS + FLOATS]) {}
#include "columns.h"

    // How many of the tile's columns y has. With experts the tile ends with the list's pairs.
    uint count() {
        const uint first = gl_WorkGroupID.y * most;
        uint n = 0;
        while (n < most && (EXPERTS == 0 ? first + n < p.y.n[1] : pair_at(first + n) < p.y.n[1] * p.y.n[2]))
            ++n;
        return n;
    }
    void store_rows(uint row, uint column, const float *sums) {
        for (uint i = 0; i < 32; ++i)
            store(row + i, gl_WorkGroupID.y * most + column, sums[i]);
    }
};

using lanes_uvec4 = vec<U, 4>;
using lanes_vec2 = vec<F, 2>;
using lanes_vec4 = vec<F, 4>;
ZINC_INLINE lanes_vec2 unpackHalf2x16(U w) { return {halves_to_floats<F>(w & 0xFFFFu), halves_to_floats<F>(w >> 16)}; }

// 32 rows of a superblock of quantized weights, a vector of rows at a time. FEW: values stay as they lie, four words of
// a row side by side, and the dot products of the words are added afterwards.
template <uint TYPE, bool FEW> struct Weights {
    const uint8_t *const rows;   // the group of rows
    const size_t blocks, first;  // blocks of a row of the group, and the superblock's first one
    uint lane = 0;               // the vector's first row
    lanes_uvec4 headers[WIDE];   // each vector's piece of 16 bytes that has scales

    ZINC_INLINE Weights(const uint8_t *rows, size_t blocks, size_t first) : rows(rows), blocks(blocks), first(first) {
        constexpr bool K = TYPE == WEIGHT_TYPE_Q2_K || TYPE == WEIGHT_TYPE_Q4_K || TYPE == WEIGHT_TYPE_Q5_K;
        const uint8_t *from = piece(0, WEIGHT_PIECES_16(TYPE), K ? 0 : 12, 16);
        for (uint v = 0; v < WIDE && (K || TYPE == WEIGHT_TYPE_Q6_K); ++v)
            headers[v] = apart(row_words(from + v * (16 * LANES)));
    }

    // The address of piece i. A block has `count` pieces of `size` bytes of each row, from byte `begin` on.
    ZINC_INLINE const uint8_t *piece(uint begin, uint count, uint i, uint size) const {
        const uint block = BLOCKS == 1 ? 0 : i / count;
        return rows + 32 * ((begin + (i - block * count) * size) * blocks + (first + block) * size);
    }
    template <typename T> ZINC_INLINE U words(const uint8_t *from) const {
        return __builtin_convertvector((load<Vector<T, LANES>>(from + lane * sizeof(T))), U);
    }
    static ZINC_INLINE lanes_uvec4 row_words(const uint8_t *from) {
        return {load<U>(from), load<U>(from + sizeof(U)), load<U>(from + 2 * sizeof(U)), load<U>(from + 3 * sizeof(U))};
    }
    // Words 0 to 3 of rows, which lie row by row, as a vector for each word; in two rounds.
    static ZINC_INLINE lanes_uvec4 apart(const lanes_uvec4 &v) {
        const U even[2] = {evens(v.x, v.y), evens(v.z, v.w)}, odd[2] = {odds(v.x, v.y), odds(v.z, v.w)};
        return {evens(even[0], even[1]), evens(odd[0], odd[1]), odds(even[0], even[1]), odds(odd[0], odd[1])};
    }
    ZINC_INLINE lanes_uvec4 values16(uint i) const {
        const lanes_uvec4 words = row_words(piece(0, WEIGHT_PIECES_16(TYPE), i, 16) + 16 * lane);
        return FEW ? words : apart(words);
    }
    ZINC_INLINE const lanes_uvec4 &piece16(uint) const { return headers[lane / LANES]; }
    ZINC_INLINE U piece4(uint i) const {
        return words<uint>(piece(16 * WEIGHT_PIECES_16(TYPE), WEIGHT_PIECES_4(TYPE), i, 4));
    }
    ZINC_INLINE U small_piece(uint i) const {
        const uint begin = 16 * WEIGHT_PIECES_16(TYPE) + 4 * WEIGHT_PIECES_4(TYPE);
        if (TYPE == WEIGHT_TYPE_MXFP4)
            return words<uint8_t>(piece(begin, 1, i, 1));
        return words<uint16_t>(piece(begin, 1, i, 2));
    }
    // Bits 4 of the bytes of words 0 to 3 of each row, from 16 bits each.
    ZINC_INLINE lanes_uvec4 fifths(U bits) {
        if (!FEW)
            return spread_16(bits);
        lanes_uvec4 fifth;
        ZINC_UNROLL for (uint k = 0; k < 4; ++k)
            fifth[k] = spread(__builtin_shuffle(bits, iota() / 4 + k * (LANES / 4)) >> (iota() % 4 * 4));
        return fifth;
    }
    // The first 16 values of a block, and the others. Each byte is LESS larger than the weight's integer.
    ZINC_INLINE void decode(uint j, lanes_uvec4 &low, lanes_uvec4 &high) {
        if constexpr (HAS_TABLE) {
            const lanes_uvec4 w = values16(j);
            const uvec4 table = LESS ? (TABLE ^ 0x80808080u) - (128 - LESS) * 0x01010101u : TABLE;
            ZINC_UNROLL for (uint k = 0; k < 4; ++k) {
                low[k] = entries(&table.x, w[k] & NIBBLES);
                high[k] = entries(&table.x, w[k] >> 4 & NIBBLES);
            }
        } else {
            decode_pairs(j, low, high);
            if (TYPE == WEIGHT_TYPE_Q8_0 && LESS)
                low ^= 0x80808080u, high ^= 0x80808080u;
        }
    }
    static ZINC_INLINE F flush(F x) { return zinc::flush(x); }
    static constexpr bool SCALED = false, HALVES = WEIGHT_HALVES(TYPE);
#include "quantized.h"
    static constexpr bool WIDE_BYTES = TYPE == WEIGHT_TYPE_Q8_0 || (HAS_TABLE && !IS_MXFP4);  // -128 to 127
    static constexpr bool SIGNED = WIDE_BYTES && !DOTS_OF_UNSIGNED;
    static constexpr uint STEP = !FEW || !IS_256 ? 1 : HAS_HALVES ? 4 : 2;  // blocks that share pieces
    static constexpr int LESS = IS_MXFP4 ? 12 : WIDE_BYTES && DOTS_OF_UNSIGNED ? 128 : OFFSET;

    // Dot products of the rows with a block of x. HAS_HALVES: one for each half; else first is 0, second the block's.
    static ZINC_INLINE void dots(const lanes_uvec4 &low, const lanes_uvec4 &high, const uint8_t *x, I &first,
                                 I &second) {
        if constexpr (FEW) {
            const U low_x = four_times(x), high_x = four_times(x + 16);
            I a[4], b[4];
            ZINC_UNROLL for (uint k = 0; k < 4; ++k) {
                a[k] = dot4<SIGNED>(low[k], low_x, (I){});
                b[k] = HAS_HALVES ? dot4<SIGNED>(high[k], high_x, (I){})
                                  : dot8<SIGNED>(low[k], low_x, high[k], high_x, (I){});
            }
            first = HAS_HALVES ? four_sums(a) : (I){};
            second = four_sums(b);
        } else {
            const auto dot16 = [x](const lanes_uvec4 &w, uint k, I sum) {
                const auto word = [x](uint i) { return load<uint>(x + 4 * i) - (U){}; };
                sum = dot8<SIGNED>(w.x, word(k), w.y, word(k + 1), sum);
                return dot8<SIGNED>(w.z, word(k + 2), w.w, word(k + 3), sum);
            };
            const I all = dot16(low, 0, (I){});
            first = HAS_HALVES ? all : (I){};
            second = dot16(high, 4, HAS_HALVES ? (I){} : all);
        }
    }

    // Add a block's products to the vector's sums and minima. scales: block_scales; scale and x: the block of x.
    ZINC_INLINE void add(const lanes_uvec4 &low, const lanes_uvec4 &high, const lanes_vec4 &scales, const uvec2 &scale,
                         const uint8_t *x, float *sums, float *minima) {
        const ivec2 less = sums_of_x(scale) * LESS;
        I first, second;
        dots(low, high, x, first, second);
        const F halves[2] = {to_float(first - less.x), to_float(second - (HAS_HALVES ? less.y : less.x + less.y))};
        const lanes_vec2 both = HAS_HALVES ? lanes_vec2(halves[0], halves[1]) : lanes_vec2(halves[1], 0.0f);
        F sum = load<F>(sums), minimum = load<F>(minima);
        add_products(scales, scales_of_x(scale), both, IS_MXFP4, sum, minimum);
        zinc::store(sums, sum);
        if (HAS_MINIMUM && IS_256)
            zinc::store(minima, minimum);
    }
};

// Copies `count` blocks of a group of `rows` rows, from block `first` on, to `wide`, a group of 32 rows that repeats
// the last row.
void widen(const uint8_t *group, uint rows, size_t blocks, size_t first, uint count, uint type, uint8_t *wide) {
    const uint large = 16 * WEIGHT_PIECES_16(type), words = large + 4 * WEIGHT_PIECES_4(type);
    for (uint begin = 0, size; begin < WEIGHT_SIZE(type); begin += size) {
        size = begin < large ? 16 : begin < words ? 4 : WEIGHT_SIZE(type) - words;
        const uint8_t *from = group + (begin * blocks + first * size) * rows;
        for (uint i = 0; i < 32 * count; ++i, wide += size)
            std::memcpy(wide, from + (i / 32 * rows + min(i % 32, rows - 1)) * size, size);
    }
}

template <uint TYPE, bool FEW> void multiply(Columns<MulMatParams> &call) {
    using W = Weights<TYPE, FEW>;
    const uint8_t *const q = static_cast<const uint8_t *>(call.bound[MUL_MAT_BIND_Q]);
    const uvec2 *const scales = static_cast<const uvec2 *>(call.bound[MUL_MAT_BIND_SCALES]);
    const uint columns = FEW ? 1 : call.count(), rows = call.p.y.n[0];
    const uint first_group = call.gl_WorkGroupID.x * call.groups;
    const size_t blocks = call.p.blocks / (8 / W::BLOCKS), x_rows = call.rows_of_x();
    uint numbers[256];
    for (uint n = 0; n < columns; ++n)
        numbers[n] = call.number_in_x(call.gl_WorkGroupID.y * call.most + n);
    alignas(64) float few_sums[64];  // no pointer to weights or to x can point here, so sums stay in registers
    float *const total = reinterpret_cast<float *>(call.room.scratch);
    float *const sums = FEW ? few_sums : total + 32 * columns, *const minima = sums + 32 * columns;
    uint8_t *const wide = reinterpret_cast<uint8_t *>(total + 96 * columns);
    for (uint g = first_group; g < first_group + call.groups && g * 32 < rows; ++g) {
        const uint width = min(WEIGHT_GROUP, rows - g * WEIGHT_GROUP);
        const uint8_t *group = static_cast<const uint8_t *>(call.bound[MUL_MAT_BIND_W]) +
                               (call.matrix_begin() + g * (WEIGHT_GROUP / 16 * WEIGHT_SIZE(TYPE)) * blocks) * 16;
        std::memset(total, 0, sizeof(float) * 32 * columns);
        for (size_t superblock = 0; superblock * 8 < call.p.blocks; ++superblock) {
            const uint count = min(8u, uint(call.p.blocks - superblock * 8)), of_w = min(W::BLOCKS, count);
            if (width < 32)
                widen(group, width, blocks, superblock * W::BLOCKS, of_w, TYPE, wide);
            W w = width < 32 ? W(wide, of_w, 0) : W(group, blocks, superblock * W::BLOCKS);
            std::memset(sums, 0, 2 * sizeof(float) * 32 * columns);
            for (uint begin = 0; begin < count; begin += W::STEP) {
                const size_t place = (superblock * 8 + begin) * x_rows;
                uvec2 scale[W::STEP];
                for (uint i = 0; FEW && i < W::STEP; ++i)
                    scale[i] = scales[place + i * x_rows + numbers[0]];
                for (w.lane = 0; w.lane < 32; w.lane += LANES)
                    ZINC_UNROLL for (uint i = 0; i < W::STEP; ++i) {
                        lanes_uvec4 low, high;
                        w.decode(begin + i, low, high);
                        const lanes_vec4 scales_of_w = w.block_scales(begin + i);
                        for (uint n = 0; n < columns; ++n) {
                            const size_t block = place + i * x_rows + numbers[n];
                            w.add(low, high, scales_of_w, FEW ? scale[i] : scales[block], q + block * 32,
                                  sums + 32 * n + w.lane, minima + 32 * n + w.lane);
                        }
                    }
            }
            for (w.lane = 0; w.lane < 32; w.lane += LANES) {
                const lanes_vec2 scale = W::IS_256 ? w.superblock_scale() : lanes_vec2(0.0f, 0.0f);
                for (uint i = w.lane; i < columns * 32; i += 32)
                    store(total + i, load<F>(total + i) +
                                         w.superblock_sum(scale, load<F>(sums + i), load<F>(minima + i)));
            }
        }
        for (uint n = 0; n < columns; ++n)
            call.store_rows(g * 32, n, total + 32 * n);
    }
}

template <uint TYPE, bool TILED> void multiply_type(const Step &step, uint64_t number, Room &room) {
    Columns<MulMatParams> columns(step, room, number, TILED);
    if (!columns.find_matrix())
        return;
    if (!TILED && columns.most == 1)
        multiply<TYPE, true>(columns);
    else
        multiply<TYPE, false>(columns);
}

template <bool TILED> void multiply_quantized(const Step &step, uint64_t number, Room &room) {
    switch (step.spec[MUL_MAT_SPEC_TYPE]) {
#define ZINC_TYPE(t) case t: return multiply_type<t, TILED>(step, number, room);
        ZINC_TYPE(0) ZINC_TYPE(1) ZINC_TYPE(2) ZINC_TYPE(3) ZINC_TYPE(4) ZINC_TYPE(5) ZINC_TYPE(6)
        ZINC_TYPE(7) ZINC_TYPE(8) ZINC_TYPE(9) ZINC_TYPE(10) ZINC_TYPE(11) ZINC_TYPE(12)
    }
}

// --- floats ----------------------------------------------------------------------------------------------------------

struct Floats : Columns<MulMatFloatParams> {
    using Columns<MulMatFloatParams>::Columns;
    const uint w_type = spec[MUL_MAT_FLOAT_SPEC_W_TYPE], x_type = spec[MUL_MAT_FLOAT_SPEC_X_TYPE];

    // Eight elements of a tensor, `apart` from each other. Elements from `count` on and small magnitudes are 0.
    template <uint TYPE> static ZINC_INLINE F8 eight(const void *from, size_t first, size_t apart, uint count) {
        using Word = std::conditional_t<TYPE == FLOAT_TYPE_F32, uint, uint16_t>;
        const Word *words = static_cast<const Word *>(from) + first;
        Word some[8] = {};
        if (apart != 1 || count < 8) {
            for (uint i = 0; i < min(count, 8u); ++i)
                some[i] = words[i * apart];
            words = some;
        }
        F8 values;
        if constexpr (TYPE == FLOAT_TYPE_F16)
            return from_halves(words);  // none is small
        if constexpr (TYPE == FLOAT_TYPE_F32)
            values = load<F8>(words);
        else
            values = (F8)(__builtin_convertvector(load<Halves>(words), U8) << 16);
        return (F8)((U8)values & ~(U8)((F8)((U8)values & MAGNITUDE) < PRODUCT_MIN));
    }
    template <uint TYPE> static void unpack_row(const void *from, size_t first, size_t apart, uint count, float *to) {
        for (uint i = 0; i < count; i += 8)
            zinc::store(to + i, eight<TYPE>(from, first + i * apart, apart, count - i));
    }
    // To `to` (count, 32): 32 rows.
    template <uint TYPE>
    static void unpack_rows(const void *from, const size_t *first, size_t apart, uint count, float *to) {
        for (uint i = 0; i < count; i += 8)
            for (uint row = 0; row < 32; row += 8) {
                F8 r[8];
                ZINC_UNROLL for (uint k = 0; k < 8; ++k)
                    r[k] = eight<TYPE>(from, first[row + k] + i * apart, apart, count - i);
                transpose(r);
                ZINC_UNROLL for (uint k = 0; k < 8; ++k) zinc::store(to + 32 * (i + k) + row, r[k]);
            }
    }
#define ZINC_BY_TYPE(f, type)                                                                                         \
    (type == FLOAT_TYPE_F32 ? f<FLOAT_TYPE_F32> : type == FLOAT_TYPE_F16 ? f<FLOAT_TYPE_F16> : f<FLOAT_TYPE_BF16>)

    // For one row of x, eight rows of w are multiplied as they lie; the products are transposed, and then added.
    template <uint TYPE> static void add_rows(const void *from, const size_t *rows, size_t apart, uint count,
                                              const float *x, float *total) {
        F8 all_sums = load<F8>(total);
        for (uint begin = 0; begin < count; begin += SUPERBLOCK) {
            const uint end = min(begin + SUPERBLOCK, count);
            F8 sum = {}, r[8];
            for (uint i = begin; i < end; i += 8) {
                const F8 of_x = load<F8>(x + i);
                if (apart == 1 && i + 8 <= count)
                    ZINC_UNROLL for (uint k = 0; k < 8; ++k) r[k] = eight<TYPE>(from, rows[k] + i, 1, 8) * of_x;
                else
                    for (uint k = 0; k < 8; ++k)
                        r[k] = eight<TYPE>(from, rows[k] + i * apart, apart, count - i) * of_x;
                transpose(r);
                ZINC_UNROLL for (uint k = 1; k < 8; ++k) r[0] = r[0] + r[k];
                sum = sum + r[0];
            }
            all_sums = all_sums + sum;
        }
        zinc::store(total, all_sums);
    }
    void run_few() {
        constexpr uint PART = 16 * SUPERBLOCK;  // of x, unpacked
        const uvec4 plane = matrix_of_w();
        const uint g = gl_WorkGroupID.x, k = p.w.n[0];
        alignas(64) float x[PART], total[32] = {};
        for (uint first = 0; first < k; first += PART) {
            const uint left = min(k - first, PART);
            const uvec4 index = column_of_x(gl_WorkGroupID.y) + uvec4(first, 0u, 0u, 0u);
            ZINC_BY_TYPE(unpack_row, x_type)(bound[MUL_MAT_FLOAT_BIND_X], place(p.x, index), p.x.s[0], left, x);
            for (uint row = 0; row < 32 && g * 32 + row < p.y.n[0]; row += 8) {
                size_t rows[8];
                for (uint i = 0; i < 8; ++i)
                    rows[i] = place(p.w, plane + uvec4(first, min(g * 32 + row + i, p.w.n[1] - 1), 0u, 0u));
                ZINC_BY_TYPE(add_rows, w_type)(bound[MUL_MAT_FLOAT_BIND_W], rows, p.w.s[0], left, x, total + row);
            }
        }
        store_rows(g * 32, 0, total);
    }

    void run() {
        if (!find_matrix())
            return;
        const uint columns = count(), k = p.w.n[0];
        if (!TILED && most == 1)
            return run_few();
        float *total = reinterpret_cast<float *>(room.scratch), *w = total + 32 * most, *x = w + 32 * SUPERBLOCK;
        const uvec4 plane = matrix_of_w();
        for (uint g = gl_WorkGroupID.x * groups; g < (gl_WorkGroupID.x + 1) * groups && g * 32 < p.y.n[0]; ++g) {
            std::memset(total, 0, sizeof(float) * 32 * most);
            for (uint first = 0; first < k; first += SUPERBLOCK) {
                const uint left = min(k - first, SUPERBLOCK);
                size_t rows[32];
                for (uint i = 0; i < 32; ++i)
                    rows[i] = place(p.w, plane + uvec4(first, min(g * 32 + i, p.w.n[1] - 1), 0u, 0u));
                ZINC_BY_TYPE(unpack_rows, w_type)(bound[MUL_MAT_FLOAT_BIND_W], rows, p.w.s[0], left, w);
                for (uint n = 0; n < columns; ++n) {
                    const uvec4 index = column_of_x(gl_WorkGroupID.y * most + n) + uvec4(first, 0u, 0u, 0u);
                    ZINC_BY_TYPE(unpack_row, x_type)(bound[MUL_MAT_FLOAT_BIND_X], place(p.x, index), p.x.s[0], left, x);
                    add_superblock(left, w, x, total + 32 * n);
                }
            }
            for (uint n = 0; n < columns; ++n)
                store_rows(g * 32, n, total + 32 * n);
        }
    }

    // Sums of eight products are added to the superblock's sum, which is added to the total.
    static void add_superblock(uint count, const float *w, const float *x, float *total) {
        F sums[WIDE] = {};
        for (uint k = 0; k < count; k += FLOAT_CHUNK) {
            F chain[WIDE] = {};
            for (uint i = k; i < k + FLOAT_CHUNK; ++i)
                ZINC_UNROLL for (uint v = 0; v < WIDE; ++v)
                    chain[v] = chain[v] + load<F>(w + 32 * i + v * LANES) * all(x[i]);
            ZINC_UNROLL for (uint v = 0; v < WIDE; ++v) sums[v] = sums[v] + chain[v];
        }
        ZINC_UNROLL for (uint v = 0; v < WIDE; ++v)
            zinc::store(total + v * LANES, load<F>(total + v * LANES) + sums[v]);
    }
};

template <bool TILED> void multiply_floats(const Step &step, uint64_t number, Room &room) {
    Floats(step, room, number, TILED).run();
}
}  // namespace

const NamedKernel PRODUCTS[] = {{"graph_mul_mat", &multiply_quantized<true>},
                                {"graph_mul_mat_vec", &multiply_quantized<false>},
                                {"graph_mul_mat_float", &multiply_floats<true>},
                                {"graph_mul_mat_float_vec", &multiply_floats<false>},
                                {nullptr, nullptr}};
}  // namespace zinc
