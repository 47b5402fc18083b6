#include "functions.h"

#include "error.h"

const char *za_result_name(VkResult result) {
    switch (result) {
    case VK_ERROR_OUT_OF_HOST_MEMORY: return "out of host memory";
    case VK_ERROR_OUT_OF_DEVICE_MEMORY: return "out of device memory";
    case VK_ERROR_INITIALIZATION_FAILED: return "initialization failed";
    case VK_ERROR_DEVICE_LOST: return "the device was lost";
    case VK_ERROR_MEMORY_MAP_FAILED: return "the memory cannot be mapped";
    case VK_ERROR_EXTENSION_NOT_PRESENT: return "an extension is not there";
    case VK_ERROR_FEATURE_NOT_PRESENT: return "a feature is not there";
    case VK_ERROR_INCOMPATIBLE_DRIVER: return "no Vulkan driver; install one, for example mesa-vulkan-drivers";
    case VK_ERROR_TOO_MANY_OBJECTS: return "too many objects";
    default: return "unexpected result";
    }
}

enum za_code za_code_of(VkResult result) {
    return result == VK_ERROR_OUT_OF_HOST_MEMORY || result == VK_ERROR_OUT_OF_DEVICE_MEMORY ? ZA_MEMORY
           : result == VK_ERROR_DEVICE_LOST                                                 ? ZA_LOST
                                                                                            : ZA_DRIVER;
}

bool za_check(VkResult result, const char *what) {
    return result == VK_SUCCESS ||
           za_fail_as(za_code_of(result), "%s: %s (VkResult %d)", what, za_result_name(result), (int)result);
}

bool za_functions_load(struct za_functions *vk, PFN_vkGetInstanceProcAddr get_proc, VkInstance instance) {
    const char *missing = NULL;
#define X(name)                                                                  \
    vk->name = (PFN_vk##name)(void (*)(void))get_proc(instance, "vk" #name);     \
    if (!vk->name) missing = "vk" #name;
    ZA_VULKAN(X)
#undef X
    return !missing || za_fail_as(ZA_UNSUPPORTED, "get_proc: it has no %s, expected the functions of Vulkan 1.1; make "
                                  "the instance for 1.1", missing);
}
