// Records and runs the commands of a graph. Dispatches are ordered by level: each comes after the dispatches on which
// it depends, with a barrier between two levels. A graph has one submission or a few: the first is early, and the host
// waits once, at the end.
#pragma once
#include <cstdint>
#include <initializer_list>
#include <utility>
#include <vector>

#include "vulkan.h"

namespace zinc {

// Buffers of the same kind of memory. Pieces are taken from them one after another, and all are given back at once.
class Arena {
  public:
    Arena(za_device *device, VkMemoryPropertyFlags flags, const char *what)
        : device_(device), flags_(flags), what_(what) {}
    bool take(uint64_t size, za_place *place, void **host);
    bool reset();  // gives all pieces back and keeps the largest buffer; true: other buffers were freed

  private:
    za_device *device_;
    VkMemoryPropertyFlags flags_;
    const char *what_;
    std::vector<buffer> buffers_;
    uint64_t taken_ = 0;  // bytes of the last buffer
};

// A kernel's specialization constants, as the words of its struct of constants.
struct Constants {
    uint32_t words[11] = {};
    Constants() = default;
    template <typename T>
    Constants(const T &values) {
        static_assert(sizeof values <= sizeof words, "more constants than a kernel has");
        __builtin_memcpy(words, &values, sizeof values);
    }
    bool operator==(const Constants &other) const { return __builtin_memcmp(words, other.words, sizeof words) == 0; }
};

// A piece of scratch memory. taken: how many bytes of scratch memory the graph had taken before it.
struct Scratch {
    za_place place{};
    uint64_t taken = 0;
};

// A function that returns false has set za_error; `abandon` then ends the graph. The object is never destroyed.
class Recorder {
  public:
    explicit Recorder(za_device *device);

    bool begin();
    bool words(uint64_t size, za_place *place, void **host) {  // memory that the host writes before `finish`
        return words_.take(size, place, host);
    }
    bool scratch(uint64_t size, Scratch *scratch);  // device memory that is reused after a while
    bool holds(const Scratch &scratch) const;       // whether the memory was not reused yet
    // kernel: a GRAPH_; places: the kernel's bindings after the parameters; independent: see za_command.
    bool dispatch(int kernel, const Constants &constants, const void *params, size_t params_bytes,
                  std::initializer_list<za_place> places, bool independent);
    bool command(const struct za_command &command);
    bool finish();  // waits
    void abandon();
    void forget();  // a buffer that dispatches bound was freed

    uint64_t dispatches() const { return dispatches_; }  // of the current graph
    void counts(uint64_t totals[3]) const;                // dispatches, barriers and workgroups of all graphs

  private:
    struct Set {
        VkDescriptorSet handle;
        za_place place[MAX_BINDINGS];  // the places that the set binds
    };
    // Dispatches with the same number of bindings share these sets and take them in order. So if a graph is computed
    // again, each dispatch gets a set that binds its places already.
    struct Sets {
        std::vector<Set> all;
        size_t used = 0;
    };

    const pipeline *pipeline_of(int kernel, const Constants &constants);
    bool set_of(const struct za_command &command, VkDescriptorSet *set);
    bool record(const struct za_command &command);
    // Records the waiting commands whose level is below `end`, by level, with a barrier between two levels.
    bool record_waiting(uint32_t end);
    bool next_commands();
    bool flush();

    za_device *device_;
    std::vector<std::pair<Constants, pipeline>> pipelines_[GRAPH_KERNELS];  // a kernel has few
    Arena params_, words_, scratch_;
    sets pools_{};
    Sets sets_[MAX_BINDINGS + 1];
    std::vector<VkCommandBuffer> commands_;
    size_t used_ = 0;                         // how many of commands_ the current graph has used
    std::vector<struct za_command> waiting_;  // commands that are not recorded yet
    std::vector<uint64_t> order_;             // levels and numbers of waiting_, sorted for recording
    levels levels_{};                         // of the graph's commands
    // Levels: the least of waiting_ and of later commands, the highest of all, and the last that is recorded.
    uint32_t least_ = 0, last_ = 0, level_ = 0;
    uint64_t recorded_ = 0, products_ = 0, dispatches_ = 0;  // recorded_: of the graph; products_: of the submission
    uint64_t counts_[3] = {};                 // see `counts`
    za_place ring_{};                         // scratch memory, which is taken in a circle
    uint64_t ring_begin_ = 0, taken_ = 0;     // where the ring is free; all bytes that were taken or skipped
};

}  // namespace zinc
