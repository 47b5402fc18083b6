#include "gpu.h"

#include <stdlib.h>
#include <string.h>

#include "error.h"

const char *za_result_name(VkResult result) {
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

bool za_check(VkResult result, const char *what) {
    return result == VK_SUCCESS || za_fail("%s: %s (VkResult %d)", what, za_result_name(result), (int)result);
}

/* --- the device -------------------------------------------------------------------------------------- */

static bool make_instance(struct gpu *gpu) {
    uint32_t version = VK_API_VERSION_1_0;
    if (!za_check(vkEnumerateInstanceVersion(&version), "vkEnumerateInstanceVersion")) return false;
    if (version < VK_API_VERSION_1_1) return za_fail("the Vulkan loader is of version 1.0, expected 1.1: update it");
    gpu->api = version < VK_API_VERSION_1_3 ? VK_API_VERSION_1_1 : VK_API_VERSION_1_3;
    VkApplicationInfo application = {
        .sType = VK_STRUCTURE_TYPE_APPLICATION_INFO,
        .pApplicationName = "zinc_attn",
        .apiVersion = gpu->api,
    };
    VkInstanceCreateInfo create = {
        .sType = VK_STRUCTURE_TYPE_INSTANCE_CREATE_INFO,
        .pApplicationInfo = &application,
    };
    return za_check(vkCreateInstance(&create, NULL, &gpu->instance), "vkCreateInstance");
}

static int rank_of(VkPhysicalDeviceType type) {
    return type == VK_PHYSICAL_DEVICE_TYPE_DISCRETE_GPU ? 3 : type == VK_PHYSICAL_DEVICE_TYPE_INTEGRATED_GPU ? 2
         : type == VK_PHYSICAL_DEVICE_TYPE_CPU ? 0 : 1;
}

static bool choose_device(struct gpu *gpu, const char *name) {
    VkPhysicalDevice found[32];
    uint32_t count = 32;
    VkResult result = vkEnumeratePhysicalDevices(gpu->instance, &count, found);
    if (result != VK_INCOMPLETE && !za_check(result, "vkEnumeratePhysicalDevices")) return false;
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
    if (best < 0 && name) return za_fail("no Vulkan device of %u has %s in its name", count, name);
    if (best < 0) return za_fail("no Vulkan device; install a driver, for example mesa-vulkan-drivers");
    if (gpu->properties.apiVersion < VK_API_VERSION_1_1)
        return za_fail("%s offers Vulkan 1.0, expected 1.1: update its driver", gpu->properties.deviceName);
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
    return za_fail("%s has no compute queue; choose another device", gpu->properties.deviceName);
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
    if (!za_check(vkCreateDevice(gpu->physical, &create, NULL, &gpu->device), "vkCreateDevice")) return false;
    vkGetDeviceQueue(gpu->device, family, 0, &gpu->queue);
    return true;
}

static bool make_commands(struct gpu *gpu, uint32_t family) {
    VkCommandPoolCreateInfo pool = {
        .sType = VK_STRUCTURE_TYPE_COMMAND_POOL_CREATE_INFO,
        .flags = VK_COMMAND_POOL_CREATE_RESET_COMMAND_BUFFER_BIT,
        .queueFamilyIndex = family,
    };
    if (!za_check(vkCreateCommandPool(gpu->device, &pool, NULL, &gpu->pool), "vkCreateCommandPool")) return false;
    VkCommandBufferAllocateInfo commands = {
        .sType = VK_STRUCTURE_TYPE_COMMAND_BUFFER_ALLOCATE_INFO,
        .commandPool = gpu->pool,
        .level = VK_COMMAND_BUFFER_LEVEL_PRIMARY,
        .commandBufferCount = 1,
    };
    VkFenceCreateInfo fence = {.sType = VK_STRUCTURE_TYPE_FENCE_CREATE_INFO};
    VkDescriptorPoolSize size = {VK_DESCRIPTOR_TYPE_STORAGE_BUFFER, MAX_SETS * MAX_BINDINGS};
    VkDescriptorPoolCreateInfo sets = {
        .sType = VK_STRUCTURE_TYPE_DESCRIPTOR_POOL_CREATE_INFO,
        .maxSets = MAX_SETS,
        .poolSizeCount = 1,
        .pPoolSizes = &size,
    };
    return za_check(vkAllocateCommandBuffers(gpu->device, &commands, &gpu->commands), "vkAllocateCommandBuffers") &&
           za_check(vkCreateFence(gpu->device, &fence, NULL, &gpu->fence), "vkCreateFence") &&
           za_check(vkCreateDescriptorPool(gpu->device, &sets, NULL, &gpu->sets), "vkCreateDescriptorPool");
}

bool za_gpu_open(struct gpu *gpu, const char *name) {
    uint32_t family;
    *gpu = (struct gpu){0};
    return make_instance(gpu) && choose_device(gpu, name) && find_queue(gpu, &family) && make_device(gpu, family) &&
           make_commands(gpu, family);
}

void za_gpu_close(struct gpu *gpu) {
    if (gpu->device) {
        vkDeviceWaitIdle(gpu->device);
        for (int i = 0; i <= MAX_BINDINGS; ++i) {
            vkDestroyPipelineLayout(gpu->device, gpu->layouts[i], NULL);
            vkDestroyDescriptorSetLayout(gpu->device, gpu->set_layouts[i], NULL);
        }
        vkDestroyDescriptorPool(gpu->device, gpu->sets, NULL);
        vkDestroyFence(gpu->device, gpu->fence, NULL);
        vkDestroyCommandPool(gpu->device, gpu->pool, NULL);
        vkDestroyDevice(gpu->device, NULL);
    }
    if (gpu->instance) vkDestroyInstance(gpu->instance, NULL);
    *gpu = (struct gpu){0};
}

/* --- commands ---------------------------------------------------------------------------------------- */

bool za_commands_begin(struct gpu *gpu) {
    VkCommandBufferBeginInfo begin = {
        .sType = VK_STRUCTURE_TYPE_COMMAND_BUFFER_BEGIN_INFO,
        .flags = VK_COMMAND_BUFFER_USAGE_ONE_TIME_SUBMIT_BIT,
    };
    if (gpu->lost) return za_fail("%s: an earlier submission did not end; open it again", gpu->properties.deviceName);
    return za_check(vkResetDescriptorPool(gpu->device, gpu->sets, 0), "vkResetDescriptorPool") &&
           za_check(vkBeginCommandBuffer(gpu->commands, &begin), "vkBeginCommandBuffer");
}

/* A descriptor set that binds buffers 0, 1, ... of a pipeline, until the next submission begins. */
static bool bind_buffers(struct gpu *gpu, const struct pipeline *pipeline, const struct buffer *const buffers[],
                         VkDescriptorSet *set) {
    VkDescriptorSetAllocateInfo allocate = {
        .sType = VK_STRUCTURE_TYPE_DESCRIPTOR_SET_ALLOCATE_INFO,
        .descriptorPool = gpu->sets,
        .descriptorSetCount = 1,
        .pSetLayouts = &gpu->set_layouts[pipeline->bindings],
    };
    if (!za_check(vkAllocateDescriptorSets(gpu->device, &allocate, set), "vkAllocateDescriptorSets")) return false;
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

bool za_commands_dispatch(struct gpu *gpu, const struct pipeline *pipeline, const struct buffer *const buffers[],
                          uint32_t x, uint32_t y, uint32_t z) {
    VkPipelineLayout layout = gpu->layouts[pipeline->bindings];
    VkDescriptorSet set;
    if (!bind_buffers(gpu, pipeline, buffers, &set)) return false;
    vkCmdBindPipeline(gpu->commands, VK_PIPELINE_BIND_POINT_COMPUTE, pipeline->handle);
    vkCmdBindDescriptorSets(gpu->commands, VK_PIPELINE_BIND_POINT_COMPUTE, layout, 0, 1, &set, 0, NULL);
    vkCmdDispatch(gpu->commands, x, y, z);
    return true;
}

void za_commands_barrier(struct gpu *gpu, VkPipelineStageFlags stages, VkAccessFlags access) {
    VkMemoryBarrier barrier = {
        .sType = VK_STRUCTURE_TYPE_MEMORY_BARRIER,
        .srcAccessMask = VK_ACCESS_SHADER_WRITE_BIT,
        .dstAccessMask = access,
    };
    vkCmdPipelineBarrier(gpu->commands, VK_PIPELINE_STAGE_COMPUTE_SHADER_BIT, stages, 0, 1, &barrier, 0, NULL, 0, NULL);
}

bool za_commands_submit(struct gpu *gpu) {
    VkSubmitInfo submit = {
        .sType = VK_STRUCTURE_TYPE_SUBMIT_INFO,
        .commandBufferCount = 1,
        .pCommandBuffers = &gpu->commands,
    };
    /* For the host, and for all later submissions: a barrier's second scope does not end with its submission. */
    za_commands_barrier(gpu, VK_PIPELINE_STAGE_HOST_BIT | VK_PIPELINE_STAGE_COMPUTE_SHADER_BIT,
                        VK_ACCESS_HOST_READ_BIT | VK_ACCESS_SHADER_READ_BIT | VK_ACCESS_SHADER_WRITE_BIT);
    if (!za_check(vkEndCommandBuffer(gpu->commands), "vkEndCommandBuffer") ||
        !za_check(vkQueueSubmit(gpu->queue, 1, &submit, gpu->fence), "vkQueueSubmit"))
        return false;
    VkResult result = vkWaitForFences(gpu->device, 1, &gpu->fence, VK_TRUE, UINT64_MAX);
    if (result != VK_SUCCESS) vkDeviceWaitIdle(gpu->device); /* nothing may be freed that is still in use */
    gpu->lost = !za_check(result, "vkWaitForFences") ||
                !za_check(vkResetFences(gpu->device, 1, &gpu->fence), "vkResetFences");
    return !gpu->lost;
}
