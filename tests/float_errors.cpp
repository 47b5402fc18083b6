// scripts/float_errors: the shaders' float functions beside double's libm. Their text is compiled as it is, with
// the processor's GLSL in C++; with -ffp-contract=off -fsingle-precision-constant it rounds as `precise` says.
#include "../native/cpu/glsl.h"

#include <cmath>
#include <cstdio>
#include <cstdlib>
#undef INFINITY
#undef NAN
#define precise
#define xyz xyz()
#define yzw yzw()

namespace zinc {
#include "../shaders/graph/contract.glsl"
#include "../shaders/graph/numbers.glsl"
#include "../shaders/graph/turns.glsl"
#include "../shaders/graph/activations.glsl"
}  // namespace zinc
using namespace zinc;

static const float TOP = uintBitsToFloat(INFINITE - 1u);
#define OURS(call) [](float x) -> float { return call; }
#define EXACT(call) [](double x) -> double { return call; }
static const struct Function {
    const char *name;
    float least, most;  // arguments
    float (*ours)(float);
    double (*exact)(double);
} FUNCTIONS[] = {
    {"rcp", 0, TOP, reciprocal, EXACT(1 / x)},
    {"2^x", -48.5, 0.5, OURS(weight(x, 0)), EXACT(std::exp2(x))},
    {"exp", -TOP, TOP, exponential, EXACT(std::exp(x))},
    {"exp(x) - 1", -TOP, TOP, exponential_minus_1, EXACT(std::expm1(x))},
    {"log", 0, TOP, logarithm, EXACT(std::log(x))},
    {"softplus", -1, TOP, zinc::softplus, EXACT(x > 700 ? x : std::log1p(std::exp(x)))},
    {"1 / sqrt", 0, TOP, inverse_root, EXACT(1 / std::sqrt(x))},
    {"square root", 0, TOP, root, EXACT(std::sqrt(x))},
    {"tanh", -TOP, TOP, tanh_of, EXACT(std::tanh(x))},
    {"erf", -TOP, TOP, error_function, EXACT(std::erf(x))},
    {"sin", -TOP, TOP, OURS(cos_sin(x).y), EXACT(std::sin(x))},
    {"cos", -TOP, TOP, OURS(cos_sin(x).x), EXACT(std::cos(x))},
    {"SIGMOID", -TOP, TOP, sigmoid, EXACT(1 / (1 + std::exp(-x)))},
};

struct Worst {
    double error = 0;
    uint bits = 0;         // of the argument, the least that has the error
    uint64_t results = 0;  // the sum of all results' bits, each times an odd number of its argument's
    void measure(const Function &f, uint bits_of_x) {
        const float x = uintBitsToFloat(bits_of_x);
        if (!(x >= f.least && x <= f.most) || zinc::flush(x) != x) return;
        const double exact = f.exact(x);
        const uint exponent = floatBitsToUint(float(exact)) >> 23 & 255;
        if (exponent < 27 || exponent == 255) return;  // flushed, infinite
        const double inverse_unit = __builtin_bit_cast(double, uint64_t(1023 + 127 + 23 - exponent) << 52);
        const float result = f.ours(x);
        add({std::fabs(result - exact) * inverse_unit, bits_of_x, floatBitsToUint(result) * (2ull * bits_of_x + 1)});
    }
    void add(Worst other) {
        const bool is_worse = other.error > error || (other.error == error && other.bits < bits);
        *this = {is_worse ? other.error : error, is_worse ? other.bits : bits, results + other.results};
    }
};

int main(int, char **arguments) {
    const uint64_t step = arguments[1] ? std::strtoull(arguments[1], nullptr, 10) : 1;
    for (const Function &f : FUNCTIONS) {
        Worst worst;
#pragma omp declare reduction(largest : Worst : omp_out.add(omp_in))
#pragma omp parallel for schedule(dynamic, 65536) reduction(largest : worst)
        for (uint64_t bits = 0; bits < 1ull << 32; bits += step) worst.measure(f, uint(bits));
        std::printf("%-12s %.4f at %-18a %016llx\n", f.name, worst.error, double(uintBitsToFloat(worst.bits)),
                    static_cast<unsigned long long>(worst.results));
        std::fflush(stdout);
    }
}
