// GLSL in C++, as far as shaders/ uses it: vectors, functions, and the invocations of a workgroup.
//
// zinc_attn/kernels/cpp.py makes a struct of each kernel. Its members are the kernel's buffers, constants, variables
// and functions, and an object of it is an invocation.
#pragma once
#include "lanes.h"
#include "runtime.h"
#include <cstring>
#include <new>

namespace zinc {
typedef uint32_t uint;

template <typename T, int N> struct Components;
template <typename T> struct Components<T, 2> { T x, y; };
template <typename T> struct Components<T, 3> { T x, y, z; };
template <typename T> struct Components<T, 4> { T x, y, z, w; };

// A vector of GLSL. T may also be a vector of lanes; a component then has a number of each row.
template <typename T, int N> struct vec : Components<T, N> {
    vec() = default;
    template <typename... A> explicit(sizeof...(A) == 1) constexpr vec(const A &...parts) {
        uint n = 0;
        (take(n, parts), ...);
        for (uint i = n; n == 1 && i < N; ++i)
            (*this)[i] = (*this)[0];
    }
    T &operator[](uint i) { return (&this->x)[i]; }
    const T &operator[](uint i) const { return (&this->x)[i]; }
    vec<T, 2> xy() const { return {this->x, this->y}; }
    vec<T, 2> yz() const { return {this->y, this->z}; }
    vec<T, 2> zw() const { return {this->z, this->w}; }
    vec<T, 3> xyz() const { return {this->x, this->y, this->z}; }
    vec<T, 3> yzw() const { return {this->y, this->z, this->w}; }

  private:
    template <typename A> void take(uint &n, const A &part) { (*this)[n++] = convert<T>(part); }
    template <typename A, int M> void take(uint &n, const vec<A, M> &part) {
        for (uint i = 0; i < M && n < N; ++i)
            take(n, part[i]);
    }
};
using vec2 = vec<float, 2>;
using vec3 = vec<float, 3>;
using vec4 = vec<float, 4>;
using uvec2 = vec<uint, 2>;
using uvec3 = vec<uint, 3>;
using uvec4 = vec<uint, 4>;
using ivec2 = vec<int, 2>;
using ivec4 = vec<int, 4>;
template <typename T> constexpr bool is_vec = false;
template <typename T, int N> constexpr bool is_vec<vec<T, N>> = true;

// Applies f to each component.
template <typename T, int N, typename F> auto each(const vec<T, N> &v, F f) {
    vec<decltype(f(v[0])), N> result;
    for (uint i = 0; i < N; ++i)
        result[i] = f(v[i]);
    return result;
}
template <typename T, typename U, int N, typename F> auto each(const vec<T, N> &a, const vec<U, N> &b, F f) {
    vec<decltype(f(a[0], b[0])), N> result;
    for (uint i = 0; i < N; ++i)
        result[i] = f(a[i], b[i]);
    return result;
}
#define ZINC_OPERATOR(op)                                                                                             \
    template <typename T, typename U, int N> vec<T, N> operator op(const vec<T, N> &a, const vec<U, N> &b) {          \
        return each(a, b, [](T x, U y) { return T(x op y); });                                                        \
    }                                                                                                                 \
    template <typename T, typename U, int N> requires(!is_vec<U>) vec<T, N> operator op(const vec<T, N> &a, U b) {    \
        return each(a, [b](T x) { return T(x op b); });                                                               \
    }                                                                                                                 \
    template <typename T, int N> vec<T, N> operator op(std::common_type_t<T> a, const vec<T, N> &b) {                 \
        return each(b, [a](T x) { return T(a op x); });                                                               \
    }                                                                                                                 \
    template <typename T, int N, typename U> vec<T, N> &operator op##=(vec<T, N> &a, const U &b) { return a = a op b; }
ZINC_OPERATOR(+)
ZINC_OPERATOR(-)
ZINC_OPERATOR(*)
ZINC_OPERATOR(/)
ZINC_OPERATOR(%)
ZINC_OPERATOR(&)
ZINC_OPERATOR(|)
ZINC_OPERATOR(^)
ZINC_OPERATOR(<<)
ZINC_OPERATOR(>>)
#undef ZINC_OPERATOR
template <typename T, int N> vec<T, N> operator-(const vec<T, N> &a) { return each(a, [](T x) { return T(-x); }); }
template <typename T, int N> vec<T, N> operator~(const vec<T, N> &a) { return each(a, [](T x) { return T(~x); }); }
template <typename T, int N> bool operator==(const vec<T, N> &a, const vec<T, N> &b) {
    return all(each(a, b, [](T x, T y) { return x == y; }));
}

inline uint floatBitsToUint(float x) { return __builtin_bit_cast(uint, x); }
inline int floatBitsToInt(float x) { return __builtin_bit_cast(int, x); }
inline float uintBitsToFloat(uint x) { return __builtin_bit_cast(float, x); }
inline float intBitsToFloat(int x) { return __builtin_bit_cast(float, x); }
template <int N> auto floatBitsToUint(const vec<float, N> &v) {
    return each(v, [](float x) { return floatBitsToUint(x); });
}
template <int N> auto uintBitsToFloat(const vec<uint, N> &v) {
    return each(v, [](uint x) { return uintBitsToFloat(x); });
}
inline float abs(float x) { return __builtin_fabsf(x); }
inline int abs(int x) { return x < 0 ? -x : x; }
// To the nearest whole number, ties to even: beyond 2**23 every number is whole.
inline float roundEven(float x) {
    float size = abs(x), whole = (size + 8388608.0f) - 8388608.0f;
    return size < 8388608.0f ? __builtin_copysignf(whole, x) : x;
}
inline float trunc(float x) { return abs(x) < 8388608.0f ? __builtin_copysignf(float(int(x)), x) : x; }
inline float floor(float x) {
    float whole = trunc(x);
    return whole > x ? whole - 1.0f : whole;
}
inline float ceil(float x) { return -floor(-x); }
template <int N> auto abs(const vec<float, N> &v) { return each(v, [](float x) { return abs(x); }); }
template <int N> auto roundEven(const vec<float, N> &v) { return each(v, [](float x) { return roundEven(x); }); }
template <typename T> T min(T a, std::common_type_t<T> b) { return b < a ? b : a; }
template <typename T> T max(T a, std::common_type_t<T> b) { return a < b ? b : a; }
template <typename T> T clamp(T x, std::common_type_t<T> a, std::common_type_t<T> b) { return min(max(x, a), b); }
template <int N> auto max(const vec<float, N> &a, const vec<float, N> &b) {
    return each(a, b, [](float x, float y) { return max(x, y); });
}
inline ivec4 clamp(ivec4 v, const ivec4 &a, const ivec4 &b) {
    for (uint i = 0; i < 4; ++i)
        v[i] = clamp(v[i], a[i], b[i]);
    return v;
}
template <typename T, int N> auto lessThan(const vec<T, N> &a, const vec<T, N> &b) {
    return each(a, b, [](T x, T y) { return x < y; });
}
template <typename T, int N> auto notEqual(const vec<T, N> &a, const vec<T, N> &b) {
    return each(a, b, [](T x, T y) { return x != y; });
}
template <int N> bool all(const vec<bool, N> &v) {
    bool every = true;
    for (uint i = 0; i < N; ++i)
        every &= v[i];
    return every;
}
template <typename T, int N> vec<T, N> mix(vec<T, N> a, const vec<T, N> &b, const vec<bool, N> &chosen) {
    for (uint i = 0; i < uint(N); ++i)
        a[i] = chosen[i] ? b[i] : a[i];
    return a;
}
inline void set_xy(uvec4 &v, const uvec2 &by) { v.x = by.x, v.y = by.y; }
inline int findMSB(uint x) { return x ? 31 - __builtin_clz(x) : -1; }
inline uint bitfieldExtract(uint x, int first, int count) {
    return count == 32 ? x : x >> first & ((1u << count) - 1u);
}
inline int bitfieldExtract(int x, int first, int count) {
    return count == 0 ? 0 : int(uint(x) << (32 - first - count)) >> (32 - count);
}
inline void umulExtended(uint a, uint b, uint &high, uint &low) {
    uint64_t product = uint64_t(a) * b;
    high = uint(product >> 32), low = uint(product);
}
inline uint uaddCarry(uint a, uint b, uint &carry) {
    uint sum = a + b;
    carry = sum < a;
    return sum;
}
inline vec2 unpackHalf2x16(uint w) { return {halves_to_floats<float>(w & 0xFFFFu), halves_to_floats<float>(w >> 16)}; }
// a * b + c, rounded once: the product is exact in double, and the sum there rounds to odd (Boldo, Melquiond).
inline float fma(float a, float b, float c) {
    double product = double(a) * double(b), addend = double(c), sum = product + addend;
    double part = sum - product, lost = (product - (sum - part)) + (addend - part);
    uint64_t bits = __builtin_bit_cast(uint64_t, sum);
    if (lost != 0.0 && !(bits & 1u) && sum - sum == 0.0)
        bits += (lost > 0.0) == (sum > 0.0) ? 1u : ~uint64_t(0);
    return float(__builtin_bit_cast(double, bits));
}
template <int N> vec<float, N> fma(vec<float, N> a, const vec<float, N> &b, const vec<float, N> &c) {
    for (uint i = 0; i < uint(N); ++i)
        a[i] = fma(a[i], b[i], c[i]);
    return a;
}
inline uint atomicAnd(uint &a, uint b) { return __atomic_fetch_and(&a, b, __ATOMIC_SEQ_CST); }
inline uint atomicOr(uint &a, uint b) { return __atomic_fetch_or(&a, b, __ATOMIC_SEQ_CST); }

// --- invocations -----------------------------------------------------------------------------------------------------

// An invocation's arguments. taken: bytes of the workgroup's shared memory that its arrays have so far.
struct Invocation {
    const uint *spec;
    void *const *bound;
    Room &room;
    uvec3 gl_WorkGroupID, gl_NumWorkGroups, gl_LocalInvocationID, gl_GlobalInvocationID;
    uint gl_LocalInvocationIndex;
    size_t taken = 0;
    Invocation(const Step &step, Room &room, const uvec3 &group, uint lane, uint size)
        : spec(step.spec), bound(step.buffers), room(room), gl_WorkGroupID(group),
          gl_NumWorkGroups(step.groups[0], step.groups[1], step.groups[2]), gl_LocalInvocationID(lane, 0, 0),
          gl_GlobalInvocationID(group.x * size + lane, group.y, group.z), gl_LocalInvocationIndex(lane) {}
    template <typename T> T *shared(size_t count) {
        T *result = (T *)(room.shared + taken);
        taken += (count * sizeof(T) + 15) / 16 * 16;
        return result;
    }
    void barrier() { room.fibers.yield(); }
    void memoryBarrierBuffer() {}
};

inline uvec3 group_of(const Step &step, uint64_t number) {
    const uint64_t row = number / step.groups[0];
    return uvec3(number % step.groups[0], row % step.groups[1], row / step.groups[1]);
}

// Runs a workgroup of a step, by its number in the order x, y, z. Where a kernel has barriers, its invocations are
// fibers, which run in turns, each until its next barrier.
template <typename K> void run_group(const Step &step, uint64_t number, Room &room) {
    const uvec3 group = group_of(step, number);
    const uint size = K(step, room, group, 0, 0).gl_WorkGroupSize.x;
    if constexpr (!K::BARRIERS) {
        for (uint lane = 0; lane < size; ++lane)
            K(step, room, group, lane, size).run();
    } else {
        static_assert(sizeof(K) <= Room::LANE_BYTES);
        const auto run = [](void *invocation) { static_cast<K *>(invocation)->run(); };
        for (uint lane = 0; lane < size; ++lane) {
            void *place = room.lanes + lane * Room::LANE_BYTES;
            room.fibers.start(lane, run, new (place) K(step, room, group, lane, size));
        }
        room.fibers.run(size);
    }
}
}  // namespace zinc
