// Vectors of float32 lanes, as wide as those of the processor for which the library is compiled.
#pragma once
#include <cstdint>
#include <cstring>
#include <type_traits>
#if defined(__AVX__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif
#pragma GCC diagnostic ignored "-Wpsabi"  // vectors are passed between inlined functions alone
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // in GCC 12's own immintrin.h
#pragma GCC diagnostic ignored "-Wuninitialized"

namespace zinc {
#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif
#define ZINC_INLINE inline __attribute__((always_inline))
#define ZINC_UNROLL _Pragma("GCC unroll 16")
template <typename T, int N> using Vector __attribute__((vector_size(sizeof(T) * N))) = T;
typedef float F __attribute__((vector_size(4 * LANES)));
typedef uint32_t U __attribute__((vector_size(4 * LANES)));
typedef int32_t I __attribute__((vector_size(4 * LANES)));
typedef I M;  // a mask: 0 or -1 in each lane
typedef float F8 __attribute__((vector_size(32)));
typedef uint32_t U8 __attribute__((vector_size(32)));
typedef int32_t I8 __attribute__((vector_size(32)));
typedef uint16_t Halves __attribute__((vector_size(16)));

template <typename V> static ZINC_INLINE V load(const void *from) {
    V result;
    std::memcpy(&result, from, sizeof result);
    return result;
}
template <typename V> static ZINC_INLINE void store(void *to, const V &v) { std::memcpy(to, &v, sizeof v); }
static ZINC_INLINE F all(float x) { return x - (F){}; }
// A number as type T; a vector gets it in all lanes.
template <typename T, typename A> static ZINC_INLINE constexpr T convert(const A &x) {
    if constexpr (std::is_arithmetic_v<T> || std::is_same_v<T, A>)
        return T(x);
    else
        return x - T{};
}
static ZINC_INLINE F to_float(I x) { return __builtin_convertvector(x, F); }
static ZINC_INLINE F to_float(U x) { return __builtin_convertvector((I)x, F); }  // below 2**31
static ZINC_INLINE I to_int(F x) { return __builtin_convertvector(x, I); }
static ZINC_INLINE I to_int(U x) { return (I)x; }
static ZINC_INLINE int to_int(uint32_t x) { return int(x); }
static ZINC_INLINE U bitfieldExtract(U x, int first, int count) { return x >> first & ((1u << count) - 1u); }
static ZINC_INLINE I bitfieldExtract(I x, int first, int count) { return x << (32 - first - count) >> (32 - count); }
static ZINC_INLINE U to_uint(I x) { return (U)x; }
static ZINC_INLINE U to_uint(F x) { return (U)to_int(x); }  // below 2**31
static ZINC_INLINE U floatBitsToUint(F x) { return (U)x; }
static ZINC_INLINE F uintBitsToFloat(U x) { return (F)x; }
static ZINC_INLINE F abs(F x) { return (F)((U)x & 0x7FFFFFFFu); }
static ZINC_INLINE F max(F a, F b) { return a < b ? b : a; }
static ZINC_INLINE F min(F a, float b) { return b < a ? all(b) : a; }
static ZINC_INLINE F clamp(F x, float a, float b) { return min(max(x, all(a)), b); }
static ZINC_INLINE F max(F a, float b) { return max(a, all(b)); }
static ZINC_INLINE U max(U a, uint32_t b) { return a < b ? b - (U){} : a; }
// Functions of shaders/, for arguments that all lanes share.
static ZINC_INLINE F weight(F s, F m);
static ZINC_INLINE F weight(F s, float m) { return weight(s, all(m)); }
static ZINC_INLINE F ln(F number, F power);
static ZINC_INLINE F ln(F number, float power) { return ln(number, all(power)); }
// quotient of numbers.glsl by the processor's division, which rounds alike. Denormal quotients are 0; there is one NaN.
static ZINC_INLINE F quotient(F x, F y) {
    const F result = x / y, size = abs(result);
    const U zero = (U)result & 0x80000000u;
    return size < 0x1p-126f ? (F)zero : result == result ? result : (F)(0x7FC00000u - (U){});
}
static ZINC_INLINE F quotient(float x, F y) { return quotient(all(x), y); }
static ZINC_INLINE F quotient(F x, float y) { return quotient(x, all(y)); }
static ZINC_INLINE U iota() {  // 0, 1, ...
    U result;
    ZINC_UNROLL for (int i = 0; i < LANES; ++i) result[i] = uint32_t(i);
    return result;
}
// To the nearest whole number, ties to even: beyond 2**23 every number is whole.
static ZINC_INLINE F roundEven(F x) {
#if defined(__AVX512F__)
    return _mm512_roundscale_ps(x, 8);
#elif defined(__AVX__)
    return _mm256_round_ps(x, 8);
#else
    const F size = abs(x), whole = (size + 8388608.0f) - 8388608.0f;
    return size < 8388608.0f ? (F)((U)whole | ((U)x & 0x80000000u)) : x;
#endif
}
static ZINC_INLINE F trunc(F x) {
    const F whole = (F)((U)to_float(to_int(x)) | ((U)x & 0x80000000u));
    return abs(x) < 8388608.0f ? whole : x;
}
static ZINC_INLINE F floor(F x) {
    const F whole = trunc(x);
    return whole > x ? whole - 1.0f : whole;
}
static ZINC_INLINE F ceil(F x) { return -floor(-x); }
// a * b + c, rounded once; see fma of glsl.h.
static ZINC_INLINE F fma(F a, F b, F c) {
#if defined(__AVX512F__)
    return _mm512_fmadd_ps(a, b, c);
#elif defined(__AVX__) && defined(__FMA__)
    return _mm256_fmadd_ps(a, b, c);
#elif defined(__aarch64__)
    return (F)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    typedef double D __attribute__((vector_size(8 * LANES)));
    typedef int64_t W __attribute__((vector_size(8 * LANES)));
    const D product = __builtin_convertvector(a, D) * __builtin_convertvector(b, D);
    const D addend = __builtin_convertvector(c, D);
    const D sum = product + addend, part = sum - product, lost = (product - (sum - part)) + (addend - part);
    const W bits = (W)sum, inexact = (lost != 0.0) & ((bits & 1) == 0), up = (lost > 0.0) == (sum > 0.0);
    return __builtin_convertvector((D)(bits + (inexact & (up ? 1 - (W){} : (W){} - 1))), F);
#endif
}

// Every second lane of two vectors, from lane 0 or 1 on.
#if defined(__AVX512F__)
#define ZINC_SECOND(a, b, i) \
    __builtin_shufflevector(a, b, i, 2 + i, 4 + i, 6 + i, 8 + i, 10 + i, 12 + i, 14 + i, 16 + i, 18 + i, 20 + i, \
                            22 + i, 24 + i, 26 + i, 28 + i, 30 + i)
#elif defined(__AVX__)
#define ZINC_SECOND(a, b, i) __builtin_shufflevector(a, b, i, 2 + i, 4 + i, 6 + i, 8 + i, 10 + i, 12 + i, 14 + i)
#else
#define ZINC_SECOND(a, b, i) __builtin_shufflevector(a, b, i, 2 + i, 4 + i, 6 + i)
#endif
static ZINC_INLINE U evens(U a, U b) { return ZINC_SECOND(a, b, 0); }
static ZINC_INLINE U odds(U a, U b) { return ZINC_SECOND(a, b, 1); }

// float16 numbers, whose bits are in words, as float32. The product is exact, also for denormal numbers.
template <typename V, typename W> static ZINC_INLINE V halves_to_floats(W h) {
    const V size = __builtin_bit_cast(V, (h & 0x7FFFu) << 13) * 0x1p112f;
    const W bits = (h & 0x7C00u) == 0x7C00u ? 0x7F800000u | (h & 0x3FFu) << 13 : __builtin_bit_cast(W, size);
    return __builtin_bit_cast(V, bits | (h & 0x8000u) << 16);
}
static ZINC_INLINE F8 from_halves(const void *from) {
#if defined(__F16C__)
    return _mm256_cvtph_ps(load<__m128i>(from));
#else
    return halves_to_floats<F8>(__builtin_convertvector(load<Halves>(from), U8));
#endif
}

static ZINC_INLINE void transpose(F8 r[8]) {  // in three rounds: halves, pairs and single elements change places
    F8 s[8];
    ZINC_UNROLL for (int i = 0; i < 4; ++i) {
        s[i] = __builtin_shufflevector(r[i], r[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
        s[i + 4] = __builtin_shufflevector(r[i], r[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
    }
    F8 t[8];
    ZINC_UNROLL for (int i = 0; i < 8; i += 4) ZINC_UNROLL for (int j = i; j < i + 2; ++j) {
        t[j] = __builtin_shufflevector(s[j], s[j + 2], 0, 1, 8, 9, 4, 5, 12, 13);
        t[j + 2] = __builtin_shufflevector(s[j], s[j + 2], 2, 3, 10, 11, 6, 7, 14, 15);
    }
    ZINC_UNROLL for (int i = 0; i < 8; i += 2) {
        r[i] = __builtin_shufflevector(t[i], t[i + 1], 0, 8, 2, 10, 4, 12, 6, 14);
        r[i + 1] = __builtin_shufflevector(t[i], t[i + 1], 1, 9, 3, 11, 5, 13, 7, 15);
    }
}

// A vector that repeats 16 bytes.
static ZINC_INLINE U four_times(const void *from) {
#if defined(__AVX512F__)
    return (U)_mm512_broadcast_i32x4(load<__m128i>(from));
#elif defined(__AVX2__)
    return (U)_mm256_broadcastsi128_si256(load<__m128i>(from));
#else
    U result;
    for (int i = 0; i < LANES; i += 4)
        std::memcpy(reinterpret_cast<char *>(&result) + 4 * i, from, 16);
    return result;
#endif
}

// Combines all lanes by f: the vector's halves, then the halves of the result, and so on.
template <typename T, int N, typename J> static ZINC_INLINE T folded(Vector<T, N> v, J f) {
    if constexpr (N == 1) {
        return v[0];
    } else {
        Vector<T, N / 2> low, high;
        std::memcpy(&low, &v, sizeof low);
        std::memcpy(&high, reinterpret_cast<const char *>(&v) + sizeof low, sizeof low);
        return folded<T, N / 2>(f(low, high), f);
    }
}
// Lane r, with n = LANES / 4: the sum of lanes 4 (r % n) ... 4 (r % n) + 3 of v[r / n].
static ZINC_INLINE I four_sums(const I v[4]) {
#if defined(__AVX2__) && !defined(__AVX512F__)
    const __m256i a = (__m256i)v[0], b = (__m256i)v[1], c = (__m256i)v[2], d = (__m256i)v[3];
    const __m256i ab = _mm256_add_epi32(_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b));
    const __m256i cd = _mm256_add_epi32(_mm256_unpacklo_epi32(c, d), _mm256_unpackhi_epi32(c, d));
    const __m256i sums = _mm256_add_epi32(_mm256_unpacklo_epi64(ab, cd), _mm256_unpackhi_epi64(ab, cd));
    return __builtin_shuffle((I)sums, (I){0, 4, 1, 5, 2, 6, 3, 7});
#else
    const U a = (U)v[0], b = (U)v[1], c = (U)v[2], d = (U)v[3];
    const U first = evens(a, b) + odds(a, b), second = evens(c, d) + odds(c, d);
    return (I)(evens(first, second) + odds(first, second));
#endif
}

// Each lane of `sum` plus the dot product of its four bytes of w and of x. x has int8. w has int8 if SIGNED, else
// unsigned bytes, which are below 64 without DOTS_OF_UNSIGNED.
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
constexpr bool DOTS_OF_UNSIGNED = true;
#else
constexpr bool DOTS_OF_UNSIGNED = false;
#endif
template <bool SIGNED> static ZINC_INLINE I dot4(U w, U x, I sum) {
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
    static_assert(!SIGNED);
    return (I)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)w, (__m512i)x);
#elif defined(__AVX2__) && !defined(__AVX512F__)
    const __m256i by = (__m256i)x, bytes = (__m256i)w;
    const __m256i pairs = SIGNED ? _mm256_maddubs_epi16(_mm256_abs_epi8(bytes), _mm256_sign_epi8(by, bytes))
                                 : _mm256_maddubs_epi16(bytes, by);
    return sum + (I)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#elif defined(__ARM_FEATURE_DOTPROD)
    return (I)vdotq_s32((int32x4_t)sum, (int8x16_t)w, (int8x16_t)x);
#else
    ZINC_UNROLL for (int i = 0; i < 32; i += 8) sum += ((I)w << (24 - i) >> 24) * ((I)x << (24 - i) >> 24);
    return sum;
#endif
}
// The same with two dot products: of a and x, and of b and y.
template <bool SIGNED> static ZINC_INLINE I dot8(U a, U x, U b, U y, I sum) {
#if defined(__AVX2__) && !defined(__AVX512F__)
    if (!SIGNED) {
        const __m256i first = _mm256_maddubs_epi16((__m256i)a, (__m256i)x);
        const __m256i second = _mm256_maddubs_epi16((__m256i)b, (__m256i)y);
        return sum + (I)_mm256_madd_epi16(_mm256_add_epi16(first, second), _mm256_set1_epi16(1));
    }
#endif
    return dot4<SIGNED>(b, y, dot4<SIGNED>(a, x, sum));
}

// The entries of a table of 16 bytes that the bytes of `places` select.
static ZINC_INLINE U entries(const uint32_t table[4], U places) {
#if defined(__AVX512BW__)
    return (U)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(load<__m128i>(table)), (__m512i)places);
#elif defined(__AVX2__) && !defined(__AVX512F__)
    return (U)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(load<__m128i>(table)), (__m256i)places);
#elif defined(__aarch64__)
    return (U)vqtbl1q_u8(load<uint8x16_t>(table), (uint8x16_t)places);
#else
    U result;
    uint8_t bytes[sizeof result];
    std::memcpy(bytes, &places, sizeof bytes);
    for (uint8_t &byte : bytes)
        byte = reinterpret_cast<const uint8_t *>(table)[byte];
    return load<U>(bytes);
#endif
}
}  // namespace zinc
