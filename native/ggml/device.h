// A device of the back end, Vulkan's or the processor: what is opened for each shape, and the library's view of each pair
// of K and V.
#ifndef ZINC_GGML_DEVICE_H
#define ZINC_GGML_DEVICE_H

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <tuple>
#include <utility>

#include "../graph/memory.h"
#include "../graph/recorder.h"

struct ggml_backend_device;

namespace zinc {

// How K (or V) is kept: its type, and the bytes of a row, one head of one cell.
struct Kept {
    za_dtype type;
    uint32_t row;
};

// What a za_attn is opened for.
struct Kind {
    uint32_t q_heads, kv_heads, head_dim, v_head_dim;
    bool latent;
    Kept k, v;
    auto key() const { return std::tie(q_heads, kv_heads, head_dim, v_head_dim, latent, k.type, v.type); }
    bool operator<(const Kind &other) const { return key() < other.key(); }
};

// Where K and V of a layer are: rows that can be a cell's of head 0, and rows from a head to the next.
struct Layer {
    uint32_t rows, head_rows;
    za_place k, v;
    auto key() const { return std::tie(rows, head_rows, k.buffer, k.offset, v.buffer, v.offset); }
    bool operator<(const Layer &other) const { return key() < other.key(); }
};

struct Opened {
    za_attn *attn;       // NULL: it cannot be served
    std::string reason;  // why not
};

// A lock that threads get in the order in which they ask, so that one that computes graph after graph keeps none out.
class Turns {
  public:
    void lock() {
        std::unique_lock<std::mutex> hold(mutex_);
        const uint64_t mine = asked_++;
        next_.wait(hold, [&] { return mine == ended_; });
    }
    void unlock() {
        std::lock_guard<std::mutex> hold(mutex_);
        ++ended_;
        next_.notify_all();
    }

  private:
    std::mutex mutex_;
    std::condition_variable next_;
    uint64_t asked_ = 0, ended_ = 0;
};

// Threads. Models and contexts of several threads share the device, and none fails because another works: it waits.
// Device::turns is held by whoever uses the queue or a buffer: graph_compute for a whole graph, alloc, free, set, get,
// copy, memset and clear of buffers, the counts, the number of threads, and supports_op where attention's kind is new, a
// buffer of ggml's is taken over, or weights are left to another device. Such a call waits for the graphs that were
// asked for before it, and za_enter never meets a second thread. A thread has the turn of one device at a time. No other
// entry point waits for a graph: supports_op finds the kinds that are open under attns_mutex_, after which a thread takes
// no other lock; get_memory reads an atomic; graph_optimize, init_backend and free of a backend have only what is the caller's; and
// ggml_backend_init has a lock of its own.
class Device {
  public:
    // NULL where there is no device that will do; za_error says why. name: za_device_open's. gpu: nothing but a GPU.
    static Device *open(const char *name, bool gpu);

    std::string name;       // of the Vulkan device, or the processor
    ggml_backend_device *listed = nullptr;  // that ggml knows
    bool is_host = false;   // the processor: its memory is the host's
    size_t alignment = 0;   // of a tensor, and of what a kernel binds
    size_t most = 0;        // bytes that a kernel can bind
    bool on_cpu = false, wave32 = false;
    uint32_t lanes = 0;     // of a subgroup of kernels that do not meet in them
    uint32_t splits = 0;    // of a row's keys in attention, as ZINC_ATTN_SPLITS says; 0: the split rule
    za_arithmetic arithmetic = ZA_CANONICAL;  // of attention, as ZINC_ATTN_ARITHMETIC says
    za_units units{};       // that products take: a GPU's, or with ZINC_ATTN_UNITS=1 a CPU's; with 0 none
    Turns turns;            // held during every call of what is below

    Store *store = nullptr;        // tensors' memory
    Recorder *recorder = nullptr;  // one graph at a time
    void set_threads(int number);  // of the processor
    void release(Memory *memory);  // and the caches that lie in it

    std::map<uintptr_t, struct Buffer *> held;  // the processor's buffers, by where they begin

    // Buffers of which a call failed that was to change them, and NULL for what is written or read anew each time.
    std::set<const void *> spoilt;

    Opened attn(const Kind &kind, bool has_turn);  // without its turn, the thread waits for it where the kind is new
    za_cache *cache(const Kind &kind, const Layer &layer);  // a page is a row of head 0

  private:
    bool asked(const Kind &kind, Opened *opened);

    za_device *device_ = nullptr;
    std::mutex attns_mutex_;
    std::map<Kind, Opened> attns_;  // and what no later call could serve
    std::map<std::pair<Kind, Layer>, za_cache *> caches_;
};

extern const char *const ARITHMETICS[ZA_INTEGER + 1];  // names
extern Device *processor;  // that ggml has, beside a Vulkan device or alone, or NULL

}  // namespace zinc
#endif
