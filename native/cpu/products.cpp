// Products y = w x of shaders/graph, of quantized weights and of floats: a lane has a row of w, and a workgroup all
// that the kernel's workgroup has. What quantized weights are, and how sums join, is the GLSL's text.
#include "contract.h"

namespace zinc {
namespace {
constexpr uint WIDE = 32 / LANES;  // vectors of a group of 32 rows

// The columns of a workgroup. Kernels of few and of many rows of x have the same buffers, and constants at these
// places.
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

    // Those that y has; of experts a list's tile ends where it has no more pairs.
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

// FEW: of one row of x, dot products are made of pieces as they lie, four neighbors of a row, and these are added then.
template <uint TYPE, bool FEW> struct Quantized : Columns<MulMatParams> {
    using Columns<MulMatParams>::Columns;
    const uint8_t *const weights = static_cast<const uint8_t *>(bound[MUL_MAT_BIND_W]);
    const uint8_t *const q = static_cast<const uint8_t *>(bound[MUL_MAT_BIND_Q]);
    const uvec2 *const scales = static_cast<const uvec2 *>(bound[MUL_MAT_BIND_SCALES]);
    uint superblock, width, lane, row_blocks;  // lane: the first of a vector's rows, of `width` in the group
    const uint8_t *group;

    // Numbers of `size` bytes, one of each row: number i of those of the size, of which a block has `count`. They begin
    // `begin` bytes a block from the group's begin.
    ZINC_INLINE const uint8_t *piece(uint begin, uint count, uint i, uint size) const {
        const uint block = min(superblock * (SUPERBLOCK / WEIGHT_VALUES(TYPE)) + i / count, row_blocks - 1);
        return group + size_t(begin) * row_blocks * width + (size_t(i % count) * row_blocks + block) * width * size;
    }
    template <typename T> ZINC_INLINE U words(const uint8_t *from, uint step) const {
        if (step == sizeof(T) && lane + LANES <= width)
            return __builtin_convertvector((load<Vector<T, LANES>>(from + lane * step)), U);
        U made;
        for (uint i = 0; i < LANES; ++i)
            made[i] = load<T>(from + size_t(min(lane + i, width - 1)) * step);
        return made;
    }
    ZINC_INLINE lanes_uvec4 piece16(uint i) const {
        const uint8_t *from = piece(0, WEIGHT_PIECES_16(TYPE), i, 16);
        lanes_uvec4 made;
        if (lane + LANES > width) {
            for (uint k = 0; k < 4; ++k)
                made[k] = words<uint>(from + 4 * k, 16);
            return made;
        }
        ZINC_UNROLL for (uint k = 0; k < 4; ++k) made[k] = load<U>(from + 16 * lane + sizeof(U) * k);
        return apart(made);
    }
    // Rows' words 0 to 3, which come one row behind the other, go apart in two rounds; and the reverse.
    static ZINC_INLINE lanes_uvec4 apart(const lanes_uvec4 &v) {
        const U even[2] = {evens(v.x, v.y), evens(v.z, v.w)}, odd[2] = {odds(v.x, v.y), odds(v.z, v.w)};
        return {evens(even[0], even[1]), evens(odd[0], odd[1]), odds(even[0], even[1]), odds(odd[0], odd[1])};
    }
    // A piece of values: of FEW as it lies.
    ZINC_INLINE lanes_uvec4 values16(uint i) const {
        if (!FEW)
            return piece16(i);
        const uint8_t *from = piece(0, WEIGHT_PIECES_16(TYPE), i, 16);
        lanes_uvec4 made;
        ZINC_UNROLL for (uint k = 0; k < 4; ++k) {
            const uint first = lane + k * (LANES / 4);
            if (first + LANES / 4 <= width)
                made[k] = load<U>(from + 16 * first);
            else
                for (uint j = 0; j < LANES; ++j)
                    made[k][j] = load<uint>(from + 16 * min(first + j / 4, width - 1) + j % 4 * 4);
        }
        return made;
    }
    // Bits 4 of the bytes of words 0 to 3 of each row, from 16 bits each.
    ZINC_INLINE lanes_uvec4 fifths(U bits) {
        if (!FEW)
            return spread_16(bits);
        lanes_uvec4 made;
        ZINC_UNROLL for (uint k = 0; k < 4; ++k) {
            const U own = __builtin_shuffle(bits, iota() / 4 + k * (LANES / 4));
            made[k] = spread(own >> (iota() % 4 * 4));
        }
        return made;
    }
    ZINC_INLINE U piece4(uint i) const {
        return words<uint>(piece(16 * WEIGHT_PIECES_16(TYPE), WEIGHT_PIECES_4(TYPE), i, 4), 4);
    }
    ZINC_INLINE U small_piece(uint i) const {
        const uint begin = 16 * WEIGHT_PIECES_16(TYPE) + 4 * WEIGHT_PIECES_4(TYPE);
        if (TYPE == WEIGHT_TYPE_MXFP4)
            return words<uint8_t>(piece(begin, 1, i, 1), 1);
        return words<uint16_t>(piece(begin, 1, i, 2), 2);
    }
    // The first 16 values of a block, and the others.
    ZINC_INLINE void decode(uint j, lanes_uvec4 &low, lanes_uvec4 &high) {
        if constexpr (HAS_TABLE) {
            const lanes_uvec4 w = values16(j);
            const uvec4 table = TABLE ^ (BIASED ? 0x80808080u : 0u);
            ZINC_UNROLL for (uint k = 0; k < 4; ++k) {
                low[k] = entries(&table.x, w[k] & NIBBLES);
                high[k] = entries(&table.x, w[k] >> 4 & NIBBLES);
            }
        } else {
            decode_pairs(j, low, high);
            if (BIASED)
                low ^= 0x80808080u, high ^= 0x80808080u;
        }
    }
    static ZINC_INLINE F flush(F x) { return zinc::flush(x); }
    static constexpr bool SCALED = false, HALVES = WEIGHT_HALVES(TYPE);
#include "quantized.h"
    static constexpr bool SIGNED = HAS_TABLE || TYPE == WEIGHT_TYPE_Q8_0;

    static constexpr bool BIASED = SIGNED && DOTS_OF_UNSIGNED;  // 128 is added to signed bytes
    static constexpr int LESS = BIASED ? 128 : OFFSET;

    // The sum, and the products of 16 bytes of each row.
    static ZINC_INLINE I dot16(const lanes_uvec4 &a, const uint8_t *x, I sum) {
        if (!FEW) {
            ZINC_UNROLL for (uint k = 0; k < 4; ++k)
                sum = dot4<SIGNED && !BIASED>(a[k], load<uint>(x + 4 * k) - (U){}, sum);
            return sum;
        }
        const U all_of_x = four_times(x);
        lanes_uvec4 parts;
        ZINC_UNROLL for (uint k = 0; k < 4; ++k) parts[k] = (U)dot4<SIGNED && !BIASED>(a[k], all_of_x, (I){});
        return sum + (I)four_sums(parts.x, parts.y, parts.z, parts.w);
    }
    static ZINC_INLINE I dot32(const lanes_uvec4 &a, const lanes_uvec4 &b, const uint8_t *x, I sum) {
        if (!FEW)
            return dot16(b, x + 16, dot16(a, x, sum));
        const U first = four_times(x), second = four_times(x + 16);
        lanes_uvec4 parts;
        ZINC_UNROLL for (uint k = 0; k < 4; ++k) {
            constexpr bool S = SIGNED && !BIASED;
            parts[k] = (U)dot4<S>(b[k], second, dot4<S>(a[k], first, (I){}));
        }
        return sum + (I)four_sums(parts.x, parts.y, parts.z, parts.w);
    }
    // Block j of the superblock joins the sums (columns, 32) of a vector of rows.
    ZINC_INLINE void add_block(uint j, uint columns, const uint *numbers, float *sums, float *lows) {
        lanes_uvec4 low, high;
        decode(j, low, high);
        const lanes_vec4 of_w = block_scales(j);
        const size_t at = size_t(superblock * 8 + j) * rows_of_x();
        for (uint n = 0; n < columns; ++n) {
            const uint8_t *words = q + (at + numbers[n]) * 32;
            const uvec2 scale = scales[at + numbers[n]];
            const ivec2 x = sums_of_x(scale);
            const I none = {};
            const I first = HAS_HALVES ? dot16(low, words, none - LESS * x.x) : none;
            const I second = HAS_HALVES ? dot16(high, words + 16, none - LESS * x.y)
                                        : dot32(low, high, words, none - LESS * (x.x + x.y));
            const F of_first = to_float(first), of_second = to_float(second);
            const lanes_vec2 dots = HAS_HALVES ? lanes_vec2(of_first, of_second) : lanes_vec2(of_second, 0.0f);
            F sum = load<F>(sums + 32 * n), lowest = load<F>(lows + 32 * n);
            add_products(of_w, scales_of_x(scale), dots, IS_MXFP4, sum, lowest);
            zinc::store(sums + 32 * n, sum);
            if (HAS_MINIMUM && IS_256)
                zinc::store(lows + 32 * n, lowest);
        }
    }

    // All blocks of the superblock, of one column: its sums stay in registers.
    ZINC_INLINE void add_superblock(const uint *numbers, float *sums, float *lows) {
        alignas(64) float sum[LANES] = {}, low[LANES] = {};
        if (IS_256) {
            ZINC_UNROLL for (uint j = 0; j < 8; ++j) add_block(j, 1, numbers, sum, low);
        } else {
            for (uint j = 0; j < min(8u, p.blocks - superblock * 8); ++j)
                add_block(j, 1, numbers, sum, low);
        }
        std::memcpy(sums, sum, sizeof sum);
        std::memcpy(lows, low, sizeof low);
    }

    void run() {
        if (!find_matrix())
            return;
        const uint columns = count(), units = WEIGHT_GROUP / 16 * WEIGHT_SIZE(TYPE);
        row_blocks = p.blocks * X_BLOCK / WEIGHT_VALUES(TYPE);
        uint numbers[256];
        for (uint n = 0; n < columns; ++n)
            numbers[n] = number_in_x(gl_WorkGroupID.y * most + n);
        float *total = reinterpret_cast<float *>(room.scratch), *sums = total + 32 * most, *lows = sums + 32 * most;
        for (uint g = gl_WorkGroupID.x * groups; g < (gl_WorkGroupID.x + 1) * groups && g * 32 < p.y.n[0]; ++g) {
            width = min(WEIGHT_GROUP, p.y.n[0] - g * WEIGHT_GROUP);
            group = weights + (size_t(matrix_begin()) + size_t(g) * units * row_blocks) * 16;
            std::memset(total, 0, 3 * sizeof(float) * 32 * most);
            for (superblock = 0; superblock * 8 < p.blocks; ++superblock)
                for (lane = 0; lane < width; lane += LANES) {
                    if constexpr (FEW)
                        add_superblock(numbers, sums + lane, lows + lane);
                    else
                        for (uint j = 0; j < min(8u, p.blocks - superblock * 8); ++j)
                            add_block(j, columns, numbers, sums + lane, lows + lane);
                    const lanes_vec2 scale = IS_256 ? superblock_scale() : lanes_vec2(0.0f, 0.0f);
                    for (uint i = lane; i < columns * 32; i += 32) {
                        const F sum = superblock_sum(scale, load<F>(sums + i), load<F>(lows + i));
                        zinc::store(total + i, load<F>(total + i) + sum);
                        zinc::store(sums + i, (F){}), zinc::store(lows + i, (F){});
                    }
                }
            for (uint n = 0; n < columns; ++n)
                store_rows(g * 32, n, total + 32 * n);
        }
    }
};

template <uint TYPE, bool TILED> void multiply_type(const Step &step, uint64_t number, Room &room) {
    Columns<MulMatParams> columns(step, room, number, TILED);
    if (!TILED && columns.most == 1)
        Quantized<TYPE, true>(step, room, number, TILED).run();
    else
        Quantized<TYPE, false>(step, room, number, TILED).run();
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

    // Eight elements `apart` of a tensor, of which `count` are there: others are 0, and so are small ones.
    template <uint TYPE> static ZINC_INLINE F8 eight(const void *from, size_t first, size_t apart, uint count) {
        using Word = std::conditional_t<TYPE == FLOAT_TYPE_F32, uint, uint16_t>;
        const Word *words = static_cast<const Word *>(from) + first;
        Word some[8] = {};
        if (apart != 1 || count < 8) {
            for (uint i = 0; i < min(count, 8u); ++i)
                some[i] = words[i * apart];
            words = some;
        }
        F8 made;
        if constexpr (TYPE == FLOAT_TYPE_F32)
            made = load<F8>(words);
        else if constexpr (TYPE == FLOAT_TYPE_F16)
            made = from_halves(words);
        else
            made = (F8)(__builtin_convertvector(load<Halves>(words), U8) << 16);
        return ((F8)((U8)made & MAGNITUDE) < PRODUCT_MIN) ? (F8){} : made;
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

    void run() {
        if (!find_matrix())
            return;
        const uint columns = count(), k = p.w.n[0];
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
                    const uvec4 at = column_of_x(gl_WorkGroupID.y * most + n) + uvec4(first, 0u, 0u, 0u);
                    ZINC_BY_TYPE(unpack_row, x_type)(bound[MUL_MAT_FLOAT_BIND_X], place(p.x, at), p.x.s[0], left, x);
                    add_superblock(left, w, x, total + 32 * n);
                }
            }
            for (uint n = 0; n < columns; ++n)
                store_rows(g * 32, n, total + 32 * n);
        }
    }

    // Chains of eight products join the superblock's sum, and that the total.
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
