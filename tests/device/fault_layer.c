/* A Vulkan layer that makes chosen calls fail, counts calls by name, and counts the objects that live.

   The tests build it (faults.py) and load it twice: the Vulkan loader as VK_LAYER_ZINC_ATTN_fault, Python through
   ctypes, which then calls the fault_ functions at the end of this file. It keeps one table of the next functions, so
   all instances and devices of a process must be of one driver, and it is for one thread at a time. */

#include <stdlib.h>
#include <string.h>

#include <vulkan/vk_layer.h>
#include <vulkan/vulkan.h>

#define EXPORT __attribute__((visibility("default")))
#define CALL static VKAPI_ATTR VkResult VKAPI_CALL
#define VOID_CALL static VKAPI_ATTR void VKAPI_CALL

/* F(function): what can be made to fail. The first five are instance-level. */
#define FUNCTIONS(F) \
    F(CreateInstance) F(EnumeratePhysicalDevices) F(EnumerateDeviceExtensionProperties) F(CreateDevice) \
    F(CreateFence) F(CreateCommandPool) F(CreatePipelineCache) F(CreateBuffer) F(AllocateMemory) F(BindBufferMemory) \
    F(MapMemory) F(FlushMappedMemoryRanges) F(CreateShaderModule) F(CreateComputePipelines) \
    F(CreateDescriptorSetLayout) F(CreatePipelineLayout) F(CreateDescriptorPool) F(AllocateDescriptorSets) \
    F(CreateQueryPool) F(AllocateCommandBuffers) F(BeginCommandBuffer) F(EndCommandBuffer) F(QueueSubmit) \
    F(WaitForFences) F(ResetFences) F(GetFenceStatus) F(QueueWaitIdle) F(DeviceWaitIdle) F(GetQueryPoolResults) \
    F(GetPipelineCacheData)

/* K(kind, function): what destroys an object of a kind, with (device, handle, allocator). */
#define KINDS(K) \
    K(Fence, DestroyFence) K(CommandPool, DestroyCommandPool) K(PipelineCache, DestroyPipelineCache) \
    K(Buffer, DestroyBuffer) K(DeviceMemory, FreeMemory) K(ShaderModule, DestroyShaderModule) \
    K(Pipeline, DestroyPipeline) K(DescriptorSetLayout, DestroyDescriptorSetLayout) \
    K(PipelineLayout, DestroyPipelineLayout) K(DescriptorPool, DestroyDescriptorPool) K(QueryPool, DestroyQueryPool)

enum function {
#define F(f) F_##f,
    FUNCTIONS(F) F_COUNT
#undef F
};
static const char *const names[] = {
#define F(f) "vk" #f,
    FUNCTIONS(F)
#undef F
};
enum kind {
#define K(k, f) K_##k,
    KINDS(K) K_CommandBuffer, K_Device, K_Instance, K_COUNT
#undef K
};
static const char *const kinds[] = {
#define K(k, f) #k,
    KINDS(K) "CommandBuffer", "Device", "Instance",
#undef K
};

static struct {
#define F(f) PFN_vk##f f;
    FUNCTIONS(F)
#undef F
#define K(k, f) PFN_vk##f f;
    KINDS(K)
#undef K
    PFN_vkFreeCommandBuffers FreeCommandBuffers;
    PFN_vkDestroyDevice DestroyDevice;
    PFN_vkDestroyInstance DestroyInstance;
    PFN_vkGetInstanceProcAddr GetInstanceProcAddr;
    PFN_vkGetDeviceProcAddr GetDeviceProcAddr;
} next;

static long calls[F_COUNT];
static long live[K_COUNT];
static struct {
    int function, carry_out, persistent, fired;
    long countdown;
    VkResult result;
} faults[16];
static int armed, fired;

enum mode { PASS, REFUSE, CARRY_OUT };

static enum mode enter(int function, VkResult *result) {
    calls[function]++;
    for (int i = 0; i < armed; i++) {
        if (function != faults[i].function || (faults[i].fired && !faults[i].persistent)) continue;
        if (!faults[i].fired && --faults[i].countdown > 0) continue;
        faults[i].fired = 1;
        fired++;
        *result = faults[i].result;
        return faults[i].carry_out ? CARRY_OUT : REFUSE;
    }
    return PASS;
}

