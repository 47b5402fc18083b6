// Vectors of float32 lanes, as wide as the processor that the compiler is told of has them.
#pragma once
#include <cstdint>
#include <cstring>
#if defined(__AVX__)
#include <immintrin.h>
#endif
#pragma GCC diagnostic ignored "-Wpsabi"  // vectors are passed between inlined functions alone
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // in GCC 12's own immintrin.h

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
    V made;
    std::memcpy(&made, from, sizeof made);
    return made;
}
template <typename V> static ZINC_INLINE void store(void *to, const V &v) { std::memcpy(to, &v, sizeof v); }
static ZINC_INLINE F all(float x) { return x - (F){}; }
static ZINC_INLINE F to_float(I x) { return __builtin_convertvector(x, F); }
static ZINC_INLINE F to_float(U x) { return __builtin_convertvector((I)x, F); }  // below 2**31
static ZINC_INLINE I to_int(F x) { return __builtin_convertvector(x, I); }
static ZINC_INLINE I to_int(U x) { return (I)x; }
static ZINC_INLINE U to_uint(I x) { return (U)x; }
static ZINC_INLINE U to_uint(F x) { return (U)__builtin_convertvector(x, I); }
static ZINC_INLINE U floatBitsToUint(F x) { return (U)x; }
static ZINC_INLINE F uintBitsToFloat(U x) { return (F)x; }
static ZINC_INLINE F abs(F x) { return (F)((U)x & 0x7FFFFFFFu); }
static ZINC_INLINE F min(F a, F b) { return b < a ? b : a; }
static ZINC_INLINE F max(F a, F b) { return a < b ? b : a; }
static ZINC_INLINE F min(F a, float b) { return min(a, all(b)); }
static ZINC_INLINE F max(F a, float b) { return max(a, all(b)); }
static ZINC_INLINE U max(U a, uint32_t b) { return a < b ? b - (U){} : a; }
static ZINC_INLINE F clamp(F x, float a, float b) { return min(max(x, a), b); }
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
// a * b + c, rounded once; see fma of glsl.h.
static ZINC_INLINE F fma(F a, F b, F c) {
#if defined(__AVX512F__)
    return _mm512_fmadd_ps(a, b, c);
#elif defined(__AVX__) && defined(__FMA__)
    return _mm256_fmadd_ps(a, b, c);
#else
    typedef double D __attribute__((vector_size(8 * LANES)));
    typedef int64_t W __attribute__((vector_size(8 * LANES)));
    const D product = __builtin_convertvector(a, D) * __builtin_convertvector(b, D), addend = __builtin_convertvector(c, D);
    const D sum = product + addend, part = sum - product, lost = (product - (sum - part)) + (addend - part);
    const W bits = (W)sum, inexact = (lost != 0.0) & ((bits & 1) == 0), up = (lost > 0.0) == (sum > 0.0);
    return __builtin_convertvector((D)(bits + (inexact & (up ? 1 - (W){} : (W){} - 1))), F);
#endif
}
}  // namespace zinc
