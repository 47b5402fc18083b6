// Threads that run the workgroups of dispatches, and the questions to the compiler of this library.
#include "runtime.h"
#include "sources.h"
#include <algorithm>
#include <atomic>
#include <cfenv>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <memory>
#include <mutex>
#include <sys/mman.h>
#include <system_error>
#include <thread>
#include <vector>
#if defined(__SANITIZE_THREAD__)  // which is told of each change of stacks
#include <sanitizer/tsan_interface.h>
#define ZINC_TSAN(code) code
#else
#define ZINC_TSAN(code)
#endif
#if !defined(__x86_64__) || defined(ZINC_CPU_UCONTEXT)
#define ZINC_CPU_UCONTEXT
#include <ucontext.h>
#endif

namespace zinc {
#ifndef ZINC_CPU_UCONTEXT
// Saves the registers that the caller expects again, and takes another stack.
extern "C" void zinc_cpu_switch(void **from, void *to);
asm(".text\n.p2align 4\n.type zinc_cpu_switch,@function\nzinc_cpu_switch:\n"
    " push %rbp\n push %rbx\n push %r12\n push %r13\n push %r14\n push %r15\n mov %rsp,(%rdi)\n mov %rsi,%rsp\n"
    " pop %r15\n pop %r14\n pop %r13\n pop %r12\n pop %rbx\n pop %rbp\n ret\n"
    ".size zinc_cpu_switch,.-zinc_cpu_switch\n");
#else
static void zinc_cpu_switch(void **from, void *to) {
    ucontext_t here;
    *from = &here;
    swapcontext(&here, static_cast<ucontext_t *>(to));
}
#endif

static thread_local Fibers *running;

void Fibers::enter() {
    Fibers &fibers = *running;
    Lane &lane = fibers.lanes[fibers.current];
    lane.function(lane.argument);
    lane.done = true;
    for (;;)
        fibers.yield();
}

void Fibers::start(uint32_t lane, void (*function)(void *), void *argument) {
    char *stack = stacks + lane * STACK_BYTES;
    lanes[lane] = {nullptr, function, argument, nullptr, false};
    ZINC_TSAN(lanes[lane].fiber = __tsan_create_fiber(0);)
#ifndef ZINC_CPU_UCONTEXT
    void **top = reinterpret_cast<void **>(stack + STACK_BYTES) - 1;  // as if a call had pushed its return address
    *top = nullptr;
    *--top = reinterpret_cast<void *>(&enter);
    lanes[lane].stack = top - 6;
#else
    ucontext_t *context = reinterpret_cast<ucontext_t *>(stack);
    getcontext(context);
    context->uc_stack.ss_sp = stack + sizeof *context;
    context->uc_stack.ss_size = STACK_BYTES - sizeof *context;
    makecontext(context, &enter, 0);
    lanes[lane].stack = context;
#endif
}

void Fibers::run(uint32_t count) {
    running = this;
    ZINC_TSAN(scheduler_fiber = __tsan_get_current_fiber();)
    for (uint32_t left = count; left;) {
        left = 0;
        for (current = 0; current < count; ++current)
            if (!lanes[current].done) {
                ZINC_TSAN(__tsan_switch_to_fiber(lanes[current].fiber, 0);)
                zinc_cpu_switch(&scheduler, lanes[current].stack);
                left += !lanes[current].done;
                ZINC_TSAN(if (lanes[current].done) __tsan_destroy_fiber(lanes[current].fiber);)
            }
    }
}

void Fibers::yield() {
    ZINC_TSAN(__tsan_switch_to_fiber(scheduler_fiber, 0);)
    zinc_cpu_switch(&lanes[current].stack, scheduler);
}

// The float mode of a thread while it runs kernels: rounding to nearest, denormal numbers kept.
class FloatMode {
  public:
    FloatMode() {
        std::fegetenv(&before);
        std::fesetenv(FE_DFL_ENV);
    }
    ~FloatMode() { std::fesetenv(&before); }

  private:
    std::fenv_t before;
};

static double seconds() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// How far the workgroups of a step are.
struct Progress {
    std::atomic<uint64_t> begun{0}, ended{0};
};

// Threads that live as long as the process, with room for a workgroup each.
class Pool {
  public:
    explicit Pool(unsigned threads) {
        for (unsigned i = 0; i < threads; ++i)
            rooms.push_back(make_room());
        try {
            for (unsigned i = 1; i < threads; ++i)
                std::thread([this, i] { serve(*rooms[i]); }).detach();
        } catch (const std::system_error &) {  // the process may have no more threads; the others do all work
        }
    }

    void run(Step *steps, size_t number) {
        std::lock_guard<std::mutex> alone(callers);
        std::vector<Progress> progress(number);
        {
            std::lock_guard<std::mutex> held(lock);
            list = {steps, progress.data(), number};
            ++lists;
        }
        uint64_t most = 0;  // workgroups of a step
        for (size_t i = 0; i < number; ++i)
            most = std::max(most, groups_of(steps[i]));
        if (most > 1)  // else other threads have nothing to do
            wake.notify_all();
        work(list, *rooms[0]);
        std::unique_lock<std::mutex> held(lock);
        list = {};
        left.wait(held, [this] { return active == 0; });
    }

  private:
    struct List {
        Step *steps;
        Progress *progress;
        size_t count;
    };

    static uint64_t groups_of(const Step &step) {
        return uint64_t(step.groups[0]) * step.groups[1] * step.groups[2];
    }

