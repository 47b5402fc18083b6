/* Linked before libvulkan (ld --wrap, of the names that c_host.py has) to test the C library where no driver would.

   EMBED_FAIL=NAME:COUNT:RESULT makes the COUNT-th call of a function (or of those that begin with NAME*) give RESULT,
   without calling it; a COUNT with a + behind it, all calls from that one on. EMBED_WAVE32=32 makes the device offer
   subgroups of 32 and 64, EMBED_WAVE32=16 one of Intel's that offers 16, too, and stdout says what is then asked for; the
   driver is asked for what it has. EMBED_SHARED=BYTES is
   the device's maxComputeSharedMemorySize. embed_blocks: blocks of memory that the library has and did not free. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <vulkan/vulkan.h>

static VkResult refused(const char *name) {
    static int calls; /* since EMBED_FAIL was another text */
    static char last[128];
    const char *wish = getenv("EMBED_FAIL");
    if (strncmp(wish ? wish : "", last, sizeof last - 1) != 0) {
        calls = 0;
        snprintf(last, sizeof last, "%s", wish ? wish : "");
    }
    size_t length = wish ? strcspn(wish, "*:") : 0;
    char *end;
    if (!wish || strncmp(wish, name, length) != 0 || (wish[length] == ':' && name[length])) return VK_SUCCESS;
    long count = strtol(strchr(wish, ':') + 1, &end, 10);
    int on = *end == '+', result = atoi(strchr(end, ':') + 1);
    ++calls;
    return calls == count || (on && calls > count) ? (VkResult)result : VK_SUCCESS;
}

#define WRAP(name, parameters, arguments)               \
    static VkResult wrap_##name parameters {            \
        VkResult result = refused(#name);               \
        return result ? result : name arguments;        \
    }

