// A graph's commands, recorded and run: dispatches in the order of what they need, with a barrier before those that need
// what others did, in one submission or a few, the first of them early, and one wait at the end.
#pragma once
#include <cstdint>
#include <initializer_list>
#include <utility>
#include <vector>

#include "vulkan.h"

namespace zinc {

// Buffers of one kind of memory, out of which pieces are taken until all are given back.
class Arena {
  public:
    Arena(za_device *device, VkMemoryPropertyFlags flags, const char *what)
        : device_(device), flags_(flags), what_(what) {}
    bool take(uint64_t size, za_place *place, void **host);
    bool reset();  // all pieces are given back; of several buffers the largest stays, and true is returned
    void free();

  private:
    za_device *device_;
    VkMemoryPropertyFlags flags_;
    const char *what_;
    std::vector<buffer> buffers_;
    uint64_t taken_ = 0;  // of the last one
};

// What a kernel is specialized to: its struct of constants.
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

// Scratch memory of a graph: a place, and when it was taken.
struct Scratch {
    za_place place{};
    uint64_t taken = 0;
};

// Every function that returns false has said why (za_error); `abandon` then ends the graph.
class Recorder {
  public:
    explicit Recorder(za_device *device);
    ~Recorder();

    bool begin();
    bool words(uint64_t size, za_place *place, void **host);  // that the host writes before `finish`
    bool scratch(uint64_t size, Scratch *scratch);            // device memory, which others get after a while:
    bool holds(const Scratch &scratch) const;                 // whether it is still the taker's
    // kernel: a GRAPH_; places: its bindings behind the parameters; beside: see za_command.
    bool dispatch(int kernel, const Constants &constants, const void *params, size_t params_bytes,
                  std::initializer_list<za_place> places, bool independent);
    bool command(const struct za_command &command);
    bool finish();  // waits
    void abandon();
    void forget();  // a buffer that dispatches bound was freed

    uint64_t dispatches() const { return dispatches_; }  // of the last graph
    void counts(uint64_t totals[3]) const;                // dispatches, barriers and workgroups of all graphs

  private:
    struct Set {
        VkDescriptorSet handle;
        za_place place[MAX_BINDINGS];  // that it binds
    };
    // Of a number of bindings: dispatches of that number take one after another, and find their places as the graph
    // before left them, if it was the same graph.
    struct Sets {
        std::vector<Set> all;
        size_t used = 0;
    };

    const pipeline *pipeline_of(int kernel, const Constants &constants);
    bool set_of(const struct za_command &command, VkDescriptorSet *set);
    bool record(const struct za_command &command);
    void forget_waiting();
    bool record_waiting();  // by level, with a barrier between two
    bool next_commands();
    bool flush();

    za_device *device_;
    std::vector<std::pair<Constants, pipeline>> pipelines_[GRAPH_KERNELS];  // of a kernel few
    Arena params_, words_, scratch_;
    sets pools_{};
    Sets sets_[MAX_BINDINGS + 1];
    std::vector<VkCommandBuffer> commands_;
    size_t used_ = 0;            // of commands_, in this graph
    std::vector<struct za_command> waiting_;  // commands that are not recorded yet
    std::vector<uint64_t> order_;  // of waiting_, while these are recorded: levels and numbers
    levels levels_{};              // of waiting_
    uint64_t recorded_ = 0, products_ = 0, dispatches_ = 0;  // recorded_: of the graph; products_: of the submission
    uint64_t counts_[3] = {};
    za_place ring_{};                     // scratch memory is taken around it
    uint64_t ring_at_ = 0, taken_ = 0;    // taken_: of all rings, with what was left out
};

}  // namespace zinc
