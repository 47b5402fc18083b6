/* Matrix units for int8 with int32 sums, of VK_KHR_cooperative_matrix, which the headers of Vulkan 1.3.239 lack. */
#pragma once
#include "functions.h"

/* Products of int8 matrices, (m, k) by (k, n), by a subgroup of so many invocations. m 0: the device has no such
   units. */
struct za_units {
    uint32_t m, n, k, subgroup;
};

/* The features that a device must have enabled, in a chain. */
struct za_units_features {
    struct {
        VkStructureType sType;
        void *pNext;
        VkBool32 cooperativeMatrix, robustBufferAccess;
    } matrices;
    VkPhysicalDeviceShaderFloat16Int8Features int8;
    VkPhysicalDeviceVulkanMemoryModelFeatures memory;
};

extern const char za_units_extension[];

/* The shape of products that kernels use. m is 0 if the device, of Vulkan 1.3, has none or has subgroups of an unknown
   size. wave32: pipelines ask for subgroups of 32. */
struct za_units za_units_of(const struct za_host *host, const struct za_functions *vk, bool wave32);

/* Fill the chain with these features; `next` comes after it. */
void *za_units_chain(struct za_units_features *features, void *next);
