#include "gpu.h"

#include <stdlib.h>
#include <string.h>

static const char *result_name(VkResult result) {
    switch (result) {
    case VK_ERROR_OUT_OF_HOST_MEMORY: return "out of host memory";
    case VK_ERROR_OUT_OF_DEVICE_MEMORY: return "out of device memory";
    case VK_ERROR_INITIALIZATION_FAILED: return "initialization failed";
    case VK_ERROR_DEVICE_LOST: return "the device was lost";
    case VK_ERROR_MEMORY_MAP_FAILED: return "the memory cannot be mapped";
    case VK_ERROR_LAYER_NOT_PRESENT: return "a layer is not there";
    case VK_ERROR_EXTENSION_NOT_PRESENT: return "an extension is not there";
    case VK_ERROR_FEATURE_NOT_PRESENT: return "a feature is not there";
    case VK_ERROR_INCOMPATIBLE_DRIVER: return "no Vulkan driver; install one, for example mesa-vulkan-drivers";
    case VK_ERROR_TOO_MANY_OBJECTS: return "too many objects";
    case VK_ERROR_FRAGMENTED_POOL: return "the pool is fragmented";
    case VK_ERROR_OUT_OF_POOL_MEMORY: return "out of pool memory";
    default: return "unexpected result";
    }
}

static bool check(VkResult result, const char *what) {
    return result == VK_SUCCESS || fail("%s: %s (VkResult %d)", what, result_name(result), (int)result);
}

/* --- the device -------------------------------------------------------------------------------------- */

static bool make_instance(struct gpu *gpu) {
    uint32_t version = VK_API_VERSION_1_0;
    if (!check(vkEnumerateInstanceVersion(&version), "vkEnumerateInstanceVersion")) return false;
    if (version < VK_API_VERSION_1_1) return fail("the Vulkan loader is of version 1.0, expected 1.1: update it");
    gpu->api = version < VK_API_VERSION_1_3 ? VK_API_VERSION_1_1 : VK_API_VERSION_1_3;
    VkApplicationInfo application = {
        .sType = VK_STRUCTURE_TYPE_APPLICATION_INFO,
        .pApplicationName = "embed",
        .apiVersion = gpu->api,
    };
    VkInstanceCreateInfo create = {
        .sType = VK_STRUCTURE_TYPE_INSTANCE_CREATE_INFO,
        .pApplicationInfo = &application,
    };
    return check(vkCreateInstance(&create, NULL, &gpu->instance), "vkCreateInstance");
}

static int rank_of(VkPhysicalDeviceType type) {
    return type == VK_PHYSICAL_DEVICE_TYPE_DISCRETE_GPU ? 3 : type == VK_PHYSICAL_DEVICE_TYPE_INTEGRATED_GPU ? 2
         : type == VK_PHYSICAL_DEVICE_TYPE_CPU ? 0 : 1;
}

static bool choose_device(struct gpu *gpu, const char *name) {
    VkPhysicalDevice found[32];
    uint32_t count = 32;
    VkResult result = vkEnumeratePhysicalDevices(gpu->instance, &count, found);
    if (result != VK_INCOMPLETE && !check(result, "vkEnumeratePhysicalDevices")) return false;
    int best = -1;
    for (uint32_t i = 0; i < count; ++i) {
        VkPhysicalDeviceProperties properties;
        vkGetPhysicalDeviceProperties(found[i], &properties);
        int rank = rank_of(properties.deviceType);
        if (rank <= best || (name && !strstr(properties.deviceName, name))) continue;
        best = rank;
        gpu->physical = found[i];
        gpu->properties = properties;
    }
    if (best < 0 && name) return fail("no Vulkan device of %u has %s in its name", count, name);
    if (best < 0) return fail("no Vulkan device; install a driver, for example mesa-vulkan-drivers");
    if (gpu->properties.apiVersion < VK_API_VERSION_1_1)
        return fail("%s offers Vulkan 1.0, expected 1.1: update its driver", gpu->properties.deviceName);
    vkGetPhysicalDeviceMemoryProperties(gpu->physical, &gpu->memory);
    return true;
}

static bool has_extension(VkPhysicalDevice physical, const char *name) {
    uint32_t count = 0;
    if (vkEnumerateDeviceExtensionProperties(physical, NULL, &count, NULL) != VK_SUCCESS || !count) return false;
    VkExtensionProperties *found = calloc(count, sizeof *found);
    bool there = false;
    if (found && vkEnumerateDeviceExtensionProperties(physical, NULL, &count, found) >= VK_SUCCESS) {
        for (uint32_t i = 0; i < count; ++i) there = there || strcmp(found[i].extensionName, name) == 0;
    }
    free(found);
    return there;
}