    static constexpr size_t ROOM_BYTES = Fibers::MOST * (Fibers::STACK_BYTES + Room::LANE_BYTES) + Room::SHARED_BYTES +
                                         Room::SCRATCH_BYTES;

    static std::unique_ptr<Room> make_room() {
        auto room = std::make_unique<Room>();
        const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
        void *bytes = mmap(nullptr, ROOM_BYTES, PROT_READ | PROT_WRITE, flags, -1, 0);
        if (bytes == MAP_FAILED)
            throw std::bad_alloc();
        room->fibers.stacks = static_cast<char *>(bytes);
        room->lanes = room->fibers.stacks + Fibers::MOST * Fibers::STACK_BYTES;
        room->shared = room->lanes + Fibers::MOST * Room::LANE_BYTES;
        room->scratch = room->shared + Room::SHARED_BYTES;
        return room;
    }

    [[noreturn]] void serve(Room &room) {
        uint64_t seen = 0;  // lists
        std::unique_lock<std::mutex> held(lock);
        for (;;) {
            wake.wait(held, [&] { return list.steps != nullptr && lists != seen; });
            seen = lists;
            ++active;
            const List taken = list;
            held.unlock();
            work(taken, room);
            held.lock();
            if (--active == 0)
                left.notify_all();
        }
    }

    // Takes workgroups of each step until there are no more. A step begins when the one before it has ended.
    void work(const List &taken, Room &room) {
        const FloatMode mode;
        for (size_t i = 0; i < taken.count; ++i) {
            Step &step = taken.steps[i];
            Progress &progress = taken.progress[i];
            const uint64_t groups = groups_of(step);
            const uint64_t share = groups / (16 * rooms.size()) + 1;  // of small workgroups, several at a time
            for (uint64_t first; (first = progress.begun.fetch_add(share)) < groups;) {
                if (first == 0)
                    step.begin = seconds();
                const uint64_t end = first + share < groups ? first + share : groups;
                for (uint64_t group = first; group < end; ++group)
                    step.kernel(step, group, room);
                if (progress.ended.fetch_add(end - first) + end - first == groups)
                    step.end = seconds();
            }
            for (unsigned turns = 0; progress.ended.load() < groups; ++turns)
                if (turns > SPINS)
                    std::this_thread::yield();
        }
    }

    static constexpr unsigned SPINS = 1000;
    std::mutex callers, lock;
    std::condition_variable wake, left;
    List list = {};
    uint64_t lists = 0;  // so far
    unsigned active = 0;  // workers with the list
    std::vector<std::unique_ptr<Room>> rooms;
};

// The first rule of the kernels' arithmetic that this compiler or processor breaks, or null.
static const char *fault() {
    const FloatMode mode;
    volatile float a = 1.0f + 0x1p-12f, c = -(1.0f + 0x1p-11f), tiny = 0x1p-126f, half = 0.5f, big = 8388608.0f;
    volatile double x = 1.0 + 0x1p-27, y = -(1.0 + 0x1p-26);
    typedef float four __attribute__((vector_size(16)));
    const four v = {a, a, a, a}, w = {c, c, c, c}, sum = v * v + w;
    if (a * a + c != 0.0f || sum[0] != 0.0f || x * x + y != 0.0)
        return "the compiler fused a product and a sum";
    volatile float small = tiny * half;
    if (small == 0.0f || small + small != tiny)
        return "denormal numbers are flushed to zero";
    if ((big + half) - big != 0.0f || ((big + 1.0f) + half) - big != 2.0f)
        return "sums are not rounded to the nearest even number";
    return nullptr;
}
}  // namespace zinc

extern "C" {
// The instruction sets that the library needs, by the compiler's names. Its loader checks them before any call.
extern const char zinc_cpu_needs[];
const char zinc_cpu_needs[] = ""
#ifdef __AVX__
    " avx"
#endif
#ifdef __AVX2__  // a level of processors that has these, too
    " avx2 bmi bmi2 fma f16c"
#endif
#ifdef __AVX512F__
    " avx512f avx512bw avx512dq avx512vl"
#endif
#ifdef __AVX512VNNI__
    " avx512vnni"
#endif
    ;
// The C library takes only a library of its own sources, because the arguments of kernels differ between versions.
extern const char zinc_cpu_sources[];
const char zinc_cpu_sources[] = ZINC_SOURCES;
const char *zinc_cpu_fault(void) { return zinc::fault(); }

// The function of a SPIR-V module, by the module's name, or null.
void *zinc_cpu_kernel(const char *name) {
    using namespace zinc;
    for (const NamedKernel *table :
         {ATTENTION, PRODUCTS, ELEMENTWISE, ROWS, ROPE, MOVES, RECURRENT, CONVOLUTIONS, GENERATED})
        for (; table->name; ++table)
            if (std::strcmp(table->name, name) == 0)
                return reinterpret_cast<void *>(table->kernel);
    return nullptr;
}

// Null: there is no memory.
void *zinc_cpu_open(unsigned threads) {
    try {
        return new zinc::Pool(threads);
    } catch (const std::bad_alloc &) {
        return nullptr;
    }
}

int zinc_cpu_run(void *pool, zinc::Step *steps, size_t count) {
    try {
        static_cast<zinc::Pool *>(pool)->run(steps, count);
        return 0;
    } catch (const std::bad_alloc &) {
        return 1;
    }
}
}