typedef const VkAllocationCallbacks *Allocator;
#define CREATES(kind) \
    WRAP(vkCreate##kind, (VkDevice d, const Vk##kind##CreateInfo *i, Allocator a, Vk##kind *o), (d, i, a, o))

CREATES(CommandPool) CREATES(Fence) CREATES(Buffer) CREATES(ShaderModule) CREATES(DescriptorSetLayout)
CREATES(PipelineLayout) CREATES(DescriptorPool)
WRAP(vkEnumerateInstanceVersion, (uint32_t *v), (v))
WRAP(vkCreateInstance, (const VkInstanceCreateInfo *i, Allocator a, VkInstance *o), (i, a, o))
WRAP(vkEnumeratePhysicalDevices, (VkInstance i, uint32_t *n, VkPhysicalDevice *o), (i, n, o))
WRAP(vkAllocateCommandBuffers, (VkDevice d, const VkCommandBufferAllocateInfo *i, VkCommandBuffer *o), (d, i, o))
WRAP(vkAllocateMemory, (VkDevice d, const VkMemoryAllocateInfo *i, Allocator a, VkDeviceMemory *o), (d, i, a, o))
WRAP(vkBindBufferMemory, (VkDevice d, VkBuffer b, VkDeviceMemory m, VkDeviceSize s), (d, b, m, s))
WRAP(vkMapMemory, (VkDevice d, VkDeviceMemory m, VkDeviceSize s, VkDeviceSize n, VkMemoryMapFlags f, void **o),
     (d, m, s, n, f, o))
WRAP(vkResetDescriptorPool, (VkDevice d, VkDescriptorPool p, VkDescriptorPoolResetFlags f), (d, p, f))
WRAP(vkAllocateDescriptorSets, (VkDevice d, const VkDescriptorSetAllocateInfo *i, VkDescriptorSet *o), (d, i, o))
WRAP(vkResetCommandBuffer, (VkCommandBuffer c, VkCommandBufferResetFlags f), (c, f))
WRAP(vkBeginCommandBuffer, (VkCommandBuffer c, const VkCommandBufferBeginInfo *i), (c, i))
WRAP(vkEndCommandBuffer, (VkCommandBuffer c), (c))
WRAP(vkQueueSubmit, (VkQueue q, uint32_t n, const VkSubmitInfo *s, VkFence f), (q, n, s, f))
WRAP(vkQueueWaitIdle, (VkQueue q), (q))
WRAP(vkWaitForFences, (VkDevice d, uint32_t n, const VkFence *f, VkBool32 all, uint64_t t), (d, n, f, all, t))
WRAP(vkResetFences, (VkDevice d, uint32_t n, const VkFence *f), (d, n, f))

/* --- subgroups of 32 --------------------------------------------------------------------------------- */

/* Invocations of the smallest subgroup, or 0. */
static uint32_t pretends(void) { return getenv("EMBED_WAVE32") ? (uint32_t)atoi(getenv("EMBED_WAVE32")) : 0; }

/* The struct of a type in a chain, or NULL. */
static void *in_chain(const void *chain, VkStructureType type) {
    for (const VkBaseInStructure *at = chain; at; at = at->pNext)
        if (at->sType == type) return (void *)at;
    return NULL;
}

static void wrap_vkGetPhysicalDeviceProperties2(VkPhysicalDevice p, VkPhysicalDeviceProperties2 *o) {
    vkGetPhysicalDeviceProperties2(p, o);
    VkPhysicalDeviceSubgroupSizeControlProperties *sizes =
        in_chain(o->pNext, VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_SUBGROUP_SIZE_CONTROL_PROPERTIES);
    if (!pretends() || !sizes) return;
    sizes->minSubgroupSize = pretends();
    sizes->maxSubgroupSize = 64;
    sizes->requiredSubgroupSizeStages = VK_SHADER_STAGE_COMPUTE_BIT;
}

static void wrap_vkGetPhysicalDeviceFeatures2(VkPhysicalDevice p, VkPhysicalDeviceFeatures2 *o) {
    vkGetPhysicalDeviceFeatures2(p, o);
    VkPhysicalDeviceSubgroupSizeControlFeatures *features =
        in_chain(o->pNext, VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_SUBGROUP_SIZE_CONTROL_FEATURES);
    if (pretends() && features) features->subgroupSizeControl = VK_TRUE;
}

static VkResult wrap_vkCreateDevice(VkPhysicalDevice p, const VkDeviceCreateInfo *i, Allocator a, VkDevice *o) {
    const VkPhysicalDeviceSubgroupSizeControlFeatures *features =
        in_chain(i->pNext, VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_SUBGROUP_SIZE_CONTROL_FEATURES);
    VkResult result = refused("vkCreateDevice");
    VkDeviceCreateInfo plain = *i;
    if (result) return result;
    if (!pretends()) return vkCreateDevice(p, i, a, o);
    printf("device: subgroupSizeControl %u, computeFullSubgroups %u\n", features ? features->subgroupSizeControl : 9,
           features ? features->computeFullSubgroups : 9);
    plain.pNext = NULL;
    return vkCreateDevice(p, &plain, a, o);
}

static VkResult wrap_vkCreateComputePipelines(VkDevice d, VkPipelineCache c, uint32_t n,
                                              const VkComputePipelineCreateInfo *i, Allocator a, VkPipeline *o) {
    const VkPipelineShaderStageRequiredSubgroupSizeCreateInfo *required = i->stage.pNext;
    VkResult result = refused("vkCreateComputePipelines");
    VkComputePipelineCreateInfo plain = *i;
    if (result) return result;
    if (!pretends()) return vkCreateComputePipelines(d, c, n, i, a, o);
    printf("pipeline: requiredSubgroupSize %u, flags %u\n", required ? required->requiredSubgroupSize : 0,
           (unsigned)i->stage.flags);
    plain.stage.pNext = NULL;
    return vkCreateComputePipelines(d, c, n, &plain, a, o);
}

static void wrap_vkGetPhysicalDeviceProperties(VkPhysicalDevice p, VkPhysicalDeviceProperties *o) {
    const char *bytes = getenv("EMBED_SHARED");
    vkGetPhysicalDeviceProperties(p, o);
    if (bytes) o->limits.maxComputeSharedMemorySize = (uint32_t)atoi(bytes);
    if (pretends() == 16) o->vendorID = 0x8086, o->deviceType = VK_PHYSICAL_DEVICE_TYPE_INTEGRATED_GPU;
}

/* --- memory ------------------------------------------------------------------------------------------ */

long embed_blocks;
void *__real_calloc(size_t count, size_t size), *__real_realloc(void *block, size_t size);
void *__wrap_calloc(size_t count, size_t size), *__wrap_realloc(void *block, size_t size);
void __real_free(void *block), __wrap_free(void *block);

void *__wrap_calloc(size_t count, size_t size) {
    void *made = __real_calloc(count, size);
    embed_blocks += made != NULL;
    return made;
}
void *__wrap_realloc(void *block, size_t size) {
    void *made = __real_realloc(block, size);
    embed_blocks += !block && made;
    return made;
}
void __wrap_free(void *block) {
    embed_blocks -= block != NULL;
    __real_free(block);
}

/* --- the functions that the library gets ------------------------------------------------------------- */

#define EACH(X)                                                                                                        \
    X(vkCreateCommandPool) X(vkCreateFence) X(vkCreateBuffer) X(vkCreateShaderModule) X(vkCreateDescriptorSetLayout)   \
    X(vkCreatePipelineLayout) X(vkCreateDescriptorPool) X(vkEnumerateInstanceVersion) X(vkCreateInstance)              \
    X(vkEnumeratePhysicalDevices) X(vkAllocateCommandBuffers) X(vkAllocateMemory) X(vkBindBufferMemory) X(vkMapMemory) \
    X(vkResetDescriptorPool) X(vkAllocateDescriptorSets) X(vkResetCommandBuffer) X(vkBeginCommandBuffer)               \
    X(vkEndCommandBuffer) X(vkQueueSubmit) X(vkQueueWaitIdle) X(vkWaitForFences) X(vkResetFences)                      \
    X(vkGetPhysicalDeviceProperties) X(vkGetPhysicalDeviceProperties2) X(vkGetPhysicalDeviceFeatures2)                 \
    X(vkCreateDevice) X(vkCreateComputePipelines)

PFN_vkVoidFunction __wrap_vkGetInstanceProcAddr(VkInstance instance, const char *name);
PFN_vkVoidFunction __real_vkGetInstanceProcAddr(VkInstance instance, const char *name);
PFN_vkVoidFunction __wrap_vkGetInstanceProcAddr(VkInstance instance, const char *name) {
#define X(own) if (strcmp(name, #own) == 0) return (PFN_vkVoidFunction)(void (*)(void))wrap_##own;
    EACH(X)
#undef X
    return __real_vkGetInstanceProcAddr(instance, name);
}