/* Commands that were submitted and not waited for; misused: how often such a command buffer was begun again. */
static VkCommandBuffer pending[64];
static int pendings;
static long misused;

static VkCommandBuffer begun(VkCommandBuffer c) {
    for (int i = 0; i < pendings; i++) misused += pending[i] == c;
    return c;
}
static VkQueue submitted(VkQueue q, uint32_t n, const VkSubmitInfo *s) {
    for (uint32_t i = 0; i < n && pendings < 64; i++) pending[pendings++] = s[i].pCommandBuffers[0];
    return q;
}
#define WAITED(handle) (pendings = 0, handle)

/* A call that makes nothing: refused, or carried out and said to have failed. */
#define WRAP(f, parameters, arguments) \
    CALL my_##f parameters { \
        VkResult said; \
        enum mode mode = enter(F_##f, &said); \
        if (mode == REFUSE) return said; \
        VkResult result = next.f arguments; \
        return mode == CARRY_OUT ? said : result; \
    }
/* A call that makes `count` objects, which a failed one never does. */
#define MAKES(f, kind, count, parameters, arguments) \
    CALL my_##f parameters { \
        VkResult result; \
        if (enter(F_##f, &result) != PASS) return result; \
        result = next.f arguments; \
        if (result == VK_SUCCESS) live[K_##kind] += count; \
        return result; \
    }
#define CREATES(f, kind, info) \
    MAKES(f, kind, 1, (VkDevice d, const info *i, const VkAllocationCallbacks *a, Vk##kind *made), (d, i, a, made))

WRAP(EnumeratePhysicalDevices, (VkInstance i, uint32_t *n, VkPhysicalDevice *made), (i, n, made))
WRAP(EnumerateDeviceExtensionProperties,
     (VkPhysicalDevice p, const char *layer, uint32_t *n, VkExtensionProperties *made), (p, layer, n, made))
CREATES(CreateFence, Fence, VkFenceCreateInfo)
CREATES(CreateCommandPool, CommandPool, VkCommandPoolCreateInfo)
CREATES(CreatePipelineCache, PipelineCache, VkPipelineCacheCreateInfo)
CREATES(CreateBuffer, Buffer, VkBufferCreateInfo)
CREATES(AllocateMemory, DeviceMemory, VkMemoryAllocateInfo)
CREATES(CreateShaderModule, ShaderModule, VkShaderModuleCreateInfo)
CREATES(CreateDescriptorSetLayout, DescriptorSetLayout, VkDescriptorSetLayoutCreateInfo)
CREATES(CreatePipelineLayout, PipelineLayout, VkPipelineLayoutCreateInfo)
CREATES(CreateDescriptorPool, DescriptorPool, VkDescriptorPoolCreateInfo)
CREATES(CreateQueryPool, QueryPool, VkQueryPoolCreateInfo)
MAKES(CreateComputePipelines, Pipeline, n,
      (VkDevice d, VkPipelineCache c, uint32_t n, const VkComputePipelineCreateInfo *i, const VkAllocationCallbacks *a,
       VkPipeline *made),
      (d, c, n, i, a, made))
MAKES(AllocateCommandBuffers, CommandBuffer, i->commandBufferCount,
      (VkDevice d, const VkCommandBufferAllocateInfo *i, VkCommandBuffer *made), (d, i, made))
WRAP(AllocateDescriptorSets, (VkDevice d, const VkDescriptorSetAllocateInfo *i, VkDescriptorSet *made), (d, i, made))
WRAP(BindBufferMemory, (VkDevice d, VkBuffer b, VkDeviceMemory m, VkDeviceSize o), (d, b, m, o))
WRAP(MapMemory, (VkDevice d, VkDeviceMemory m, VkDeviceSize o, VkDeviceSize n, VkMemoryMapFlags f, void **p),
     (d, m, o, n, f, p))
WRAP(FlushMappedMemoryRanges, (VkDevice d, uint32_t n, const VkMappedMemoryRange *r), (d, n, r))
WRAP(BeginCommandBuffer, (VkCommandBuffer c, const VkCommandBufferBeginInfo *i), (begun(c), i))
WRAP(EndCommandBuffer, (VkCommandBuffer c), (c))
WRAP(QueueSubmit, (VkQueue q, uint32_t n, const VkSubmitInfo *s, VkFence f), (submitted(q, n, s), n, s, f))
WRAP(WaitForFences, (VkDevice d, uint32_t n, const VkFence *f, VkBool32 all, uint64_t t), (WAITED(d), n, f, all, t))
WRAP(ResetFences, (VkDevice d, uint32_t n, const VkFence *f), (d, n, f))
WRAP(GetFenceStatus, (VkDevice d, VkFence f), (d, f))
WRAP(QueueWaitIdle, (VkQueue q), (WAITED(q)))
WRAP(DeviceWaitIdle, (VkDevice d), (WAITED(d)))
WRAP(GetQueryPoolResults,
     (VkDevice d, VkQueryPool p, uint32_t at, uint32_t n, size_t size, void *data, VkDeviceSize stride,
      VkQueryResultFlags f),
     (d, p, at, n, size, data, stride, f))
WRAP(GetPipelineCacheData, (VkDevice d, VkPipelineCache c, size_t *n, void *data), (d, c, n, data))

#define K(kind, f) \
    VOID_CALL my_##f(VkDevice d, Vk##kind handle, const VkAllocationCallbacks *a) { \
        if (handle) live[K_##kind]--; \
        next.f(d, handle, a); \
    }
KINDS(K)
#undef K
VOID_CALL my_FreeCommandBuffers(VkDevice d, VkCommandPool p, uint32_t n, const VkCommandBuffer *c) {
    for (uint32_t i = 0; i < n; i++)
        if (c[i]) live[K_CommandBuffer]--;
    next.FreeCommandBuffers(d, p, n, c);
}
VOID_CALL my_DestroyDevice(VkDevice d, const VkAllocationCallbacks *a) {
    if (d) live[K_Device]--;
    next.DestroyDevice(d, a);
}
VOID_CALL my_DestroyInstance(VkInstance i, const VkAllocationCallbacks *a) {
    if (i) live[K_Instance]--;
    next.DestroyInstance(i, a);
}

CALL my_CreateInstance(const VkInstanceCreateInfo *info, const VkAllocationCallbacks *a, VkInstance *made) {
    VkResult result;
    if (enter(F_CreateInstance, &result) != PASS) return result;
    VkLayerInstanceCreateInfo *link = (void *)info->pNext;
    while (link->sType != VK_STRUCTURE_TYPE_LOADER_INSTANCE_CREATE_INFO || link->function != VK_LAYER_LINK_INFO)
        link = (void *)link->pNext;
    next.GetInstanceProcAddr = link->u.pLayerInfo->pfnNextGetInstanceProcAddr;
    link->u.pLayerInfo = link->u.pLayerInfo->pNext;
    PFN_vkCreateInstance create = (void *)next.GetInstanceProcAddr(NULL, "vkCreateInstance");
    result = create(info, a, made);
    if (result != VK_SUCCESS) return result;
    live[K_Instance]++;
    next.DestroyInstance = (void *)next.GetInstanceProcAddr(*made, "vkDestroyInstance");
    next.EnumeratePhysicalDevices = (void *)next.GetInstanceProcAddr(*made, "vkEnumeratePhysicalDevices");
    next.EnumerateDeviceExtensionProperties =
        (void *)next.GetInstanceProcAddr(*made, "vkEnumerateDeviceExtensionProperties");
    return result;
}

CALL my_CreateDevice(VkPhysicalDevice p, const VkDeviceCreateInfo *info, const VkAllocationCallbacks *a,
                     VkDevice *made) {
    VkResult result;
    if (enter(F_CreateDevice, &result) != PASS) return result;
    VkLayerDeviceCreateInfo *link = (void *)info->pNext;
    while (link->sType != VK_STRUCTURE_TYPE_LOADER_DEVICE_CREATE_INFO || link->function != VK_LAYER_LINK_INFO)
        link = (void *)link->pNext;
    PFN_vkGetInstanceProcAddr get = link->u.pLayerInfo->pfnNextGetInstanceProcAddr;
    next.GetDeviceProcAddr = link->u.pLayerInfo->pfnNextGetDeviceProcAddr;
    link->u.pLayerInfo = link->u.pLayerInfo->pNext;
    PFN_vkCreateDevice create = (void *)get(NULL, "vkCreateDevice");
    result = create(p, info, a, made);
    if (result != VK_SUCCESS) return result;
    live[K_Device]++;
#define F(f) \
    if (F_##f >= F_CreateFence) next.f = (void *)next.GetDeviceProcAddr(*made, "vk" #f);
    FUNCTIONS(F)
#undef F
#define K(kind, f) next.f = (void *)next.GetDeviceProcAddr(*made, "vk" #f);
    KINDS(K)
#undef K
    next.FreeCommandBuffers = (void *)next.GetDeviceProcAddr(*made, "vkFreeCommandBuffers");
    next.DestroyDevice = (void *)next.GetDeviceProcAddr(*made, "vkDestroyDevice");
    return result;
}

static VKAPI_ATTR PFN_vkVoidFunction VKAPI_CALL my_GetDeviceProcAddr(VkDevice d, const char *name);

static PFN_vkVoidFunction mine(const char *name) {
#define F(f) \
    if (!strcmp(name, "vk" #f)) return (PFN_vkVoidFunction)my_##f;
    FUNCTIONS(F)
    F(FreeCommandBuffers) F(DestroyDevice) F(DestroyInstance) F(GetDeviceProcAddr)
#undef F
#define K(kind, f) \
    if (!strcmp(name, "vk" #f)) return (PFN_vkVoidFunction)my_##f;
    KINDS(K)
#undef K
    return NULL;
}

static VKAPI_ATTR PFN_vkVoidFunction VKAPI_CALL my_GetDeviceProcAddr(VkDevice d, const char *name) {
    PFN_vkVoidFunction found = mine(name);
    return found ? found : next.GetDeviceProcAddr(d, name);
}

static VKAPI_ATTR PFN_vkVoidFunction VKAPI_CALL my_GetInstanceProcAddr(VkInstance i, const char *name) {
    PFN_vkVoidFunction found = mine(name);
    if (!strcmp(name, "vkGetInstanceProcAddr")) return (PFN_vkVoidFunction)my_GetInstanceProcAddr;
    return found || !i ? found : next.GetInstanceProcAddr(i, name);
}

EXPORT VKAPI_ATTR VkResult VKAPI_CALL vkNegotiateLoaderLayerInterfaceVersion(VkNegotiateLayerInterface *version) {
    version->loaderLayerInterfaceVersion = 2;
    version->pfnGetInstanceProcAddr = my_GetInstanceProcAddr;
    version->pfnGetDeviceProcAddr = my_GetDeviceProcAddr;
    version->pfnGetPhysicalDeviceProcAddr = NULL;
    return VK_SUCCESS;
}

/* --- what the tests call -------------------------------------------------------------------------------------- */

static int find(const char *const *table, int count, const char *name) {
    for (int i = 0; i < count; i++)
        if (!strcmp(table[i], name)) return i;
    abort(); /* a test names what is not there */
}

/* From now on the n-th call (from 1) of a function returns `result`; and all later ones if persistent. Up to 16. */
EXPORT void fault_arm(const char *function, long n, int result, int carry_out, int persistent) {
    int i = armed++;
    faults[i].function = find(names, F_COUNT, function);
    faults[i].countdown = n;
    faults[i].result = result;
    faults[i].carry_out = carry_out;
    faults[i].persistent = persistent;
    faults[i].fired = 0;
}

EXPORT void fault_disarm(void) { armed = fired = 0; }
/* How many calls were hit since fault_disarm. */
EXPORT int fault_fired(void) { return fired; }
EXPORT long fault_misused(void) { return misused; }
EXPORT long fault_calls(const char *function) { return calls[find(names, F_COUNT, function)]; }
/* Created minus destroyed objects of a kind, such as "Fence". */
EXPORT long fault_live(const char *kind) { return live[find(kinds, K_COUNT, kind)]; }
/* The names of all functions and kinds; NULL behind the last. */
EXPORT const char *fault_function(int i) { return i < F_COUNT ? names[i] : NULL; }
EXPORT const char *fault_kind(int i) { return i < K_COUNT ? kinds[i] : NULL; }