/* Whether pipelines can ask for subgroups of 32: RDNA then runs a workgroup as one wave32. For speed only. */
static bool offers_wave32(struct gpu *gpu, VkPhysicalDeviceSubgroupSizeControlFeatures *features) {
    VkPhysicalDeviceSubgroupSizeControlProperties sizes = {
        .sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_SUBGROUP_SIZE_CONTROL_PROPERTIES,
    };
    VkPhysicalDeviceProperties2 properties = {.sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_PROPERTIES_2, .pNext = &sizes};
    VkPhysicalDeviceFeatures2 query = {.sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_FEATURES_2, .pNext = features};
    vkGetPhysicalDeviceProperties2(gpu->physical, &properties);
    vkGetPhysicalDeviceFeatures2(gpu->physical, &query);
    return features->subgroupSizeControl && sizes.minSubgroupSize <= WAVE && WAVE <= sizes.maxSubgroupSize &&
           (sizes.requiredSubgroupSizeStages & VK_SHADER_STAGE_COMPUTE_BIT);
}

static bool find_queue(struct gpu *gpu, uint32_t *family) {
    VkQueueFamilyProperties families[32];
    uint32_t count = 32;
    vkGetPhysicalDeviceQueueFamilyProperties(gpu->physical, &count, families);
    for (*family = 0; *family < count; ++*family) {
        if (families[*family].queueFlags & VK_QUEUE_COMPUTE_BIT) return true;
    }
    return fail("%s has no compute queue; choose another device", gpu->properties.deviceName);
}

static bool make_device(struct gpu *gpu, uint32_t family) {
    static const char *const control = VK_EXT_SUBGROUP_SIZE_CONTROL_EXTENSION_NAME;
    bool core = gpu->api >= VK_API_VERSION_1_3 && gpu->properties.apiVersion >= VK_API_VERSION_1_3;
    bool extension = !core && has_extension(gpu->physical, control);
    VkPhysicalDeviceSubgroupSizeControlFeatures features = {
        .sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_SUBGROUP_SIZE_CONTROL_FEATURES,
    };
    gpu->wave32 = (core || extension) && offers_wave32(gpu, &features);
    features.computeFullSubgroups = VK_FALSE; /* not relied upon */
    float priority = 1;
    VkDeviceQueueCreateInfo queue = {
        .sType = VK_STRUCTURE_TYPE_DEVICE_QUEUE_CREATE_INFO,
        .queueFamilyIndex = family,
        .queueCount = 1,
        .pQueuePriorities = &priority,
    };
    VkDeviceCreateInfo create = {
        .sType = VK_STRUCTURE_TYPE_DEVICE_CREATE_INFO,
        .pNext = gpu->wave32 ? &features : NULL,
        .queueCreateInfoCount = 1,
        .pQueueCreateInfos = &queue,
        .enabledExtensionCount = gpu->wave32 && extension,
        .ppEnabledExtensionNames = &control,
    };
    if (!check(vkCreateDevice(gpu->physical, &create, NULL, &gpu->device), "vkCreateDevice")) return false;
    vkGetDeviceQueue(gpu->device, family, 0, &gpu->queue);
    return true;
}

static bool make_commands(struct gpu *gpu, uint32_t family) {
    VkCommandPoolCreateInfo pool = {
        .sType = VK_STRUCTURE_TYPE_COMMAND_POOL_CREATE_INFO,
        .flags = VK_COMMAND_POOL_CREATE_RESET_COMMAND_BUFFER_BIT,
        .queueFamilyIndex = family,
    };
    if (!check(vkCreateCommandPool(gpu->device, &pool, NULL, &gpu->pool), "vkCreateCommandPool")) return false;
    VkCommandBufferAllocateInfo commands = {
        .sType = VK_STRUCTURE_TYPE_COMMAND_BUFFER_ALLOCATE_INFO,
        .commandPool = gpu->pool,
        .level = VK_COMMAND_BUFFER_LEVEL_PRIMARY,
        .commandBufferCount = 1,
    };
    VkFenceCreateInfo fence = {.sType = VK_STRUCTURE_TYPE_FENCE_CREATE_INFO};
    return check(vkAllocateCommandBuffers(gpu->device, &commands, &gpu->commands), "vkAllocateCommandBuffers") &&
           check(vkCreateFence(gpu->device, &fence, NULL, &gpu->fence), "vkCreateFence");
}

