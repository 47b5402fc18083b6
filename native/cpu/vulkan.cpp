// The processor as a device of Vulkan, for the C library and the back end: the functions that these call (functions.h).
//
// A command buffer is a list of steps, and a copy is a step, too. A submission ends before vkQueueSubmit returns, and
// its steps run one after another, so that barriers and fences have nothing to do. An entry point is the name of a
// kernel's module, and the module itself is not read.
#include "../src/functions.h"
#include "runtime.h"
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <sys/mman.h>
#include <thread>
#include <unistd.h>
#include <vector>

extern "C" {
void *zinc_cpu_kernel(const char *name);
void *zinc_cpu_open(unsigned threads);
int zinc_cpu_run(void *pool, zinc::Step *steps, size_t count);
}

namespace zinc {
namespace {
constexpr uint32_t BINDINGS = 16, MOST_GROUPS = 65535, ALIGNMENT = 64, LINE = 4096;
constexpr uint64_t PIECE = 1 << 16;                   // bytes of a copy that a workgroup has
constexpr uint64_t LARGE = 64 << 20;                  // bytes of an allocation for which the host's free memory counts
constexpr uint32_t MOST_BYTES = UINT32_MAX - 3;       // of a storage buffer

struct Memory {
    char *bytes;
    uint64_t size;  // 0: the memory is imported
};
struct Buffer {
    uint64_t size;
    char *bytes;
};
struct Places {
    void *bytes[BINDINGS];
};
struct SetPool {
    std::deque<Places> all;
};
struct Pipeline {
    Kernel kernel;
    std::vector<uint32_t> spec;
};
struct Copy {  // the specialization constants of a copy's step
    uint64_t bytes;
    uint32_t value;  // of a fill
};
struct Commands {
    std::vector<Step> steps;
    std::deque<Places> places;
    std::deque<Copy> copies;
    const Pipeline *pipeline;
    const Places *set;
    bool failed;
};
struct CommandPool {
    std::deque<Commands> all;
};

template <typename T, typename Handle> T *object(Handle handle) { return reinterpret_cast<T *>(handle); }
template <typename T, typename Handle> VkResult give(Handle *handle, T *pointer) {
    *handle = reinterpret_cast<Handle>(pointer);
    return pointer ? VK_SUCCESS : VK_ERROR_OUT_OF_HOST_MEMORY;
}
template <typename T, typename Handle> VkResult make(Handle *handle) { return give(handle, new (std::nothrow) T()); }
template <typename Work> VkResult guarded(Work work) {
    try {
        work();
        return VK_SUCCESS;
    } catch (const std::bad_alloc &) {
        return VK_ERROR_OUT_OF_HOST_MEMORY;
    }
}

int the_device;  // handles of objects without a state point to it

// The number after `name` in a file of /proc, in the file's unit; 0 without the name. text: receives the line's rest.
uint64_t fact(const char *path, const char *name, std::string *text = nullptr) {
    std::unique_ptr<FILE, int (*)(FILE *)> file(std::fopen(path, "r"), [](FILE *f) { return f ? std::fclose(f) : 0; });
    char line[LINE];
    while (file && std::fgets(line, sizeof line, file.get()))
        if (const char *colon = std::strchr(line, ':'); colon && std::strncmp(line, name, std::strlen(name)) == 0) {
            if (text)
                *text = std::string(colon + 2, std::strcspn(colon + 2, "\n"));
            return std::strtoull(colon + 1, nullptr, 10);
        }
    return 0;
}
uint64_t memory_bytes() { return uint64_t(sysconf(_SC_PAGE_SIZE)) * uint64_t(sysconf(_SC_PHYS_PAGES)); }

// Threads of the next submissions. Pools are kept, because llama.cpp alternates between two numbers, and all devices
// share them. NULL: no memory.
std::atomic<unsigned> threads{std::max(1u, std::thread::hardware_concurrency())};
void *pool() {
    static std::mutex mutex;
    static std::map<unsigned, void *> pools;
    std::lock_guard<std::mutex> lock(mutex);
    void *&workers = pools[threads];
    return workers ? workers : workers = zinc_cpu_open(threads);
}

// --- the instance and the device -------------------------------------------------------------------------------------

VkResult VKAPI_PTR EnumerateInstanceVersion(uint32_t *version) { return *version = VK_API_VERSION_1_3, VK_SUCCESS; }
VkResult VKAPI_PTR CreateInstance(const VkInstanceCreateInfo *, const VkAllocationCallbacks *, VkInstance *instance) {
    return give(instance, &the_device);
}
void VKAPI_PTR DestroyInstance(VkInstance, const VkAllocationCallbacks *) {}
VkResult VKAPI_PTR EnumeratePhysicalDevices(VkInstance, uint32_t *count, VkPhysicalDevice *devices) {
    return *count = 1, give(devices, &the_device);
}
void VKAPI_PTR GetPhysicalDeviceProperties(VkPhysicalDevice, VkPhysicalDeviceProperties *properties) {
    std::string model;
    fact("/proc/cpuinfo", "model name", &model);
    *properties = {};
    properties->apiVersion = VK_API_VERSION_1_3;
    properties->deviceType = VK_PHYSICAL_DEVICE_TYPE_CPU;
    std::snprintf(properties->deviceName, sizeof properties->deviceName, "cpu%s%s", model.empty() ? "" : ": ",
                  model.c_str());
    VkPhysicalDeviceLimits &limits = properties->limits;
    limits.maxStorageBufferRange = MOST_BYTES;
    limits.minStorageBufferOffsetAlignment = ALIGNMENT;
    limits.maxPerStageDescriptorStorageBuffers = BINDINGS;
    limits.maxComputeSharedMemorySize = Room::SHARED_BYTES / 2;
    limits.maxComputeWorkGroupInvocations = limits.maxComputeWorkGroupSize[0] = Fibers::MOST;
    for (uint32_t &most : limits.maxComputeWorkGroupCount)
        most = MOST_GROUPS;
}
void VKAPI_PTR GetPhysicalDeviceProperties2(VkPhysicalDevice physical, VkPhysicalDeviceProperties2 *properties) {
    GetPhysicalDeviceProperties(physical, &properties->properties);
}
void VKAPI_PTR GetPhysicalDeviceFeatures2(VkPhysicalDevice, VkPhysicalDeviceFeatures2 *) {}
void VKAPI_PTR GetPhysicalDeviceMemoryProperties(VkPhysicalDevice, VkPhysicalDeviceMemoryProperties *memory) {
    *memory = {};
    memory->memoryTypeCount = memory->memoryHeapCount = 1;
    memory->memoryTypes[0].propertyFlags = VK_MEMORY_PROPERTY_DEVICE_LOCAL_BIT | VK_MEMORY_PROPERTY_HOST_VISIBLE_BIT |
                                           VK_MEMORY_PROPERTY_HOST_COHERENT_BIT | VK_MEMORY_PROPERTY_HOST_CACHED_BIT;
    memory->memoryHeaps[0] = {memory_bytes(), VK_MEMORY_HEAP_DEVICE_LOCAL_BIT};
}
void VKAPI_PTR GetPhysicalDeviceQueueFamilyProperties(VkPhysicalDevice, uint32_t *count,
                                                      VkQueueFamilyProperties *families) {
    *count = 1;
    *families = {};
    families->queueFlags = VK_QUEUE_COMPUTE_BIT;
    families->queueCount = 1;
}
VkResult VKAPI_PTR EnumerateDeviceExtensionProperties(VkPhysicalDevice, const char *, uint32_t *count,
                                                      VkExtensionProperties *) {
    return *count = 0, VK_SUCCESS;
}
VkResult VKAPI_PTR CreateDevice(VkPhysicalDevice, const VkDeviceCreateInfo *, const VkAllocationCallbacks *,
                                VkDevice *device) {
    return give(device, pool() ? &the_device : nullptr);
}
void VKAPI_PTR DestroyDevice(VkDevice, const VkAllocationCallbacks *) {}
void VKAPI_PTR GetDeviceQueue(VkDevice, uint32_t, uint32_t, VkQueue *queue) { give(queue, &the_device); }
VkResult VKAPI_PTR DeviceWaitIdle(VkDevice) { return VK_SUCCESS; }
VkResult VKAPI_PTR QueueWaitIdle(VkQueue) { return VK_SUCCESS; }

// --- memory ----------------------------------------------------------------------------------------------------------

VkResult VKAPI_PTR AllocateMemory(VkDevice, const VkMemoryAllocateInfo *info, const VkAllocationCallbacks *,
                                  VkDeviceMemory *memory) {
    const uint64_t size = info->allocationSize, free = size < LARGE ? 0 : fact("/proc/meminfo", "MemAvailable") << 10;
    *memory = VK_NULL_HANDLE;
    if (auto *imported = static_cast<const VkImportMemoryHostPointerInfoEXT *>(info->pNext))  // nothing else comes here
        return give(memory, new (std::nothrow) Memory{static_cast<char *>(imported->pHostPointer), 0});
    if (free && size > free)
        return VK_ERROR_OUT_OF_DEVICE_MEMORY;
    void *bytes = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (bytes == MAP_FAILED)
        return VK_ERROR_OUT_OF_DEVICE_MEMORY;
#ifdef MADV_HUGEPAGE
    madvise(bytes, size, MADV_HUGEPAGE);
#endif
    return give(memory, new (std::nothrow) Memory{static_cast<char *>(bytes), size});
}
void VKAPI_PTR FreeMemory(VkDevice, VkDeviceMemory memory, const VkAllocationCallbacks *) {
    if (Memory *allocation = object<Memory>(memory)) {
        if (allocation->size)
            munmap(allocation->bytes, allocation->size);
        delete allocation;
    }
}
VkResult VKAPI_PTR MapMemory(VkDevice, VkDeviceMemory memory, VkDeviceSize offset, VkDeviceSize, VkMemoryMapFlags,
                             void **bytes) {
    return *bytes = object<Memory>(memory)->bytes + offset, VK_SUCCESS;
}
VkResult VKAPI_PTR CreateBuffer(VkDevice, const VkBufferCreateInfo *info, const VkAllocationCallbacks *,
                                VkBuffer *buffer) {
    return give(buffer, new (std::nothrow) Buffer{info->size, nullptr});
}
void VKAPI_PTR DestroyBuffer(VkDevice, VkBuffer buffer, const VkAllocationCallbacks *) {
    delete object<Buffer>(buffer);
}
void VKAPI_PTR GetBufferMemoryRequirements(VkDevice, VkBuffer buffer, VkMemoryRequirements *needs) {
    *needs = {object<Buffer>(buffer)->size, ALIGNMENT, 1};
}
VkResult VKAPI_PTR BindBufferMemory(VkDevice, VkBuffer buffer, VkDeviceMemory memory, VkDeviceSize offset) {
    return object<Buffer>(buffer)->bytes = object<Memory>(memory)->bytes + offset, VK_SUCCESS;
}

// --- pipelines and sets ----------------------------------------------------------------------------------------------

#define ZINC_STATELESS(name, handle, info)                                                                            \
    VkResult VKAPI_PTR Create##name(VkDevice, const info *, const VkAllocationCallbacks *, handle *result) {           \
        return give(result, &the_device);                                                                             \
    }                                                                                                                 \
    void VKAPI_PTR Destroy##name(VkDevice, handle, const VkAllocationCallbacks *) {}
ZINC_STATELESS(ShaderModule, VkShaderModule, VkShaderModuleCreateInfo)
ZINC_STATELESS(DescriptorSetLayout, VkDescriptorSetLayout, VkDescriptorSetLayoutCreateInfo)
ZINC_STATELESS(PipelineLayout, VkPipelineLayout, VkPipelineLayoutCreateInfo)
ZINC_STATELESS(PipelineCache, VkPipelineCache, VkPipelineCacheCreateInfo)
ZINC_STATELESS(Fence, VkFence, VkFenceCreateInfo)
#undef ZINC_STATELESS
VkResult VKAPI_PTR GetPipelineCacheData(VkDevice, VkPipelineCache, size_t *size, void *) {
    return *size = 0, VK_SUCCESS;
}
VkResult VKAPI_PTR WaitForFences(VkDevice, uint32_t, const VkFence *, VkBool32, uint64_t) { return VK_SUCCESS; }
VkResult VKAPI_PTR ResetFences(VkDevice, uint32_t, const VkFence *) { return VK_SUCCESS; }

VkResult VKAPI_PTR CreateComputePipelines(VkDevice, VkPipelineCache, uint32_t, const VkComputePipelineCreateInfo *info,
                                          const VkAllocationCallbacks *, VkPipeline *pipeline) {
    const VkSpecializationInfo *constants = info->stage.pSpecializationInfo;
    void *kernel = zinc_cpu_kernel(info->stage.pName);
    *pipeline = VK_NULL_HANDLE;
    return !kernel ? VK_ERROR_FEATURE_NOT_PRESENT : guarded([&] {
        const uint32_t *words = static_cast<const uint32_t *>(constants->pData);
        give(pipeline, new Pipeline{reinterpret_cast<Kernel>(kernel), {words, words + constants->dataSize / 4}});
    });
}
void VKAPI_PTR DestroyPipeline(VkDevice, VkPipeline pipeline, const VkAllocationCallbacks *) {
    delete object<Pipeline>(pipeline);
}
VkResult VKAPI_PTR CreateDescriptorPool(VkDevice, const VkDescriptorPoolCreateInfo *, const VkAllocationCallbacks *,
                                        VkDescriptorPool *pool) {
    return make<SetPool>(pool);
}
void VKAPI_PTR DestroyDescriptorPool(VkDevice, VkDescriptorPool pool, const VkAllocationCallbacks *) {
    delete object<SetPool>(pool);
}
VkResult VKAPI_PTR ResetDescriptorPool(VkDevice, VkDescriptorPool pool, VkDescriptorPoolResetFlags) {
    return object<SetPool>(pool)->all.clear(), VK_SUCCESS;
}
VkResult VKAPI_PTR AllocateDescriptorSets(VkDevice, const VkDescriptorSetAllocateInfo *info, VkDescriptorSet *set) {
    return guarded([&] { give(set, &object<SetPool>(info->descriptorPool)->all.emplace_back()); });
}
void VKAPI_PTR UpdateDescriptorSets(VkDevice, uint32_t count, const VkWriteDescriptorSet *writes, uint32_t,
                                    const VkCopyDescriptorSet *) {
    for (const VkWriteDescriptorSet *write = writes; write < writes + count; ++write)
        for (uint32_t i = 0; i < write->descriptorCount; ++i)
            object<Places>(write->dstSet)->bytes[write->dstBinding + i] =
                object<Buffer>(write->pBufferInfo[i].buffer)->bytes + write->pBufferInfo[i].offset;
}

// --- commands --------------------------------------------------------------------------------------------------------

VkResult VKAPI_PTR CreateCommandPool(VkDevice, const VkCommandPoolCreateInfo *, const VkAllocationCallbacks *,
                                     VkCommandPool *pool) {
    return make<CommandPool>(pool);
}
void VKAPI_PTR DestroyCommandPool(VkDevice, VkCommandPool pool, const VkAllocationCallbacks *) {
    delete object<CommandPool>(pool);
}
VkResult VKAPI_PTR AllocateCommandBuffers(VkDevice, const VkCommandBufferAllocateInfo *info, VkCommandBuffer *buffers) {
    return guarded([&] {
        for (uint32_t i = 0; i < info->commandBufferCount; ++i)
            give(&buffers[i], &object<CommandPool>(info->commandPool)->all.emplace_back());
    });
}
VkResult VKAPI_PTR ResetCommandBuffer(VkCommandBuffer commands, VkCommandBufferResetFlags) {
    Commands *list = object<Commands>(commands);
    list->steps.clear(), list->places.clear(), list->copies.clear();
    list->failed = false;
    return VK_SUCCESS;
}
VkResult VKAPI_PTR BeginCommandBuffer(VkCommandBuffer commands, const VkCommandBufferBeginInfo *) {
    return ResetCommandBuffer(commands, 0);
}
VkResult VKAPI_PTR EndCommandBuffer(VkCommandBuffer commands) {
    return object<Commands>(commands)->failed ? VK_ERROR_OUT_OF_HOST_MEMORY : VK_SUCCESS;
}
void VKAPI_PTR CmdBindPipeline(VkCommandBuffer commands, VkPipelineBindPoint, VkPipeline pipeline) {
    object<Commands>(commands)->pipeline = object<Pipeline>(pipeline);
}
void VKAPI_PTR CmdBindDescriptorSets(VkCommandBuffer commands, VkPipelineBindPoint, VkPipelineLayout, uint32_t,
                                     uint32_t, const VkDescriptorSet *sets, uint32_t, const uint32_t *) {
    object<Commands>(commands)->set = object<Places>(sets[0]);
}
void VKAPI_PTR CmdPipelineBarrier(VkCommandBuffer, VkPipelineStageFlags, VkPipelineStageFlags, VkDependencyFlags,
                                  uint32_t, const VkMemoryBarrier *, uint32_t, const VkBufferMemoryBarrier *, uint32_t,
                                  const VkImageMemoryBarrier *) {}
void add(Commands *to, Kernel kernel, const uint32_t *spec, const Places &places, uint32_t x, uint32_t y, uint32_t z) {
    to->failed |= guarded([&] {
        to->places.push_back(places);
        to->steps.push_back({kernel, spec, to->places.back().bytes, {x, y, z}, 0, 0, 0});
    }) != VK_SUCCESS;
}
void VKAPI_PTR CmdDispatch(VkCommandBuffer commands, uint32_t x, uint32_t y, uint32_t z) {
    Commands *list = object<Commands>(commands);
    add(list, list->pipeline->kernel, list->pipeline->spec.data(), *list->set, x, y, z);
}

template <typename Work> void piece(const Step &step, uint64_t number, Work work) {
    const Copy &copy = *reinterpret_cast<const Copy *>(step.spec);
    const uint64_t first = number * PIECE;
    work(static_cast<char *>(step.buffers[0]) + first, first, std::min(PIECE, copy.bytes - first), copy.value);
}
void copy_piece(const Step &step, uint64_t number, Room &) {
    const char *from = static_cast<const char *>(step.buffers[1]);
    piece(step, number, [from](char *to, uint64_t first, uint64_t bytes, uint32_t) {
        std::memcpy(to, from + first, bytes);
    });
}
void fill_piece(const Step &step, uint64_t number, Room &) {
    piece(step, number, [](char *to, uint64_t, uint64_t bytes, uint32_t value) {
        for (uint64_t i = 0; i < bytes; i += sizeof value)
            std::memcpy(to + i, &value, sizeof value);
    });
}
void add_copy(VkCommandBuffer commands, Kernel kernel, const Places &places, uint64_t bytes, uint32_t value) {
    Commands *list = object<Commands>(commands);
    if (guarded([&] { list->copies.push_back({bytes, value}); }) == VK_SUCCESS)
        add(list, kernel, reinterpret_cast<const uint32_t *>(&list->copies.back()), places,
            uint32_t((bytes + PIECE - 1) / PIECE), 1, 1);
    else
        list->failed = true;
}
void VKAPI_PTR CmdCopyBuffer(VkCommandBuffer commands, VkBuffer from, VkBuffer to, uint32_t count,
                             const VkBufferCopy *regions) {
    for (const VkBufferCopy *region = regions; region < regions + count; ++region)
        add_copy(commands, copy_piece,
                 {{object<Buffer>(to)->bytes + region->dstOffset, object<Buffer>(from)->bytes + region->srcOffset}},
                 region->size, 0);
}
void VKAPI_PTR CmdFillBuffer(VkCommandBuffer commands, VkBuffer buffer, VkDeviceSize offset, VkDeviceSize size,
                             uint32_t value) {
    add_copy(commands, fill_piece, {{object<Buffer>(buffer)->bytes + offset}}, size, value);
}
VkResult VKAPI_PTR QueueSubmit(VkQueue, uint32_t count, const VkSubmitInfo *submits, VkFence) {
    for (const VkSubmitInfo *submit = submits; submit < submits + count; ++submit)
        for (uint32_t i = 0; i < submit->commandBufferCount; ++i) {
            std::vector<Step> &steps = object<Commands>(submit->pCommandBuffers[i])->steps;
            void *workers = pool();
            if (!workers || zinc_cpu_run(workers, steps.data(), steps.size()))
                return VK_ERROR_OUT_OF_HOST_MEMORY;
        }
    return VK_SUCCESS;
}

const struct {
    const char *name;
    PFN_vkVoidFunction function;
} FUNCTIONS[] = {
#define X(name) {"vk" #name, reinterpret_cast<PFN_vkVoidFunction>(&name)},
    X(EnumerateInstanceVersion) X(CreateInstance) ZA_VULKAN(X)
#undef X
};
}  // namespace
}  // namespace zinc

extern "C" void zinc_cpu_set_threads(unsigned number) {
    zinc::threads = std::min(std::max(1u, number), std::max(1u, std::thread::hardware_concurrency()));
}

// vkGetInstanceProcAddr of the processor; null for functions that the library does not call.
extern "C" PFN_vkVoidFunction VKAPI_PTR zinc_cpu_get_proc(VkInstance, const char *name) {
    if (std::strcmp(name, "zinc_cpu_set_threads") == 0)
        return reinterpret_cast<PFN_vkVoidFunction>(&zinc_cpu_set_threads);
    for (const auto &entry : zinc::FUNCTIONS)
        if (std::strcmp(entry.name, name) == 0)
            return entry.function;
    return nullptr;
}
