// A device of the back end, a Vulkan device or the processor: its memory, its recorder, and the C library's objects for
// each shape (za_attn) and each pair of K and V (za_cache).
#pragma once
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

constexpr int MOST_GROUPS = 65535;  // workgroups along a side of a grid, which every Vulkan device has

// How a cache stores K (or V): its type, and the bytes of a row, which is one head of one cell.
struct Kept {
    za_dtype type;
    uint32_t row;
};

// The shape and the types for which a za_attn is opened.
struct Kind {
    uint32_t q_heads, kv_heads, head_dim, v_head_dim;
    bool latent;
    Kept k, v;
    auto key() const { return std::tie(q_heads, kv_heads, head_dim, v_head_dim, latent, k.type, v.type); }
    bool operator<(const Kind &other) const { return key() < other.key(); }
};

// Where K and V of a layer lie. rows: how many rows can hold a cell's head 0; head_rows: rows from a head to the next.
struct Layer {
    uint32_t rows, head_rows;
    za_place k, v;
    auto key() const { return std::tie(rows, head_rows, k.buffer, k.offset, v.buffer, v.offset); }
    bool operator<(const Layer &other) const { return key() < other.key(); }
};

struct Opened {
    za_attn *attn;       // NULL: the library refused the kind
    std::string reason;  // why the library refused it
};

// A lock that threads get in the order in which they ask, so that a thread cannot keep it graph after graph.
class Turns {
  public:
    void lock() {
        std::unique_lock<std::mutex> hold(mutex_);
        const uint64_t ticket = asked_++;
        next_.wait(hold, [&] { return ticket == ended_; });
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

// Threads. Models and contexts of several threads share the device. A call waits while another thread uses the device.
//
// A thread that uses the queue or a buffer holds Device::turns: graph_compute for a whole graph; alloc, free, set, get,
// copy, memset and clear of buffers; the counts; the number of threads; and supports_op if attention's kind is new, if
// a buffer of ggml's is taken over, or if weights are left to another device. So za_enter never meets a second thread.
// A thread holds the turn of one device at a time.
//
// No other entry point waits for a graph. supports_op finds open kinds under attns_mutex_, and a thread that holds this
// mutex takes no other lock. get_memory reads an atomic. graph_optimize, init_backend and the free of a backend use
// only the caller's objects. ggml_backend_init has its own lock.
class Device {
  public:
    // NULL if no device is suitable; za_error says why. name: as in za_device_open. gpu: accept GPUs only.
    static Device *open(const char *name, bool gpu);

    std::string name;       // of the Vulkan device, or of the processor
    ggml_backend_device *listed = nullptr;  // ggml's object for this device
    bool is_host = false;   // the device is the processor, and its memory is the host's
    size_t alignment = 0;   // of tensors, and of the offsets that a kernel binds
    size_t most = 0;        // bytes that a kernel can bind
    bool on_cpu = false, wave32 = false;
    uint32_t lanes = 0;     // of a subgroup in kernels without subgroup operations
    uint32_t splits = 0;    // of a row's keys in attention, from ZINC_ATTN_SPLITS; 0: the split rule
    za_arithmetic arithmetic = ZA_CANONICAL;  // of attention, from ZINC_ATTN_ARITHMETIC
    za_units units{};       // matrix units of products and attention: a GPU's; ZINC_ATTN_UNITS=1 allows a CPU's, 0 none
    Turns turns;            // a thread holds the turn during every call of the members below

    Store *store = nullptr;        // the memory of tensors
    Recorder *recorder = nullptr;  // records one graph at a time
    void set_threads(int number);  // of the processor
    void release(Memory *memory);  // frees the memory and the caches in it

    std::map<uintptr_t, struct Buffer *> held;  // the processor's buffers, by their first address

    // Buffers whose bytes are wrong, because a call that changes them failed. NULL stands for a buffer of results,
    // whose bytes are written anew in each graph.
    std::set<const void *> spoilt;

    // has_turn: the thread holds the turn. Otherwise it waits for the turn if the kind is new.
    Opened attn(const Kind &kind, bool has_turn);
    za_cache *cache(const Kind &kind, const Layer &layer);  // a page of the cache is a row of head 0

  private:
    bool known_attn(const Kind &kind, Opened *opened);

    za_device *device_ = nullptr;
    std::mutex attns_mutex_;
    std::map<Kind, Opened> attns_;  // open kinds, and kinds that the library will always refuse
    std::map<std::pair<Kind, Layer>, za_cache *> caches_;
};

extern const char *const ARITHMETICS[ZA_INTEGER + 1];  // names
extern Device *processor;  // the processor as a device that ggml has, or NULL

}  // namespace zinc
