// Attention from native/ in a C++ engine on the Vulkan device that the library opened: every object in an owner of the
// engine's own, and several sequences in one call between buffers.
//
//     host_engine_cpp >results
//
// Three sequences of 1, 20 and 40 tokens get their K and V by one call and attend their last token. stdout: out
// (3, 4, 64), then lse (3, 4), float32, whose SHA-256 on every device is
// bfb99094a43e6940820b52135e59cdd8116271ebb200a71f95678060c95ad1f2.
#include <cstdio>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <unistd.h>
#include <vector>
#include <vulkan/vulkan.h>

#include "zinc_attn.h"

namespace {

// An owner for each kind of the library's objects.
template <auto free_it>
struct Free {
    template <typename T>
    void operator()(T *object) const { free_it(object); }
};
using Device = std::unique_ptr<za_device, Free<za_device_close>>;
using Attention = std::unique_ptr<za_attn, Free<za_close>>;
using Cache = std::unique_ptr<za_cache, Free<za_cache_free>>;

template <typename T>
T *checked(T *object) {
    return object ? object : throw std::runtime_error(za_error());
}

// A buffer that the host sees.
class Buffer {
public:
    Buffer(const za_host &host, VkDeviceSize size) : device_(host.device), size_(size) {
        const VkBufferCreateInfo create{.sType = VK_STRUCTURE_TYPE_BUFFER_CREATE_INFO, .size = size,
                                        .usage = VK_BUFFER_USAGE_STORAGE_BUFFER_BIT};
        check(vkCreateBuffer(device_, &create, nullptr, &buffer_));
        VkMemoryRequirements needs;
        VkPhysicalDeviceMemoryProperties types;
        vkGetBufferMemoryRequirements(device_, buffer_, &needs);
        vkGetPhysicalDeviceMemoryProperties(host.physical, &types);
        constexpr auto flags = VK_MEMORY_PROPERTY_HOST_VISIBLE_BIT | VK_MEMORY_PROPERTY_HOST_COHERENT_BIT;
        uint32_t type = 0;
        while (!(needs.memoryTypeBits >> type & 1) || (types.memoryTypes[type].propertyFlags & flags) != flags) ++type;
        const VkMemoryAllocateInfo info{.sType = VK_STRUCTURE_TYPE_MEMORY_ALLOCATE_INFO, .allocationSize = needs.size,
                                        .memoryTypeIndex = type};
        check(vkAllocateMemory(device_, &info, nullptr, &memory_));
        check(vkBindBufferMemory(device_, buffer_, memory_, 0));
        check(vkMapMemory(device_, memory_, 0, VK_WHOLE_SIZE, 0, &mapped_));
    }
    ~Buffer() {
        vkDestroyBuffer(device_, buffer_, nullptr);
        vkFreeMemory(device_, memory_, nullptr);
    }
    Buffer(const Buffer &) = delete;
    Buffer &operator=(const Buffer &) = delete;

    float *values() const { return static_cast<float *>(mapped_); }
    za_place place() const { return {buffer_, 0, size_}; }

private:
    static void check(VkResult result) {
        if (result != VK_SUCCESS) throw std::runtime_error("Vulkan failed");
    }
    VkDevice device_;
    VkDeviceSize size_;
    VkBuffer buffer_ = VK_NULL_HANDLE;
    VkDeviceMemory memory_ = VK_NULL_HANDLE;
    void *mapped_ = nullptr;
};

void run() {
    const Device device{checked(za_device_open(nullptr))};
    const za_host host = za_device_host(device.get());
    const za_options options{.q_heads = 4, .kv_heads = 2, .head_dim = 64, .dtype = ZA_F32, .page_size = 16};
    const Attention attention{checked(za_open(device.get(), &options))};
    const Cache cache{checked(za_cache_make(attention.get(), 1, 8, nullptr, nullptr))};

    const std::vector<uint32_t> tables[] = {{4}, {7, 0}, {2, 5, 3}}; // pages of 16 tokens, as the engine likes
    const uint32_t tokens[] = {1, 20, 40}, new_rows = 61;
    std::vector<za_request> requests;
    for (int i = 0; i < 3; ++i)
        requests.push_back({.tokens = tokens[i], .pages = uint32_t(tables[i].size()), .page_table = tables[i].data(),
                            .new_rows = tokens[i], .q_len = 1});
    const za_call call{.request = requests.data(), .requests = 3};

    const Buffer rows{host, new_rows * 2 * 128 * sizeof(float)}, q{host, 3 * 4 * 64 * sizeof(float)};
    const Buffer results{host, 3 * 4 * 65 * sizeof(float)}; // out, then lse
    for (uint32_t i = 0; i < new_rows * 2 * 128; ++i) rows.values()[i] = float(i * 29 % 97) / 32 - 1.5f;
    for (uint32_t i = 0; i < 3 * 4 * 64; ++i) q.values()[i] = float(i * 31 % 89) / 32 - 1.5f;
    za_place out = results.place(), lse = out;
    lse.offset = out.size = 3 * 4 * 64 * sizeof(float);
    lse.size -= out.size;
    const za_places places{.rows = rows.place(), .q = q.place(), .out = out, .lse = lse};
    if (!za_run_at(cache.get(), 0, &call, &places)) throw std::runtime_error(za_error());
    std::fwrite(results.values(), sizeof(float), 3 * 4 * 65, stdout);
}

} // namespace

int main() try {
    if (isatty(STDOUT_FILENO)) throw std::runtime_error("usage: host_engine_cpp >results, which are no text");
    run();
} catch (const std::exception &error) {
    std::fprintf(stderr, "host_engine_cpp: %s\n", error.what());
    return 2;
}
