// The kernels of zinc_attn as native code of the host, and the threads that run them.
//
// A kernel is a function of a workgroup: it may run on any thread and in any order with the others of its dispatch.
#pragma once
#include <cstddef>
#include <cstdint>
#if defined(__FAST_MATH__) || __FLT_EVAL_METHOD__ != 0
#error "results are exact: compile without -ffast-math, for a processor whose float operations are float32"
#endif

namespace zinc {
struct Room;
struct Step;
using Kernel = void (*)(const Step &, uint64_t group, Room &);

// A dispatch, as runtime/cpu/library.py lays it out.
struct Step {
    Kernel kernel;
    const uint32_t *spec;    // specialization constants, by their ids
    void *const *buffers;    // by their bindings
    uint32_t groups[3], unused;
    double begin, end;       // seconds of the monotonic clock, when it has run
};

// Cooperative threads of one workgroup, on stacks of their own.
class Fibers {
  public:
    static constexpr uint32_t MOST = 1024;
    static constexpr size_t STACK_BYTES = size_t(1) << 15;
    void start(uint32_t lane, void (*function)(void *), void *argument);
    void run(uint32_t count);  // the started lanes, in turns, until all have returned
    void yield();              // ends the running lane's turn
    char *stacks = nullptr;    // MOST of STACK_BYTES

  private:
    [[noreturn]] static void enter();
    struct Lane {
        void *stack;
        void (*function)(void *);
        void *argument;
        void *fiber;  // the thread sanitizer's
        bool done;
    } lanes[MOST];
    void *scheduler = nullptr, *scheduler_fiber = nullptr;
    uint32_t current = 0;
};

// The memory that a thread has for a workgroup.
struct Room {
    static constexpr size_t SHARED_BYTES = size_t(1) << 17, LANE_BYTES = size_t(1) << 13;
    static constexpr size_t SCRATCH_BYTES = size_t(1) << 26;
    char *shared;   // the workgroup's shared memory
    char *lanes;    // an invocation each, LANE_BYTES apart
    char *scratch;  // SCRATCH_BYTES, at a multiple of 64
    Fibers fibers;
};
struct NamedKernel {
    const char *name;
    Kernel kernel;
};
// Each table ends with a null name. The first table, in this order, that has a name has its kernel.
extern const NamedKernel ATTENTION[], PRODUCTS[], ELEMENTWISE[], ROWS[], ROPE[], MOVES[], RECURRENT[], CONVOLUTIONS[];
extern const NamedKernel GENERATED[];
}  // namespace zinc
