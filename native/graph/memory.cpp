#include "memory.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <vector>

namespace zinc {

constexpr size_t STAGING = size_t(4) << 20;  // bytes that a submission copies through the staging buffer
constexpr size_t DIRECT_READ = 4096;         // the most bytes that the host reads in place from uncached memory
constexpr size_t MARGIN = 256;               // bytes after the last tensor, because kernels bind whole words

// The size of the largest device-local heap. 0: this heap has no memory type with the flags.
static uint64_t heap_with(const za_device *device, VkMemoryPropertyFlags flags) {
    uint64_t largest = 0, matching = 0;
    for (uint32_t i = 0; i < device->memory.memoryTypeCount; ++i) {
        const VkMemoryType &type = device->memory.memoryTypes[i];
        const uint64_t size = device->memory.memoryHeaps[type.heapIndex].size;
        if (!(type.propertyFlags & VK_MEMORY_PROPERTY_DEVICE_LOCAL_BIT)) continue;
        largest = std::max(largest, size);
        if ((type.propertyFlags & flags) == flags) matching = std::max(matching, size);
    }
    return matching == largest ? matching : 0;
}

Store::Store(za_device *device) : device_(device), flags_(VK_MEMORY_PROPERTY_DEVICE_LOCAL_BIT) {
    const char *staging = std::getenv("ZINC_ATTN_STAGING");
    const VkMemoryPropertyFlags seen = flags_ | MAPPED, cached = seen | VK_MEMORY_PROPERTY_HOST_CACHED_BIT;
    total_ = heap_with(device, flags_);
    cached_ = heap_with(device, cached) > 0;
    mapped_ = heap_with(device, seen) > 0 && (device->processor || !(staging && std::strcmp(staging, "1") == 0));
    if (mapped_) flags_ = cached_ ? cached : seen;
}

bool Store::allocate(size_t size, Memory *memory) {
    *memory = {};
    const size_t whole = (size + MARGIN) / MARGIN * MARGIN;
    const bool ok = za_within(device_, za_memory_make(device_, whole, flags_, "tensors", &memory->buffer));
    memory->base = static_cast<char *>(memory->buffer.mapped);
    memory->size = size;
    used_ += memory->buffer.size;
    return ok;
}

bool Store::import(void *bytes, size_t size, Memory *memory) {
    *memory = {{}, static_cast<char *>(bytes), size};
    const bool ok = za_within(device_, za_memory_import(device_, bytes, size, &memory->buffer));
    used_ += memory->buffer.size;
    return ok;
}

void Store::release(Memory *memory) {
    used_ -= memory->buffer.size;
    za_buffer_free(device_, &memory->buffer);
    *memory = {};
}

// Records the device's own commands and submits them.
template <typename Record>
static bool submit(za_device *device, Record record) {
    if (!za_enter(device)) return false;
    bool ok = za_begin(device, device->commands);
    if (ok) {
        za_barrier_before(device, device->commands);
        record(device->vk, device->commands);
        za_barrier_after(device, device->commands);
        ok = za_submit(device, device->commands, true);
    }
    return za_leave(device, ok);
}

bool Store::stage(const Memory &memory, size_t offset, char *data, size_t size, bool write) {
    if (!staging_.handle && !za_within(device_, za_memory_make(device_, STAGING, MAPPED, "staging", &staging_)))
        return false;
    for (size_t begin = 0; begin < size; begin += STAGING) {
        const size_t n = std::min(STAGING, size - begin);
        if (write) std::memcpy(staging_.mapped, data + begin, n);
        const bool ok = submit(device_, [&](const za_functions &vk, VkCommandBuffer commands) {
            const VkBufferCopy region{write ? 0 : offset + begin, write ? offset + begin : 0, n};
            const VkBuffer tensors = memory.buffer.handle;
            const VkBuffer source = write ? staging_.handle : tensors, target = write ? tensors : staging_.handle;
            vk.CmdCopyBuffer(commands, source, target, 1, &region);
        });
        if (!ok) return false;
        if (!write) std::memcpy(data + begin, staging_.mapped, n);
    }
    return true;
}

bool Store::write(const Memory &to, size_t offset, const void *data, size_t size) {
    if (!to.base) return stage(to, offset, const_cast<char *>(static_cast<const char *>(data)), size, true);
    std::memcpy(to.base + offset, data, size);
    return true;
}

bool Store::read(const Memory &from, size_t offset, void *data, size_t size) {
    const bool direct = from.base && (cached_ || size <= DIRECT_READ);
    char *to = static_cast<char *>(data);
    if (!direct)  // A failed read is tried again, because ggml's get_tensor returns no status.
        return stage(from, offset, to, size, false) || stage(from, offset, to, size, false);
    std::memcpy(data, from.base + offset, size);
    return true;
}

bool Store::fill(const Memory &to, size_t offset, uint8_t value, size_t size) {
    if (to.base) {
        std::memset(to.base + offset, value, size);
        return true;
    }
    const size_t first = std::min(size, (4 - offset % 4) % 4), words = (size - first) / 4 * 4;
    const size_t last = size - first - words;
    const std::vector<char> edge(4, char(value));
    if (!words) return write(to, offset, std::vector<char>(size, char(value)).data(), size);
    return submit(device_, [&](const za_functions &vk, VkCommandBuffer commands) {
        vk.CmdFillBuffer(commands, to.buffer.handle, offset + first, words, value * 0x01010101u);
    }) && (!first || write(to, offset, edge.data(), first)) &&
           (!last || write(to, offset + first + words, edge.data(), last));
}

bool Store::copy(const Memory &from, size_t source, const Memory &to, size_t target, size_t size) {
    if (from.base && to.base) {
        std::memmove(to.base + target, from.base + source, size);
        return true;
    }
    return submit(device_, [&](const za_functions &vk, VkCommandBuffer commands) {
        const VkBufferCopy region{source, target, size};
        vk.CmdCopyBuffer(commands, from.buffer.handle, to.buffer.handle, 1, &region);
    });
}

}  // namespace zinc
