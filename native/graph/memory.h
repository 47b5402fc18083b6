// The device memory of tensors, and transfers between it and the host.
//
// The memory is device-local. If the host can map it (a driver on the CPU, an APU, a card whose whole memory is in the
// host's address space), the host writes it in place. Otherwise, and with ZINC_ATTN_STAGING=1, bytes go through a
// staging buffer and a submission.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "vulkan.h"

namespace zinc {

struct Memory {
    struct buffer buffer{};
    char *base = nullptr;  // the host's address; NULL: the memory is not mapped
    size_t size = 0;
};

// A function that returns false has set za_error. Only one thread at a time may call. The object is never destroyed.
class Store {
  public:
    explicit Store(za_device *device);

    uint64_t total() const { return total_; }  // bytes of the heap
    uint64_t free() const {  // bytes of the heap that are not allocated here; any thread may call
        const uint64_t used = used_;
        return used < total_ ? total_ - used : 0;
    }

    bool allocate(size_t size, Memory *memory);
    bool import(void *bytes, size_t size, Memory *memory);  // the host's own memory; only the processor can import it
    void release(Memory *memory);

    bool write(const Memory &to, size_t offset, const void *data, size_t size);
    bool read(const Memory &from, size_t offset, void *data, size_t size);
    bool fill(const Memory &to, size_t offset, uint8_t value, size_t size);
    bool copy(const Memory &from, size_t source, const Memory &to, size_t target, size_t size);

  private:
    bool stage(const Memory &memory, size_t offset, char *data, size_t size, bool write);

    za_device *device_;
    VkMemoryPropertyFlags flags_;  // of the memory type
    bool mapped_ = false, cached_ = false;
    uint64_t total_ = 0;
    std::atomic<uint64_t> used_{0};
    buffer staging_{};
};

}  // namespace zinc