bool gpu_open(struct gpu *gpu, const char *name) {
    uint32_t family;
    *gpu = (struct gpu){0};
    return make_instance(gpu) && choose_device(gpu, name) && find_queue(gpu, &family) && make_device(gpu, family) &&
           make_commands(gpu, family);
}

void gpu_close(struct gpu *gpu) {
    if (gpu->device) {
        vkDeviceWaitIdle(gpu->device);
        for (int i = 0; i <= MAX_BINDINGS; ++i) {
            vkDestroyPipelineLayout(gpu->device, gpu->layouts[i], NULL);
            vkDestroyDescriptorSetLayout(gpu->device, gpu->set_layouts[i], NULL);
        }
        vkDestroyFence(gpu->device, gpu->fence, NULL);
        vkDestroyCommandPool(gpu->device, gpu->pool, NULL);
        vkDestroyDevice(gpu->device, NULL);
    }
    if (gpu->instance) vkDestroyInstance(gpu->instance, NULL);
    *gpu = (struct gpu){0};
}

/* --- buffers ----------------------------------------------------------------------------------------- */

/* A memory type among `allowed` with the flags and nothing special, of the largest heap. -1 where there is none. */
static int memory_type(const struct gpu *gpu, uint32_t allowed, VkMemoryPropertyFlags flags) {
    int best = -1;
    VkDeviceSize largest = 0;
    for (uint32_t i = 0; i < gpu->memory.memoryTypeCount; ++i) {
        const VkMemoryType *type = &gpu->memory.memoryTypes[i];
        VkDeviceSize size = gpu->memory.memoryHeaps[type->heapIndex].size;
        bool special = type->propertyFlags >= VK_MEMORY_PROPERTY_LAZILY_ALLOCATED_BIT; /* lazy, protected, ... */
        if (!(allowed >> i & 1) || special || (type->propertyFlags & flags) != flags || size <= largest) continue;
        best = (int)i;
        largest = size;
    }
    return best;
}

bool buffer_make(struct gpu *gpu, VkDeviceSize size, bool host, const char *what, struct buffer *buffer) {
    *buffer = (struct buffer){.size = size};
    if (size > gpu->properties.limits.maxStorageBufferRange)
        return fail("%s: %llu bytes are needed, %s takes at most %u in one storage buffer", what,
                    (unsigned long long)size, gpu->properties.deviceName, gpu->properties.limits.maxStorageBufferRange);
    VkBufferCreateInfo create = {
        .sType = VK_STRUCTURE_TYPE_BUFFER_CREATE_INFO,
        .size = size,
        .usage = VK_BUFFER_USAGE_STORAGE_BUFFER_BIT,
    };
    if (!check(vkCreateBuffer(gpu->device, &create, NULL, &buffer->handle), "vkCreateBuffer")) return false;
    VkMemoryRequirements needs;
    vkGetBufferMemoryRequirements(gpu->device, buffer->handle, &needs);
    VkMemoryPropertyFlags mapped = VK_MEMORY_PROPERTY_HOST_VISIBLE_BIT | VK_MEMORY_PROPERTY_HOST_COHERENT_BIT;
    int type = memory_type(gpu, needs.memoryTypeBits, host ? mapped : VK_MEMORY_PROPERTY_DEVICE_LOCAL_BIT);
    if (type < 0) return fail("%s: %s has no memory of the kind that is needed", what, gpu->properties.deviceName);
    VkMemoryAllocateInfo allocate = {
        .sType = VK_STRUCTURE_TYPE_MEMORY_ALLOCATE_INFO,
        .allocationSize = needs.size,
        .memoryTypeIndex = (uint32_t)type,
    };
    VkResult result = vkAllocateMemory(gpu->device, &allocate, NULL, &buffer->memory);
    if (result != VK_SUCCESS)
        return fail("%s: %llu bytes are needed: %s (VkResult %d); use a shorter context or free memory", what,
                    (unsigned long long)needs.size, result_name(result), (int)result);
    if (!check(vkBindBufferMemory(gpu->device, buffer->handle, buffer->memory, 0), "vkBindBufferMemory")) return false;
    if (!host) return true;
    return check(vkMapMemory(gpu->device, buffer->memory, 0, VK_WHOLE_SIZE, 0, &buffer->mapped), "vkMapMemory");
}

void buffer_free(struct gpu *gpu, struct buffer *buffer) {
    vkDestroyBuffer(gpu->device, buffer->handle, NULL);
    vkFreeMemory(gpu->device, buffer->memory, NULL);
    *buffer = (struct buffer){0};
}

