/* Matrix units for int8 with int32 sums, of VK_KHR_cooperative_matrix, which the headers of Vulkan 1.3.239 lack. */
#pragma once
#include "functions.h"

/* Products of int8 matrices, (m, k) by (k, n), by a subgroup of `subgroup` invocations. m 0: there are no units. */
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
   size, or if its units are left out: $ZINC_ATTN_UNITS=0 leaves out all units, 1 none, and without it a CPU's are left
   out. wave32: pipelines ask for subgroups of 32. */
struct za_units za_units_of(const struct za_host *host, const struct za_functions *vk, bool wave32);

/* Fill the chain with these features; `next` comes after it. */
void *za_units_chain(struct za_units_features *features, void *next);

/* Whether attend_units takes the products. */
static inline bool za_units_attend(struct za_units units) { return units.m && units.k <= 16; }

/* The places of these features in a host's chain. False: the chain lacks one of them. */
bool za_units_in(VkBaseOutStructure *chain, VkBool32 *places[3]);

/* The place of a feature in a chain: at `offset` of a struct of type `own`, or at `core_offset` of one of type `core`.
   NULL: the chain has neither. */
VkBool32 *za_feature_in(VkBaseOutStructure *link, VkStructureType own, size_t offset, VkStructureType core,
                        size_t core_offset);
