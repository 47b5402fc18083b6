#include "units.h"

#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "zinc_contract.h"

enum { FEATURES = 1000506000, SHAPE = 1000506001, SINT8 = 3, SINT32 = 5, SUBGROUP = 3 }; /* Vulkan's */
enum { MOST_SIDE = 16, CPU_SUBGROUP = 8 };
const char za_units_extension[] = "VK_KHR_cooperative_matrix";

struct product { /* VkCooperativeMatrixPropertiesKHR */
    VkStructureType sType;
    void *pNext;
    uint32_t m, n, k;
    int32_t a, b, c, result;
    VkBool32 saturating;
    int32_t scope;
};
typedef VkResult(VKAPI_PTR *list_products)(VkPhysicalDevice, uint32_t *, struct product *);

void *za_units_chain(struct za_units_features *features, void *next) {
    *features = (struct za_units_features){
        .matrices = {.sType = (VkStructureType)FEATURES, .pNext = &features->int8, .cooperativeMatrix = VK_TRUE},
        .int8 = {.sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_SHADER_FLOAT16_INT8_FEATURES,
                 .pNext = &features->memory,
                 .shaderInt8 = VK_TRUE},
        .memory = {.sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_VULKAN_MEMORY_MODEL_FEATURES,
                   .pNext = next,
                   .vulkanMemoryModel = VK_TRUE},
    };
    return &features->matrices;
}

VkBool32 *za_feature_in(VkBaseOutStructure *link, VkStructureType own, size_t offset, VkStructureType core,
                        size_t core_offset) {
    while (link && link->sType != own && link->sType != core) link = link->pNext;
    return link ? (VkBool32 *)(void *)((char *)link + (link->sType == own ? offset : core_offset)) : NULL;
}

bool za_units_in(VkBaseOutStructure *chain, VkBool32 *places[3]) {
    typedef VkPhysicalDeviceVulkan12Features core;
    typedef VkPhysicalDeviceShaderFloat16Int8Features int8;
    typedef VkPhysicalDeviceVulkanMemoryModelFeatures memory;
    const VkStructureType v12 = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_VULKAN_1_2_FEATURES;
    const VkStructureType own = (VkStructureType)FEATURES;
    places[0] = za_feature_in(chain, own, sizeof(VkBaseOutStructure), own, 0);
    places[1] = za_feature_in(chain, VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_SHADER_FLOAT16_INT8_FEATURES,
                              offsetof(int8, shaderInt8), v12, offsetof(core, shaderInt8));
    places[2] = za_feature_in(chain, VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_VULKAN_MEMORY_MODEL_FEATURES,
                              offsetof(memory, vulkanMemoryModel), v12, offsetof(core, vulkanMemoryModel));
    return places[0] && places[1] && places[2];
}

static bool has_features(const struct za_host *host, const struct za_functions *vk) {
    struct za_units_features features;
    VkPhysicalDeviceFeatures2 query = {
        .sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_FEATURES_2,
        .pNext = za_units_chain(&features, NULL),
    };
    features.matrices.cooperativeMatrix = VK_FALSE; /* a driver leaves a struct that it does not know as it is */
    features.int8.shaderInt8 = features.memory.vulkanMemoryModel = VK_FALSE;
    vk->GetPhysicalDeviceFeatures2(host->physical, &query);
    return features.matrices.cooperativeMatrix && features.int8.shaderInt8 && features.memory.vulkanMemoryModel;
}

/* Invocations of a subgroup; 0: units are left out. With 16, lavapipe of Mesa 26.2 crashes as it compiles products. */
static uint32_t subgroup_of(const struct za_host *host, const struct za_functions *vk, bool wave32) {
    VkPhysicalDeviceSubgroupProperties subgroup = {
        .sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_SUBGROUP_PROPERTIES,
    };
    VkPhysicalDeviceProperties2 query = {.sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_PROPERTIES_2, .pNext = &subgroup};
    vk->GetPhysicalDeviceProperties2(host->physical, &query);
    const uint32_t size = wave32 ? WAVE : subgroup.subgroupSize;
    const bool on_cpu = query.properties.deviceType == VK_PHYSICAL_DEVICE_TYPE_CPU;
    const char *asked = getenv("ZINC_ATTN_UNITS");
    if (asked && *asked ? strcmp(asked, "1") != 0 : on_cpu) return 0;
    if (query.properties.apiVersion < VK_API_VERSION_1_3) return 0;
    if (!(subgroup.supportedOperations & VK_SUBGROUP_FEATURE_SHUFFLE_BIT)) return 0; /* which attend_units uses */
    return size == WAVE || (on_cpu && size <= CPU_SUBGROUP) ? size : 0;
}

static bool is_side(uint32_t size) { return size == MOST_SIDE / 2 || size == MOST_SIDE; }

/* The products of a shape; of a larger k, which attend_units does not take, only where there is no other. */
static uint32_t rank(uint32_t m, uint32_t n, uint32_t k) { return m * n * k + (m && k <= MOST_SIDE ? 1u << 16 : 0); }

/* Choose the shape with the highest rank among the shapes with exact sums. */
static void choose(const struct product *shapes, uint32_t count, struct za_units *best) {
    for (const struct product *s = shapes; s < shapes + count; ++s) {
        const bool fits = is_side(s->m) && is_side(s->n) && (is_side(s->k) || s->k == 2 * MOST_SIDE);
        const bool exact = s->a == SINT8 && s->b == SINT8 && s->c == SINT32 && s->result == SINT32 && !s->saturating;
        if (fits && exact && s->scope == SUBGROUP && rank(s->m, s->n, s->k) > rank(best->m, best->n, best->k))
            *best = (struct za_units){s->m, s->n, s->k, best->subgroup};
    }
}

struct za_units za_units_of(const struct za_host *host, const struct za_functions *vk, bool wave32) {
    struct za_units best = {.subgroup = subgroup_of(host, vk, wave32)};
    list_products list = (list_products)(void (*)(void))host->get_proc(
        host->instance, "vkGetPhysicalDeviceCooperativeMatrixPropertiesKHR");
    uint32_t count = 0;
    if (!best.subgroup || !list || !has_features(host, vk) || list(host->physical, &count, NULL) != VK_SUCCESS)
        return (struct za_units){0};
    struct product *shapes = calloc(count + 1, sizeof *shapes);
    for (uint32_t i = 0; shapes && i < count; ++i) shapes[i].sType = (VkStructureType)SHAPE;
    if (shapes && list(host->physical, &count, shapes) == VK_SUCCESS) choose(shapes, count, &best);
    free(shapes);
    return best;
}