/* --- pipelines --------------------------------------------------------------------------------------- */

/* The layouts of `count` storage buffers, made once. */
static bool make_layouts(struct gpu *gpu, uint32_t count) {
    if (gpu->layouts[count]) return true;
    VkDescriptorSetLayoutBinding bindings[MAX_BINDINGS];
    for (uint32_t i = 0; i < count; ++i) {
        bindings[i] = (VkDescriptorSetLayoutBinding){
            .binding = i,
            .descriptorType = VK_DESCRIPTOR_TYPE_STORAGE_BUFFER,
            .descriptorCount = 1,
            .stageFlags = VK_SHADER_STAGE_COMPUTE_BIT,
        };
    }
    VkDescriptorSetLayoutCreateInfo set = {
        .sType = VK_STRUCTURE_TYPE_DESCRIPTOR_SET_LAYOUT_CREATE_INFO,
        .bindingCount = count,
        .pBindings = bindings,
    };
    VkPipelineLayoutCreateInfo layout = {
        .sType = VK_STRUCTURE_TYPE_PIPELINE_LAYOUT_CREATE_INFO,
        .setLayoutCount = 1,
        .pSetLayouts = &gpu->set_layouts[count],
    };
    return check(vkCreateDescriptorSetLayout(gpu->device, &set, NULL, &gpu->set_layouts[count]),
                 "vkCreateDescriptorSetLayout") &&
           check(vkCreatePipelineLayout(gpu->device, &layout, NULL, &gpu->layouts[count]), "vkCreatePipelineLayout");
}

bool pipeline_make(struct gpu *gpu, const struct kernel *kernel, struct pipeline *pipeline) {
    uint32_t most = gpu->properties.limits.maxPerStageDescriptorStorageBuffers;
    if (kernel->bindings > MAX_BINDINGS || kernel->bindings > most)
        return fail("kernel %s: it has %u buffers, %s takes at most %u", kernel->name, kernel->bindings,
                    gpu->properties.deviceName, most < MAX_BINDINGS ? most : MAX_BINDINGS);
    pipeline->bindings = kernel->bindings;
    VkShaderModuleCreateInfo code = {
        .sType = VK_STRUCTURE_TYPE_SHADER_MODULE_CREATE_INFO,
        .codeSize = kernel->code_bytes,
        .pCode = kernel->code,
    };
    VkShaderModule module;
    if (!make_layouts(gpu, kernel->bindings) ||
        !check(vkCreateShaderModule(gpu->device, &code, NULL, &module), "vkCreateShaderModule"))
        return false;
    VkSpecializationMapEntry entries[MAX_SPEC];
    for (uint32_t i = 0; i < kernel->constants; ++i)
        entries[i] = (VkSpecializationMapEntry){.constantID = kernel->ids[i], .offset = 4 * i, .size = 4};
    VkSpecializationInfo constants = {
        .mapEntryCount = kernel->constants,
        .pMapEntries = entries,
        .dataSize = 4 * kernel->constants,
        .pData = kernel->values,
    };
    VkPipelineShaderStageRequiredSubgroupSizeCreateInfo wave32 = {
        .sType = VK_STRUCTURE_TYPE_PIPELINE_SHADER_STAGE_REQUIRED_SUBGROUP_SIZE_CREATE_INFO,
        .requiredSubgroupSize = WAVE,
    };
    VkComputePipelineCreateInfo create = {
        .sType = VK_STRUCTURE_TYPE_COMPUTE_PIPELINE_CREATE_INFO,
        .stage = {
            .sType = VK_STRUCTURE_TYPE_PIPELINE_SHADER_STAGE_CREATE_INFO,
            .pNext = gpu->wave32 ? &wave32 : NULL,
            .stage = VK_SHADER_STAGE_COMPUTE_BIT,
            .module = module,
            .pName = "main",
            .pSpecializationInfo = &constants,
        },
        .layout = gpu->layouts[kernel->bindings],
    };
    VkResult result = vkCreateComputePipelines(gpu->device, VK_NULL_HANDLE, 1, &create, NULL, &pipeline->handle);
    vkDestroyShaderModule(gpu->device, module, NULL);
    return check(result, kernel->name);
}

void pipeline_free(struct gpu *gpu, struct pipeline *pipeline) {
    vkDestroyPipeline(gpu->device, pipeline->handle, NULL);
    *pipeline = (struct pipeline){0};
}

