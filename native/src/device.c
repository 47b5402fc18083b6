#include "device.h"

#include <stdlib.h>
#include <string.h>

#include "error.h"
#include "processor.h"

/* --- functions and features -------------------------------------------------------------------------- */

static bool load(struct za_functions *vk, PFN_vkGetInstanceProcAddr get_proc, VkInstance instance) {
    const char *missing = NULL;
#define X(name)                                                                  \
    vk->name = (PFN_vk##name)(void (*)(void))get_proc(instance, "vk" #name);     \
    if (!vk->name) missing = "vk" #name;
    ZA_VULKAN(X)
#undef X
    if (missing) *vk = (struct za_functions){0}; /* za_device_close then calls none */
    return !missing || za_fail_as(ZA_UNSUPPORTED, "get_proc: it has no %s, expected the functions of Vulkan 1.1; make "
                                  "the instance for 1.1", missing);
}

/* Whether pipelines could ask for subgroups of 32: RDNA then runs a workgroup as one wave32. For speed only. */
static bool offers_wave32(const struct za_functions *vk, VkPhysicalDevice physical) {
    VkPhysicalDeviceSubgroupSizeControlProperties sizes = {
        .sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_SUBGROUP_SIZE_CONTROL_PROPERTIES,
    };
    VkPhysicalDeviceSubgroupSizeControlFeatures features = {
        .sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_SUBGROUP_SIZE_CONTROL_FEATURES,
    };
    VkPhysicalDeviceProperties2 properties = {.sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_PROPERTIES_2, .pNext = &sizes};
    VkPhysicalDeviceFeatures2 query = {.sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_FEATURES_2, .pNext = &features};
    vk->GetPhysicalDeviceProperties2(physical, &properties);
    vk->GetPhysicalDeviceFeatures2(physical, &query);
    return features.subgroupSizeControl && sizes.minSubgroupSize <= WAVE && WAVE <= sizes.maxSubgroupSize &&
           (sizes.requiredSubgroupSizeStages & VK_SHADER_STAGE_COMPUTE_BIT);
}

static VkBool32 *size_control_in(VkBaseOutStructure *chain) {
    return za_feature_in(chain, VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_SUBGROUP_SIZE_CONTROL_FEATURES,
                         offsetof(VkPhysicalDeviceSubgroupSizeControlFeatures, subgroupSizeControl),
                         VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_VULKAN_1_3_FEATURES,
                         offsetof(VkPhysicalDeviceVulkan13Features, subgroupSizeControl));
}

bool za_wanted_features(VkInstance instance, VkPhysicalDevice physical, PFN_vkGetInstanceProcAddr get_proc,
                        VkPhysicalDeviceFeatures2 *chain) {
    struct za_functions vk;
    if (!instance || !physical || !get_proc || !chain) return za_fail("za_wanted_features: got NULL, expected handles");
    if (!load(&vk, get_proc, instance)) return false;
    VkBool32 *wave32 = size_control_in(chain->pNext), *units[3];
    if (wave32 && offers_wave32(&vk, physical)) *wave32 = VK_TRUE;
    const struct za_host host = {.instance = instance, .physical = physical, .get_proc = get_proc};
    const struct za_units mat = za_units_of(&host, &vk, wave32 && *wave32);
    if (za_units_in(chain->pNext, units) && za_units_attend(mat))
        *units[0] = *units[1] = *units[2] = VK_TRUE;
    return true;
}

/* --- a device of the library's ----------------------------------------------------------------------- */

static bool make_instance(struct za_host *host, uint32_t *api) {
    PFN_vkEnumerateInstanceVersion enumerate =
        (PFN_vkEnumerateInstanceVersion)(void (*)(void))host->get_proc(NULL, "vkEnumerateInstanceVersion");
    PFN_vkCreateInstance create = (PFN_vkCreateInstance)(void (*)(void))host->get_proc(NULL, "vkCreateInstance");
    uint32_t version = VK_API_VERSION_1_0;
    if (enumerate && !za_check(enumerate(&version), "vkEnumerateInstanceVersion")) return false;
    if (!create || version < VK_API_VERSION_1_1)
        return za_fail_as(ZA_UNSUPPORTED, "the Vulkan loader is of version 1.0, expected 1.1: update it");
    *api = version < VK_API_VERSION_1_3 ? VK_API_VERSION_1_1 : VK_API_VERSION_1_3;
    VkApplicationInfo application = {
        .sType = VK_STRUCTURE_TYPE_APPLICATION_INFO,
        .pApplicationName = "zinc_attn",
        .apiVersion = *api,
    };
    VkInstanceCreateInfo info = {
        .sType = VK_STRUCTURE_TYPE_INSTANCE_CREATE_INFO,
        .pApplicationInfo = &application,
    };
    return za_check(create(&info, NULL, &host->instance), "vkCreateInstance");
}

static int rank_of(VkPhysicalDeviceType type) {
    return type == VK_PHYSICAL_DEVICE_TYPE_DISCRETE_GPU ? 3 : type == VK_PHYSICAL_DEVICE_TYPE_INTEGRATED_GPU ? 2
         : type == VK_PHYSICAL_DEVICE_TYPE_CPU ? 0 : 1;
}

static bool choose_device(struct za_device *device, const char *name) {
    VkPhysicalDevice devices[32];
    char names[32 * (VK_MAX_PHYSICAL_DEVICE_NAME_SIZE + 2)] = "";
    uint32_t count = 32;
    VkResult result = device->vk.EnumeratePhysicalDevices(device->host.instance, &count, devices);
    if (result != VK_INCOMPLETE && !za_check(result, "vkEnumeratePhysicalDevices")) return false;
    int best = -1;
    for (uint32_t i = 0; i < count; ++i) {
        VkPhysicalDeviceProperties properties;
        device->vk.GetPhysicalDeviceProperties(devices[i], &properties);
        strcat(strcat(names, i ? ", " : ""), properties.deviceName);
        int rank = rank_of(properties.deviceType);
        if (rank <= best || (name && !strstr(properties.deviceName, name))) continue;
        best = rank;
        device->host.physical = devices[i];
    }
    if (best >= 0) return true;
    if (name && count) return za_fail("no Vulkan device matches '%s'; the devices are %s", name, names);
    return za_fail_as(ZA_UNSUPPORTED, "no Vulkan device; install a driver, for example mesa-vulkan-drivers");
}

/* The first queue family that does compute, from number host.family on. */
static bool find_family(struct za_device *device) {
    VkQueueFamilyProperties families[32];
    uint32_t count = 32, *family = &device->host.family;
    device->vk.GetPhysicalDeviceQueueFamilyProperties(device->host.physical, &count, families);
    for (; *family < count; ++*family)
        if (families[*family].queueFlags & VK_QUEUE_COMPUTE_BIT) return true;
    return za_fail_as(ZA_UNSUPPORTED, "%s has no compute queue; choose another device", device->properties.deviceName);
}

static bool has_extension(const struct za_device *device, const char *name) {
    uint32_t count = 0;
    PFN_vkEnumerateDeviceExtensionProperties list = device->vk.EnumerateDeviceExtensionProperties;
    if (list(device->host.physical, NULL, &count, NULL) != VK_SUCCESS || !count) return false;
    VkExtensionProperties *extensions = calloc(count, sizeof *extensions);
    bool there = false;
    if (extensions && list(device->host.physical, NULL, &count, extensions) >= VK_SUCCESS) {
        for (uint32_t i = 0; i < count; ++i) there = there || strcmp(extensions[i].extensionName, name) == 0;
    }
    free(extensions);
    return there;
}

static bool make_device(struct za_device *device, uint32_t api) {
    static const char *const control = VK_EXT_SUBGROUP_SIZE_CONTROL_EXTENSION_NAME;
    static const char *const dot = VK_KHR_SHADER_INTEGER_DOT_PRODUCT_EXTENSION_NAME;
    bool core = api >= VK_API_VERSION_1_3 && device->properties.apiVersion >= VK_API_VERSION_1_3;
    bool extension = !core && has_extension(device, control), dot_extension = !core && has_extension(device, dot);
    const char *names[3];
    uint32_t count = 0;
    VkPhysicalDeviceSubgroupSizeControlFeatures waves = {
        .sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_SUBGROUP_SIZE_CONTROL_FEATURES,
        .subgroupSizeControl = VK_TRUE,
    };
    device->dots = core || dot_extension;
    device->wave32 = (core || extension) && offers_wave32(&device->vk, device->host.physical);
    VkPhysicalDeviceShaderIntegerDotProductFeatures dots = { /* of products; every device with the extension has it */
        .sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_SHADER_INTEGER_DOT_PRODUCT_FEATURES,
        .pNext = device->wave32 ? &waves : NULL,
        .shaderIntegerDotProduct = VK_TRUE,
    };
    if (device->wave32 && extension) names[count++] = control;
    if (dot_extension) names[count++] = dot;
    void *features = device->dots ? &dots : dots.pNext;
    struct za_units_features units;
    if (core && has_extension(device, za_units_extension))
        device->units = za_units_of(&device->host, &device->vk, device->wave32);
    if (device->units.m) {
        names[count++] = za_units_extension;
        features = za_units_chain(&units, features);
    }
    float priority = 1;
    VkDeviceQueueCreateInfo queue = {
        .sType = VK_STRUCTURE_TYPE_DEVICE_QUEUE_CREATE_INFO,
        .queueFamilyIndex = device->host.family,
        .queueCount = 1,
        .pQueuePriorities = &priority,
    };
    VkDeviceCreateInfo create = {
        .sType = VK_STRUCTURE_TYPE_DEVICE_CREATE_INFO,
        .pNext = features,
        .queueCreateInfoCount = 1,
        .pQueueCreateInfos = &queue,
        .enabledExtensionCount = count,
        .ppEnabledExtensionNames = names,
    };
    if (!za_do(device, CreateDevice, device->host.physical, &create, NULL, &device->host.device)) return false;
    device->vk.GetDeviceQueue(device->host.device, device->host.family, 0, &device->host.queue);
    return true;
}

/* --- opening ----------------------------------------------------------------------------------------- */

static bool read_facts(struct za_device *device) {
    device->vk.GetPhysicalDeviceProperties(device->host.physical, &device->properties);
    device->vk.GetPhysicalDeviceMemoryProperties(device->host.physical, &device->memory);
    return device->properties.apiVersion >= VK_API_VERSION_1_1 ||
           za_fail_as(ZA_UNSUPPORTED, "%s offers Vulkan 1.0, expected 1.1: update its driver",
                      device->properties.deviceName);
}

static bool make_commands(struct za_device *device) {
    VkCommandPoolCreateInfo pool = {
        .sType = VK_STRUCTURE_TYPE_COMMAND_POOL_CREATE_INFO,
        .flags = VK_COMMAND_POOL_CREATE_RESET_COMMAND_BUFFER_BIT,
        .queueFamilyIndex = device->host.family,
    };
    if (!za_do(device, CreateCommandPool, device->host.device, &pool, NULL, &device->pool)) return false;
    VkCommandBufferAllocateInfo commands = {
        .sType = VK_STRUCTURE_TYPE_COMMAND_BUFFER_ALLOCATE_INFO,
        .commandPool = device->pool,
        .level = VK_COMMAND_BUFFER_LEVEL_PRIMARY,
        .commandBufferCount = 1,
    };
    VkFenceCreateInfo fence = {.sType = VK_STRUCTURE_TYPE_FENCE_CREATE_INFO};
    return za_do(device, AllocateCommandBuffers, device->host.device, &commands, &device->commands) &&
           za_do(device, CreateFence, device->host.device, &fence, NULL, &device->fence);
}

static struct za_device *finish(struct za_device *device, bool ok) {
    if (ok && make_commands(device)) {
        za_pipeline_cache_open(&device->cache, &device->vk, device->host.device, &device->properties);
        return device;
    }
    za_device_close(device);
    return NULL;
}

static struct za_device *make(void) {
    struct za_device *device = calloc(1, sizeof *device);
    if (!device) za_no_memory();
    if (device) atomic_flag_clear(&device->busy);
    return device;
}

struct za_device *za_device_open(const char *name) {
    struct za_device *device = make();
    uint32_t api = 0;
    if (!device) return NULL;
    device->owned = true;
    device->processor = name && strcmp(name, "cpu") == 0;
    device->host.get_proc = device->processor ? NULL : vkGetInstanceProcAddr;
    return finish(device, (!device->processor || za_processor(&device->host.get_proc)) &&
                              make_instance(&device->host, &api) &&
                              load(&device->vk, device->host.get_proc, device->host.instance) &&
                              choose_device(device, name) && read_facts(device) && find_family(device) &&
                              make_device(device, api));
}

static bool take_host(struct za_device *device, const struct za_host *host) {
    if (!host->instance || !host->physical || !host->device || !host->queue || !host->get_proc)
        return za_fail("host: got a NULL among instance, physical, device, queue and get_proc, expected handles");
    device->host = *host;
    device->host.enabled = NULL;
    if (!load(&device->vk, host->get_proc, host->instance) || !read_facts(device)) return false;
    if (!find_family(device) || device->host.family != host->family)
        return za_fail("host: got queue family %u, expected one of %s that does compute", host->family,
                       device->properties.deviceName);
    VkBool32 *wave32 = host->enabled ? size_control_in(host->enabled->pNext) : NULL, *units[3];
    device->wave32 = wave32 && *wave32 && offers_wave32(&device->vk, host->physical);
    if (host->enabled && za_units_in(host->enabled->pNext, units) && *units[0] && *units[1] && *units[2])
        device->units = za_units_of(host, &device->vk, device->wave32);
    return true;
}

struct za_device *za_device_from(const struct za_host *host) {
    struct za_device *device = za_not_null("host", host) ? make() : NULL;
    if (!device) return NULL;
    return finish(device, take_host(device, host));
}

bool za_device_close(struct za_device *device) {
    if (!device) return true;
    if (device->used_by)
        return za_fail("device: got one with %u open za_attn, expected none; za_close comes first", device->used_by);
    const struct za_functions *vk = &device->vk;
    VkDevice handle = device->host.device;
    if (vk->DeviceWaitIdle && handle && device->owned) vk->DeviceWaitIdle(handle);
    if (vk->DestroyDevice && handle && za_is_idle(device)) {
        for (int i = 0; i <= MAX_BINDINGS; ++i) {
            vk->DestroyPipelineLayout(handle, device->layouts[i], NULL);
            vk->DestroyDescriptorSetLayout(handle, device->set_layouts[i], NULL);
        }
        if (device->cache.pending && !device->lost) za_pipeline_cache_save(&device->cache, vk, handle);
        vk->DestroyPipelineCache(handle, device->cache.handle, NULL);
        vk->DestroyFence(handle, device->fence, NULL);
        vk->DestroyCommandPool(handle, device->pool, NULL);
        if (device->owned) vk->DestroyDevice(handle, NULL);
    }
    if (device->owned && vk->DestroyInstance && device->host.instance && !device->running)
        vk->DestroyInstance(device->host.instance, NULL);
    free(device);
    return true;
}

struct registers za_device_registers(const struct za_device *device) {
    VkPhysicalDeviceSubgroupSizeControlProperties sizes = {
        .sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_SUBGROUP_SIZE_CONTROL_PROPERTIES,
        .minSubgroupSize = WAVE,
    };
    VkPhysicalDeviceProperties2 query = {.sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_PROPERTIES_2, .pNext = &sizes};
    const VkPhysicalDeviceProperties *p = &device->properties;
    if (device->wave32) device->vk.GetPhysicalDeviceProperties2(device->host.physical, &query);
    return za_registers_of(za_device_info(device).cpu, p->vendorID, p->driverVersion >> 22, sizes.minSubgroupSize);
}

struct za_device_info za_device_info(const struct za_device *device) {
    const VkPhysicalDeviceProperties *p = &device->properties;
    return (struct za_device_info){p->deviceName, p->deviceType == VK_PHYSICAL_DEVICE_TYPE_CPU, device->wave32,
                                   p->limits.minStorageBufferOffsetAlignment, p->limits.maxStorageBufferRange};
}

struct za_host za_device_host(const struct za_device *device) { return device->host; }

/* --- one thread at a time, one submission at a time -------------------------------------------------- */

bool za_enter(struct za_device *device) {
    if (atomic_flag_test_and_set(&device->busy))
        return za_fail_as(ZA_BUSY, "%s: another thread is in a function of this za_device, expected one at a time",
                          device->properties.deviceName);
    if (!device->lost) return true;
    za_leave(device, false);
    return za_fail_as(ZA_LOST, "%s: an earlier call lost the device, or did not end; open it again",
                      device->properties.deviceName);
}

bool za_leave(struct za_device *device, bool ok) {
    if (!ok && za_error_code() == ZA_LOST) device->lost = true;
    if (ok && device->cache.pending && --device->cache.pending == 0)
        za_pipeline_cache_save(&device->cache, &device->vk, device->host.device);
    atomic_flag_clear(&device->busy);
    return ok;
}

/* Wait until the device is idle. A lost device has ended its submissions, too. */
static bool settle(struct za_device *device) {
    VkResult result = device->vk.QueueWaitIdle(device->host.queue);
    if (result != VK_SUCCESS) device->lost = true;
    device->running = result != VK_SUCCESS && result != VK_ERROR_DEVICE_LOST;
    return result == VK_SUCCESS;
}

bool za_is_idle(struct za_device *device) {
    if (device->running) settle(device);
    return !device->running;
}

static VkResult reset_fence(struct za_device *device) {
    VkResult result = device->vk.ResetFences(device->host.device, 1, &device->fence);
    device->signalled = result != VK_SUCCESS;
    if (result == VK_ERROR_DEVICE_LOST) device->lost = true;
    return result;
}

bool za_begin(struct za_device *device, VkCommandBuffer commands) {
    VkCommandBufferBeginInfo begin = {
        .sType = VK_STRUCTURE_TYPE_COMMAND_BUFFER_BEGIN_INFO,
        .flags = VK_COMMAND_BUFFER_USAGE_ONE_TIME_SUBMIT_BIT,
    };
    if (device->signalled && !za_check(reset_fence(device), "vkResetFences")) return false;
    /* A failed call may have left the command buffer in the recording state. */
    return za_do(device, ResetCommandBuffer, commands, 0) && za_do(device, BeginCommandBuffer, commands, &begin);
}

bool za_submit(struct za_device *device, VkCommandBuffer commands, bool last) {
    VkSubmitInfo submit = {
        .sType = VK_STRUCTURE_TYPE_SUBMIT_INFO,
        .commandBufferCount = 1,
        .pCommandBuffers = &commands,
    };
    if (!za_do(device, EndCommandBuffer, commands)) return false;
    device->running = true;
    bool ok = za_do(device, QueueSubmit, device->host.queue, 1, &submit, last ? device->fence : VK_NULL_HANDLE) &&
              (!last || za_do(device, WaitForFences, device->host.device, 1, &device->fence, VK_TRUE, UINT64_MAX));
    if (ok && !last) return true;
    device->signalled = true;
    /* A refused submission may run nevertheless. Nothing is used or freed before it is known to have ended. */
    if (!ok) return settle(device) && false;
    device->running = false;
    reset_fence(device); /* the next submission tries again */
    return true;
}

