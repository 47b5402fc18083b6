#include "recorder.h"

#include <algorithm>
#include <cstring>

namespace zinc {

constexpr uint64_t CHUNK = uint64_t(1) << 20, RING = uint64_t(16) << 20;  // bytes
constexpr uint32_t OPEN = 4;                      // levels that later commands may still join
constexpr uint64_t EARLY = 48, MANY = 512;        // commands that are ordered together: the first time, and later
constexpr uint64_t PRODUCTS = uint64_t(1) << 32;  // the most multiplications of a submission, which bounds its time
constexpr VkMemoryPropertyFlags DEVICE = VK_MEMORY_PROPERTY_DEVICE_LOCAL_BIT;

static uint64_t aligned(const za_device *device, uint64_t size) {
    const uint64_t unit = std::max<uint64_t>(device->properties.limits.minStorageBufferOffsetAlignment, 256);
    return (size + unit - 1) / unit * unit;
}

// --- arenas ----------------------------------------------------------------------------------------------------------

bool Arena::take(uint64_t size, za_place *place, void **host) {
    const uint64_t needed = aligned(device_, size);
    if (buffers_.empty() || taken_ + needed > buffers_.back().size) {
        uint64_t grown = buffers_.empty() ? CHUNK : 2 * buffers_.back().size;
        while (grown < needed) grown *= 2;
        buffer added{};
        if (!za_memory_make(device_, grown, flags_, what_, &added)) return false;
        buffers_.push_back(added);
        taken_ = 0;
    }
    const buffer &last = buffers_.back();
    *place = {last.handle, taken_, size};
    if (host) *host = static_cast<char *>(last.mapped) + taken_;
    taken_ += needed;
    return true;
}

bool Arena::reset() {
    const bool several = buffers_.size() > 1;
    for (; buffers_.size() > 1; buffers_.erase(buffers_.begin())) za_buffer_free(device_, &buffers_.front());
    taken_ = 0;
    return several;
}

// --- pipelines -------------------------------------------------------------------------------------------------------

const pipeline *Recorder::pipeline_of(int kernel, const Constants &constants) {
    auto &pipelines = pipelines_[kernel];
    for (const auto &[words, existing] : pipelines)
        if (words == constants) return &existing;
    pipeline created{};
    if (!za_pipeline_make(device_, &za_graph_kernels[kernel], constants.words, &created)) return nullptr;
    return &pipelines.emplace_back(constants, created).second;
}

// --- commands --------------------------------------------------------------------------------------------------------

// Parameters are small and read once. They lie in device memory that the host can write, if the device has such memory.
static VkMemoryPropertyFlags params_flags(const za_device *device) {
    constexpr VkMemoryPropertyFlags BOTH = DEVICE | MAPPED;
    for (uint32_t i = 0; i < device->memory.memoryTypeCount; ++i)
        if ((device->memory.memoryTypes[i].propertyFlags & BOTH) == BOTH) return BOTH;
    return MAPPED;
}

Recorder::Recorder(za_device *device)
    : device_(device), params_(device, params_flags(device), "parameters"),
      words_(device, params_flags(device), "lists"), scratch_(device, DEVICE, "scratch") {}

bool Recorder::next_commands() {
    if (used_ == commands_.size()) {
        VkCommandBufferAllocateInfo allocate{};
        allocate.sType = VK_STRUCTURE_TYPE_COMMAND_BUFFER_ALLOCATE_INFO;
        allocate.commandPool = device_->pool;
        allocate.commandBufferCount = 1;
        VkCommandBuffer commands;
        if (!za_check(device_->vk.AllocateCommandBuffers(device_->host.device, &allocate, &commands),
                      "vkAllocateCommandBuffers"))
            return false;
        commands_.push_back(commands);
    }
    products_ = 0;
    return za_begin(device_, commands_[used_++]);
}

bool Recorder::begin() {
    abandon();
    dispatches_ = recorded_ = 0;
    least_ = last_ = level_ = 0;
    waiting_.clear();
    za_levels_clear(&levels_);
    for (Arena *arena : {&params_, &words_, &scratch_})
        if (arena->reset()) forget();
    for (Sets &sets : sets_) sets.used = 0;
    ring_ = {};
    if (!za_enter(device_)) return false;
    const bool ok = next_commands();
    if (ok) za_barrier_before(device_, commands_[0]);
    return za_leave(device_, ok);
}

bool Recorder::flush() {
    const bool ok = za_enter(device_) && za_leave(device_, za_submit(device_, commands_[used_ - 1], false));
    return ok && next_commands();
}

bool Recorder::finish() {
    if (!record_waiting(UINT32_MAX) || !za_enter(device_)) return false;
    za_barrier_after(device_, commands_[used_ - 1]);
    const bool ok = za_leave(device_, za_submit(device_, commands_[used_ - 1], true));
    abandon();
    return ok;
}

// An early submission may still run after a later command has failed.
void Recorder::abandon() {
    za_is_idle(device_);
    used_ = 0;
}

void Recorder::counts(uint64_t totals[3]) const { std::copy_n(counts_, 3, totals); }

void Recorder::forget() {
    for (Sets &sets : sets_)
        for (Set &set : sets.all) set.place[0] = {};
}

// --- memory of a graph -----------------------------------------------------------------------------------------------

bool Recorder::scratch(uint64_t size, Scratch *scratch) {
    const uint64_t needed = aligned(device_, size);
    if (2 * needed > ring_.size) {  // a larger ring; the pieces of the old ring stay valid
        const uint64_t bytes = (needed + 2 * RING - 1) / RING * RING;
        if (!scratch_.take(bytes, &ring_, nullptr)) return false;
        ring_begin_ = 0;
    } else if (ring_begin_ + needed > ring_.size) {
        taken_ += ring_.size - ring_begin_;
        ring_begin_ = 0;
    }
    *scratch = {{ring_.buffer, ring_.offset + ring_begin_, size}, taken_};
    ring_begin_ += needed;
    taken_ += needed;
    return true;
}

bool Recorder::holds(const Scratch &scratch) const {
    const za_place &place = scratch.place;
    const bool inside = place.buffer == ring_.buffer && place.offset >= ring_.offset &&
                        place.offset < ring_.offset + ring_.size;
    return !inside || taken_ - scratch.taken <= ring_.size;
}

// --- dispatches ------------------------------------------------------------------------------------------------------

bool Recorder::set_of(const struct za_command &command, VkDescriptorSet *set) {
    const size_t bytes = command.kernel->bindings * sizeof *command.place;
    Sets &sets = sets_[command.kernel->bindings];
    if (sets.used == sets.all.size()) {
        Set added{};
        if (!za_set_take(device_, &pools_, command.kernel->bindings, &added.handle)) return false;
        sets.all.push_back(added);
    }
    Set &next = sets.all[sets.used++];
    if (std::memcmp(next.place, command.place, bytes) != 0) {
        std::memcpy(next.place, command.place, bytes);
        za_set_write(device_, next.handle, &command);
    }
    *set = next.handle;
    return true;
}

bool Recorder::record(const struct za_command &command) {
    ++recorded_;
    ++counts_[0];
    counts_[2] += uint64_t(command.groups[0]) * command.groups[1] * command.groups[2];
    products_ += command.products;
    VkDescriptorSet set;
    if (!set_of(command, &set)) return false;
    za_dispatch_with(device_, commands_[used_ - 1], &command, set);
    return true;
}

bool Recorder::record_waiting(uint32_t end) {
    order_.clear();
    for (size_t i = 0; i < waiting_.size(); ++i)
        if (waiting_[i].level < end) order_.push_back(uint64_t(waiting_[i].level) << 32 | i);
    std::sort(order_.begin(), order_.end());
    for (uint64_t i : order_) {
        const struct za_command &command = waiting_[uint32_t(i)];
        if (products_ && products_ + command.products > PRODUCTS && !flush()) return false;
        if (level_ != command.level) za_barrier_between(device_, commands_[used_ - 1], &command), ++counts_[1];
        level_ = command.level;
        if (!record(command)) return false;
    }
    auto is_recorded = [end](const struct za_command &command) { return command.level < end; };
    waiting_.erase(std::remove_if(waiting_.begin(), waiting_.end(), is_recorded), waiting_.end());
    least_ = std::max(least_, end);
    return true;
}

bool Recorder::command(const struct za_command &command) {
    const bool early = !recorded_ && waiting_.size() >= EARLY, deep = last_ > least_ + OPEN;
    if (deep && (early || waiting_.size() >= MANY) && !command.independent &&
        !(record_waiting(last_ - OPEN) && (!early || !recorded_ || flush())))
        return false;
    ++dispatches_;
    waiting_.push_back(command);
    if (!za_level(&levels_, &waiting_.back(), least_)) return false;
    last_ = std::max(last_, waiting_.back().level);
    return true;
}

bool Recorder::dispatch(int kernel, const Constants &constants, const void *params, size_t params_bytes,
                        std::initializer_list<za_place> places, bool independent) {
    uint32_t groups[3];
    za_graph_groups(kernel, constants.words, params, groups);
    if (!groups[0] || !groups[1] || !groups[2]) return true;
    const pipeline *compiled = pipeline_of(kernel, constants);
    za_place all[MAX_BINDINGS];
    void *memory;
    if (!compiled || !params_.take(4 * GRAPH_PARAMS_WORDS, &all[0], &memory)) return false;
    std::memcpy(memory, params, params_bytes);
    std::copy(places.begin(), places.end(), all + 1);
    struct za_command next = za_command(compiled, all, groups);
    next.independent = independent;
    return command(next);
}

}  // namespace zinc
