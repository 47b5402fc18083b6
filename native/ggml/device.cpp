#include "device.h"

#include <cstdlib>

#include "say.h"

namespace zinc {

Device *Device::open() {
    Device *self = new Device;
    self->device_ = za_device_open(std::getenv("ZINC_ATTN_DEVICE"));
    // The driver computes the kernels' bits.
    const Kind plain{1, 1, 64, 64, false, {ZA_F16, 128}, {ZA_F16, 128}};
    if (self->device_ && self->load_functions() && self->attn(plain).attn) {
        say("ZINC0 is %s: the KV cache and attention of --device ZINC0 -ngl 99 -fa on; all else is the CPU's",
            self->name.c_str());
        return self;
    }
    say("no device: %s", za_error());
    za_device_close(self->device_);
    delete self;
    return nullptr;
}

bool Device::load_functions() {
    const struct za_device_info info = za_device_info(device_);
    name = info.name;
    alignment = info.alignment;
    most = info.most;
    host_ = za_device_host(device_);
    auto of_instance = [this](const char *function) { return host_.get_proc(host_.instance, function); };
    auto device_proc = PFN_vkGetDeviceProcAddr(of_instance("vkGetDeviceProcAddr"));
    auto memory_properties =
        PFN_vkGetPhysicalDeviceMemoryProperties(of_instance("vkGetPhysicalDeviceMemoryProperties"));
    auto load = [&](const char *function) { return device_proc(host_.device, function); };
    create_buffer_ = PFN_vkCreateBuffer(load("vkCreateBuffer"));
    destroy_buffer_ = PFN_vkDestroyBuffer(load("vkDestroyBuffer"));
    requirements_ = PFN_vkGetBufferMemoryRequirements(load("vkGetBufferMemoryRequirements"));
    allocate_memory_ = PFN_vkAllocateMemory(load("vkAllocateMemory"));
    free_memory_ = PFN_vkFreeMemory(load("vkFreeMemory"));
    bind_ = PFN_vkBindBufferMemory(load("vkBindBufferMemory"));
    map_ = PFN_vkMapMemory(load("vkMapMemory"));
    memory_properties(host_.physical, &properties_);
    for (uint32_t i = 0; i < properties_.memoryHeapCount; ++i)
        if (properties_.memoryHeaps[i].size > total_) total_ = properties_.memoryHeaps[i].size;
    return true;
}

// Memory that the host reads and writes in place: cached if there is some, because the CPU back end works in it, too.
int Device::memory_type(uint32_t allowed) const {
    const VkMemoryPropertyFlags mapped = VK_MEMORY_PROPERTY_HOST_VISIBLE_BIT | VK_MEMORY_PROPERTY_HOST_COHERENT_BIT;
    for (VkMemoryPropertyFlags flags : {mapped | VK_MEMORY_PROPERTY_HOST_CACHED_BIT, mapped})
        for (uint32_t i = 0; i < properties_.memoryTypeCount; ++i)
            if (allowed >> i & 1 && (properties_.memoryTypes[i].propertyFlags & flags) == flags) return int(i);
    return -1;
}

bool Device::allocate(size_t size, Memory *memory) {
    *memory = {};
    memory->size = size;
    VkBufferCreateInfo create{};
    create.sType = VK_STRUCTURE_TYPE_BUFFER_CREATE_INFO;
    create.size = size ? size : 1;
    create.usage = VK_BUFFER_USAGE_STORAGE_BUFFER_BIT;
    if (create_buffer_(host_.device, &create, nullptr, &memory->buffer) != VK_SUCCESS) return false;
    VkMemoryRequirements needs;
    requirements_(host_.device, memory->buffer, &needs);
    int type = memory_type(needs.memoryTypeBits);
    VkMemoryAllocateInfo allocate{};
    allocate.sType = VK_STRUCTURE_TYPE_MEMORY_ALLOCATE_INFO;
    allocate.allocationSize = needs.size;
    allocate.memoryTypeIndex = uint32_t(type);
    if (type >= 0 && allocate_memory_(host_.device, &allocate, nullptr, &memory->memory) == VK_SUCCESS &&
        bind_(host_.device, memory->buffer, memory->memory, 0) == VK_SUCCESS &&
        map_(host_.device, memory->memory, 0, VK_WHOLE_SIZE, 0, &memory->base) == VK_SUCCESS)
        return true;
    release(memory);
    return false;
}

void Device::release(Memory *memory) {
    for (auto at = caches_.begin(); at != caches_.end();) {
        const Layer &layer = at->first.second;
        if (layer.k.buffer == memory->buffer || layer.v.buffer == memory->buffer) {
            za_cache_free(at->second);
            at = caches_.erase(at);
        } else {
            ++at;
        }
    }
    destroy_buffer_(host_.device, memory->buffer, nullptr);
    free_memory_(host_.device, memory->memory, nullptr);
    *memory = {};
}

const Opened &Device::attn(const Kind &kind) {
    auto found = attns_.find(kind);
    if (found != attns_.end()) return found->second;
    za_options options{};
    options.q_heads = kind.q_heads;
    options.kv_heads = kind.kv_heads;
    options.head_dim = kind.head_dim;
    options.v_head_dim = kind.v_head_dim;
    options.latent = kind.latent;
    options.page_size = 1;
    options.dtype = kind.k.type;
    options.v_dtype = kind.v.type;
    options.k_stride = kind.k.row;
    options.v_stride = kind.latent ? 0 : kind.v.row;
    Opened opened{za_open(device_, &options), za_error()};
    if (!opened.attn && za_error_code() == ZA_MEMORY) return failed_ = opened;
    return attns_[kind] = opened;  // what cannot be served is asked once
}

za_cache *Device::cache(const Kind &kind, const Layer &layer) {
    auto found = caches_.find({kind, layer});
    if (found != caches_.end()) return found->second;
    za_attn *opened = attn(kind).attn;
    za_cache_places places{};
    places.layers = 1;
    places.pages = layer.rows;
    places.k = layer.k;
    places.v = layer.v;
    places.token_rows = 1;
    places.head_rows = layer.head_rows;
    za_cache *made = opened ? za_cache_from(opened, &places) : nullptr;
    if (made) caches_[{kind, layer}] = made;
    return made;
}

}  // namespace zinc
