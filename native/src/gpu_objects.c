#include "error.h"
#include "gpu.h"

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

bool za_buffer_make(struct gpu *gpu, VkDeviceSize size, bool host, const char *what, struct buffer *buffer) {
    *buffer = (struct buffer){.size = size};
    if (size > gpu->properties.limits.maxStorageBufferRange)
        return za_fail("%s: %llu bytes are needed, %s takes at most %u in one storage buffer", what,
                    (unsigned long long)size, gpu->properties.deviceName, gpu->properties.limits.maxStorageBufferRange);
    VkBufferCreateInfo create = {
        .sType = VK_STRUCTURE_TYPE_BUFFER_CREATE_INFO,
        .size = size,
        .usage = VK_BUFFER_USAGE_STORAGE_BUFFER_BIT,
    };
    if (!za_check(vkCreateBuffer(gpu->device, &create, NULL, &buffer->handle), "vkCreateBuffer")) return false;
    VkMemoryRequirements needs;
    vkGetBufferMemoryRequirements(gpu->device, buffer->handle, &needs);
    VkMemoryPropertyFlags mapped = VK_MEMORY_PROPERTY_HOST_VISIBLE_BIT | VK_MEMORY_PROPERTY_HOST_COHERENT_BIT;
    int type = memory_type(gpu, needs.memoryTypeBits, host ? mapped : VK_MEMORY_PROPERTY_DEVICE_LOCAL_BIT);
    if (type < 0) return za_fail("%s: %s has no memory of the kind that is needed", what, gpu->properties.deviceName);
    VkMemoryAllocateInfo allocate = {
        .sType = VK_STRUCTURE_TYPE_MEMORY_ALLOCATE_INFO,
        .allocationSize = needs.size,
        .memoryTypeIndex = (uint32_t)type,
    };
    VkResult result = vkAllocateMemory(gpu->device, &allocate, NULL, &buffer->memory);
    if (result != VK_SUCCESS)
        return za_fail("%s: %llu bytes are needed: %s (VkResult %d); use a shorter context or free memory", what,
                    (unsigned long long)needs.size, za_result_name(result), (int)result);
    if (!za_check(vkBindBufferMemory(gpu->device, buffer->handle, buffer->memory, 0), "vkBindBufferMemory"))
        return false;
    if (!host) return true;
    return za_check(vkMapMemory(gpu->device, buffer->memory, 0, VK_WHOLE_SIZE, 0, &buffer->mapped), "vkMapMemory");
}

void za_buffer_free(struct gpu *gpu, struct buffer *buffer) {
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
    return za_check(vkCreateDescriptorSetLayout(gpu->device, &set, NULL, &gpu->set_layouts[count]),
                 "vkCreateDescriptorSetLayout") &&
           za_check(vkCreatePipelineLayout(gpu->device, &layout, NULL, &gpu->layouts[count]), "vkCreatePipelineLayout");
}

bool za_pipeline_make(struct gpu *gpu, const struct kernel *kernel, struct pipeline *pipeline) {
    uint32_t most = gpu->properties.limits.maxPerStageDescriptorStorageBuffers;
    if (kernel->bindings > MAX_BINDINGS || kernel->bindings > most)
        return za_fail("kernel %s: it has %u buffers, %s takes at most %u", kernel->name, kernel->bindings,
                    gpu->properties.deviceName, most < MAX_BINDINGS ? most : MAX_BINDINGS);
    pipeline->bindings = kernel->bindings;
    VkShaderModuleCreateInfo code = {
        .sType = VK_STRUCTURE_TYPE_SHADER_MODULE_CREATE_INFO,
        .codeSize = kernel->code_bytes,
        .pCode = kernel->code,
    };
    VkShaderModule module;
    if (!make_layouts(gpu, kernel->bindings) ||
        !za_check(vkCreateShaderModule(gpu->device, &code, NULL, &module), "vkCreateShaderModule"))
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
    return za_check(result, kernel->name);
}

void za_pipeline_free(struct gpu *gpu, struct pipeline *pipeline) {
    vkDestroyPipeline(gpu->device, pipeline->handle, NULL);
    *pipeline = (struct pipeline){0};
}