bool sets_make(struct gpu *gpu, uint32_t sets, VkDescriptorPool *pool) {
    VkDescriptorPoolSize size = {VK_DESCRIPTOR_TYPE_STORAGE_BUFFER, sets * MAX_BINDINGS};
    VkDescriptorPoolCreateInfo create = {
        .sType = VK_STRUCTURE_TYPE_DESCRIPTOR_POOL_CREATE_INFO,
        .maxSets = sets,
        .poolSizeCount = 1,
        .pPoolSizes = &size,
    };
    return check(vkCreateDescriptorPool(gpu->device, &create, NULL, pool), "vkCreateDescriptorPool");
}

bool set_make(struct gpu *gpu, VkDescriptorPool pool, const struct pipeline *pipeline,
              const struct buffer *const buffers[], VkDescriptorSet *set) {
    VkDescriptorSetAllocateInfo allocate = {
        .sType = VK_STRUCTURE_TYPE_DESCRIPTOR_SET_ALLOCATE_INFO,
        .descriptorPool = pool,
        .descriptorSetCount = 1,
        .pSetLayouts = &gpu->set_layouts[pipeline->bindings],
    };
    if (!check(vkAllocateDescriptorSets(gpu->device, &allocate, set), "vkAllocateDescriptorSets")) return false;
    VkDescriptorBufferInfo infos[MAX_BINDINGS];
    for (uint32_t i = 0; i < pipeline->bindings; ++i)
        infos[i] = (VkDescriptorBufferInfo){.buffer = buffers[i]->handle, .range = buffers[i]->size};
    VkWriteDescriptorSet write = {
        .sType = VK_STRUCTURE_TYPE_WRITE_DESCRIPTOR_SET,
        .dstSet = *set,
        .descriptorCount = pipeline->bindings, /* one write fills consecutive bindings */
        .descriptorType = VK_DESCRIPTOR_TYPE_STORAGE_BUFFER,
        .pBufferInfo = infos,
    };
    vkUpdateDescriptorSets(gpu->device, 1, &write, 0, NULL);
    return true;
}

/* --- commands ---------------------------------------------------------------------------------------- */

bool commands_begin(struct gpu *gpu) {
    VkCommandBufferBeginInfo begin = {
        .sType = VK_STRUCTURE_TYPE_COMMAND_BUFFER_BEGIN_INFO,
        .flags = VK_COMMAND_BUFFER_USAGE_ONE_TIME_SUBMIT_BIT,
    };
    return check(vkBeginCommandBuffer(gpu->commands, &begin), "vkBeginCommandBuffer");
}

void commands_dispatch(struct gpu *gpu, const struct pipeline *pipeline, VkDescriptorSet set, uint32_t x, uint32_t y,
                       uint32_t z) {
    VkPipelineLayout layout = gpu->layouts[pipeline->bindings];
    vkCmdBindPipeline(gpu->commands, VK_PIPELINE_BIND_POINT_COMPUTE, pipeline->handle);
    vkCmdBindDescriptorSets(gpu->commands, VK_PIPELINE_BIND_POINT_COMPUTE, layout, 0, 1, &set, 0, NULL);
    vkCmdDispatch(gpu->commands, x, y, z);
}

void commands_barrier(struct gpu *gpu, VkPipelineStageFlags stage, VkAccessFlags access) {
    VkMemoryBarrier barrier = {
        .sType = VK_STRUCTURE_TYPE_MEMORY_BARRIER,
        .srcAccessMask = VK_ACCESS_SHADER_WRITE_BIT,
        .dstAccessMask = access,
    };
    vkCmdPipelineBarrier(gpu->commands, VK_PIPELINE_STAGE_COMPUTE_SHADER_BIT, stage, 0, 1, &barrier, 0, NULL, 0, NULL);
}

bool commands_submit(struct gpu *gpu) {
    VkSubmitInfo submit = {
        .sType = VK_STRUCTURE_TYPE_SUBMIT_INFO,
        .commandBufferCount = 1,
        .pCommandBuffers = &gpu->commands,
    };
    if (!check(vkEndCommandBuffer(gpu->commands), "vkEndCommandBuffer") ||
        !check(vkQueueSubmit(gpu->queue, 1, &submit, gpu->fence), "vkQueueSubmit"))
        return false;
    VkResult result = vkWaitForFences(gpu->device, 1, &gpu->fence, VK_TRUE, UINT64_MAX);
    if (result != VK_SUCCESS) vkDeviceWaitIdle(gpu->device); /* nothing may be freed that is still in use */
    return check(result, "vkWaitForFences") && check(vkResetFences(gpu->device, 1, &gpu->fence), "vkResetFences");
}
