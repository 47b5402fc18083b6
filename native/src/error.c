#include "error.h"

#include <stdarg.h>
#include <stdio.h>

static _Thread_local char reason[1024];
static _Thread_local enum za_code kind;

bool za_fail_as(enum za_code code, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    kind = code;
    vsnprintf(reason, sizeof reason, format, arguments);
    va_end(arguments);
    return false;
}

bool za_not_null(const char *name, const void *argument) {
    return argument || za_fail("%s: got NULL, expected one", name);
}

bool za_no_memory(void) { return za_fail_as(ZA_MEMORY, "out of host memory"); }

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

const char *za_error(void) { return reason; }

enum za_code za_error_code(void) { return kind; }

uint32_t za_abi(void) { return ZA_ABI; }
