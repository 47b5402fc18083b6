#include "objects.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "error.h"
#include "loops.h"

/* --- buffers ----------------------------------------------------------------------------------------- */

/* A memory type among `allowed` with the flags and nothing special, of the largest heap. -1 where there is none. */
static int memory_type(const struct za_device *device, uint32_t allowed, VkMemoryPropertyFlags flags) {
    int best = -1;
    VkDeviceSize largest = 0;
    for (uint32_t i = 0; i < device->memory.memoryTypeCount; ++i) {
        const VkMemoryType *type = &device->memory.memoryTypes[i];
        VkDeviceSize size = device->memory.memoryHeaps[type->heapIndex].size;
        bool special = type->propertyFlags >= VK_MEMORY_PROPERTY_LAZILY_ALLOCATED_BIT; /* lazy, protected, ... */
        if (!(allowed >> i & 1) || special || (type->propertyFlags & flags) != flags || size <= largest) continue;
        best = (int)i;
        largest = size;
    }
    return best;
}

static bool make_memory(struct za_device *device, VkDeviceSize size, VkMemoryPropertyFlags flags, const char *what,
                        const void *import, struct buffer *buffer) {
    const struct za_functions *vk = &device->vk;
    VkDevice on = device->host.device;
    *buffer = (struct buffer){.size = size};
    VkBufferCreateInfo create = {
        .sType = VK_STRUCTURE_TYPE_BUFFER_CREATE_INFO,
        .size = size,
        .usage = VK_BUFFER_USAGE_STORAGE_BUFFER_BIT | VK_BUFFER_USAGE_TRANSFER_SRC_BIT |
                 VK_BUFFER_USAGE_TRANSFER_DST_BIT,
    };
    if (!za_do(device, CreateBuffer, on, &create, NULL, &buffer->handle)) return false;
    VkMemoryRequirements needs;
    vk->GetBufferMemoryRequirements(on, buffer->handle, &needs);
    int type = memory_type(device, needs.memoryTypeBits, flags);
    if (type < 0)
        return za_fail_as(ZA_UNSUPPORTED, "%s: %s has no memory of the kind that is needed", what,
                          device->properties.deviceName);
    VkMemoryAllocateInfo allocate = {
        .sType = VK_STRUCTURE_TYPE_MEMORY_ALLOCATE_INFO,
        .pNext = import,
        .allocationSize = needs.size,
        .memoryTypeIndex = (uint32_t)type,
    };
    VkResult result = vk->AllocateMemory(on, &allocate, NULL, &buffer->memory);
    if (result != VK_SUCCESS)
        return za_fail_as(za_code_of(result), "%s: %llu bytes are needed: %s (VkResult %d); use a shorter context or "
                          "free memory", what, (unsigned long long)needs.size, za_result_name(result), (int)result);
    if (!za_do(device, BindBufferMemory, on, buffer->handle, buffer->memory, 0)) return false;
    return !(flags & VK_MEMORY_PROPERTY_HOST_VISIBLE_BIT) ||
           za_do(device, MapMemory, on, buffer->memory, 0, VK_WHOLE_SIZE, 0, &buffer->mapped);
}

bool za_memory_make(struct za_device *device, VkDeviceSize size, VkMemoryPropertyFlags flags, const char *what,
                    struct buffer *buffer) {
    if (make_memory(device, size, flags, what, NULL, buffer)) return true;
    za_buffer_free(device, buffer);
    return false;
}

bool za_memory_import(struct za_device *device, void *bytes, VkDeviceSize size, struct buffer *buffer) {
    const VkImportMemoryHostPointerInfoEXT import = {
        .sType = VK_STRUCTURE_TYPE_IMPORT_MEMORY_HOST_POINTER_INFO_EXT,
        .handleType = VK_EXTERNAL_MEMORY_HANDLE_TYPE_HOST_ALLOCATION_BIT_EXT,
        .pHostPointer = bytes,
    };
    if (make_memory(device, size, 0, "the host's memory", &import, buffer)) return true;
    za_buffer_free(device, buffer);
    return false;
}

bool za_buffer_make(struct za_device *device, VkDeviceSize size, bool host, const char *what, struct buffer *buffer) {
    const uint32_t most = device->properties.limits.maxStorageBufferRange;
    *buffer = (struct buffer){0};
    if (size > most)
        return za_fail_as(ZA_UNSUPPORTED, "%s: %llu bytes are needed, %s takes at most %u in one storage buffer", what,
                          (unsigned long long)size, device->properties.deviceName, most);
    return za_memory_make(device, size, host ? MAPPED : VK_MEMORY_PROPERTY_DEVICE_LOCAL_BIT, what, buffer);
}

void za_buffer_free(struct za_device *device, struct buffer *buffer) {
    if (buffer->handle && !za_is_idle(device)) return;
    device->vk.DestroyBuffer(device->host.device, buffer->handle, NULL);
    device->vk.FreeMemory(device->host.device, buffer->memory, NULL);
    *buffer = (struct buffer){0};
}

/* --- pipelines --------------------------------------------------------------------------------------- */

/* The layouts of `count` storage buffers, made once. */
static bool make_layouts(struct za_device *device, uint32_t count) {
    if (device->layouts[count]) return true;
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
        .pSetLayouts = &device->set_layouts[count],
    };
    VkDevice on = device->host.device;
    return (device->set_layouts[count] ||
            za_do(device, CreateDescriptorSetLayout, on, &set, NULL, &device->set_layouts[count])) &&
           za_do(device, CreatePipelineLayout, on, &layout, NULL, &device->layouts[count]);
}

static bool make_module(struct za_device *device, const struct kernel *kernel, VkShaderModule *module) {
    uint32_t *hinted = NULL;
    if (!za_device_info(device).cpu && !(hinted = za_unrolled(kernel->code, kernel->code_bytes / 4))) return false;
    VkShaderModuleCreateInfo code = {
        .sType = VK_STRUCTURE_TYPE_SHADER_MODULE_CREATE_INFO,
        .codeSize = kernel->code_bytes,
        .pCode = hinted ? hinted : kernel->code,
    };
    VkResult result = device->vk.CreateShaderModule(device->host.device, &code, NULL, module);
    free(hinted);
    return za_check(result, "vkCreateShaderModule");
}

bool za_pipeline_make(struct za_device *device, const struct kernel *kernel, const void *constants,
                      struct pipeline *pipeline) {
    const struct za_functions *vk = &device->vk;
    VkDevice on = device->host.device;
    uint32_t most = device->properties.limits.maxPerStageDescriptorStorageBuffers;
    if (kernel->bindings > most)
        return za_fail_as(ZA_UNSUPPORTED, "kernel %s: it has %u buffers, %s takes at most %u", kernel->name,
                          kernel->bindings, device->properties.deviceName, most);
    pipeline->kernel = kernel;
    VkShaderModule module;
    if (!make_layouts(device, kernel->bindings) || !make_module(device, kernel, &module)) return false;
    VkSpecializationMapEntry entries[MAX_CONSTANTS];
    for (uint32_t i = 0; i < kernel->constants; ++i)
        entries[i] = (VkSpecializationMapEntry){.constantID = i, .offset = 4 * i, .size = 4};
    VkSpecializationInfo specialization = {
        .mapEntryCount = kernel->constants,
        .pMapEntries = entries,
        .dataSize = 4 * kernel->constants,
        .pData = constants,
    };
    const bool attend = kernel == &za_kernels[KERNEL_ATTEND];
    const uint32_t lanes = kernel->subgroups ? WAVE : za_device_registers(device).lanes;
    VkPipelineShaderStageRequiredSubgroupSizeCreateInfo wave32 = {
        .sType = VK_STRUCTURE_TYPE_PIPELINE_SHADER_STAGE_REQUIRED_SUBGROUP_SIZE_CREATE_INFO,
        .requiredSubgroupSize =
            attend ? ((const struct attend_constants *)constants)->workgroup_size / LEAVES_PER_NODE : lanes,
    };
    VkComputePipelineCreateInfo create = {
        .sType = VK_STRUCTURE_TYPE_COMPUTE_PIPELINE_CREATE_INFO,
        .stage = {
            .sType = VK_STRUCTURE_TYPE_PIPELINE_SHADER_STAGE_CREATE_INFO,
            .pNext = device->wave32 ? &wave32 : NULL,
            .stage = VK_SHADER_STAGE_COMPUTE_BIT,
            .module = module,
            .pName = device->processor ? kernel->module : "main",
            .pSpecializationInfo = &specialization,
        },
        .layout = device->layouts[kernel->bindings],
    };
    VkResult result = vk->CreateComputePipelines(on, device->cache.handle, 1, &create, NULL, &pipeline->handle);
    if (result == VK_SUCCESS) device->cache.pending = 2;
    vk->DestroyShaderModule(on, module, NULL);
    return za_check(result, kernel->name);
}

void za_pipeline_free(struct za_device *device, struct pipeline *pipeline) {
    if (pipeline->handle && !za_is_idle(device)) return;
    device->vk.DestroyPipeline(device->host.device, pipeline->handle, NULL);
    *pipeline = (struct pipeline){0};
}

/* --- descriptor sets --------------------------------------------------------------------------------- */

static bool add_pool(struct za_device *device, struct sets *sets) {
    VkDescriptorPool *grown = realloc(sets->pools, (sets->count + 1) * sizeof *grown);
    if (!grown) return za_no_memory();
    sets->pools = grown;
    VkDescriptorPoolSize size = {VK_DESCRIPTOR_TYPE_STORAGE_BUFFER, SETS * MAX_BINDINGS};
    VkDescriptorPoolCreateInfo create = {
        .sType = VK_STRUCTURE_TYPE_DESCRIPTOR_POOL_CREATE_INFO,
        .maxSets = SETS,
        .poolSizeCount = 1,
        .pPoolSizes = &size,
    };
    if (!za_do(device, CreateDescriptorPool, device->host.device, &create, NULL, &grown[sets->count])) return false;
    ++sets->count;
    return true;
}

bool za_sets_reset(struct za_device *device, struct sets *sets) {
    for (uint32_t i = 0; i < sets->count; ++i)
        if (!za_do(device, ResetDescriptorPool, device->host.device, sets->pools[i], 0)) return false;
    sets->taken = 0;
    return true;
}

void za_sets_free(struct za_device *device, struct sets *sets) {
    for (uint32_t i = 0; i < sets->count && za_is_idle(device); ++i)
        device->vk.DestroyDescriptorPool(device->host.device, sets->pools[i], NULL);
    free(sets->pools);
    *sets = (struct sets){0};
}

bool za_set_take(struct za_device *device, struct sets *sets, uint32_t bindings, VkDescriptorSet *set) {
    if (sets->taken == sets->count * SETS && !add_pool(device, sets)) return false;
    VkDescriptorSetAllocateInfo allocate = {
        .sType = VK_STRUCTURE_TYPE_DESCRIPTOR_SET_ALLOCATE_INFO,
        .descriptorPool = sets->pools[sets->taken / SETS],
        .descriptorSetCount = 1,
        .pSetLayouts = &device->set_layouts[bindings],
    };
    if (!za_do(device, AllocateDescriptorSets, device->host.device, &allocate, set)) return false;
    ++sets->taken;
    return true;
}

void za_set_write(struct za_device *device, VkDescriptorSet set, const struct za_command *command) {
    VkDescriptorBufferInfo infos[MAX_BINDINGS];
    for (uint32_t i = 0; i < command->kernel->bindings; ++i)
        infos[i] = (VkDescriptorBufferInfo){command->place[i].buffer, command->place[i].offset, command->place[i].size};
    VkWriteDescriptorSet write = {
        .sType = VK_STRUCTURE_TYPE_WRITE_DESCRIPTOR_SET,
        .dstSet = set,
        .descriptorCount = command->kernel->bindings, /* one write fills consecutive bindings */
        .descriptorType = VK_DESCRIPTOR_TYPE_STORAGE_BUFFER,
        .pBufferInfo = infos,
    };
    device->vk.UpdateDescriptorSets(device->host.device, 1, &write, 0, NULL);
}

struct za_command za_command(const struct pipeline *pipeline, const struct za_place *places, const uint32_t groups[3]) {
    struct za_command command = {.kernel = pipeline->kernel, .pipeline = pipeline->handle};
    memcpy(command.place, places, pipeline->kernel->bindings * sizeof *places);
    memcpy(command.groups, groups, sizeof command.groups);
    return command;
}

void za_dispatch_with(struct za_device *device, VkCommandBuffer commands, const struct za_command *command,
                      VkDescriptorSet set) {
    const struct za_functions *vk = &device->vk;
    const uint32_t *groups = command->groups;
    const VkPipelineLayout layout = device->layouts[command->kernel->bindings];
    vk->CmdBindPipeline(commands, VK_PIPELINE_BIND_POINT_COMPUTE, command->pipeline);
    vk->CmdBindDescriptorSets(commands, VK_PIPELINE_BIND_POINT_COMPUTE, layout, 0, 1, &set, 0, NULL);
    vk->CmdDispatch(commands, groups[0], groups[1], groups[2]);
}

bool za_dispatch(struct za_device *device, VkCommandBuffer commands, struct sets *sets,
                 const struct za_command *command) {
    VkDescriptorSet set;
    if (!za_set_take(device, sets, command->kernel->bindings, &set)) return false;
    za_set_write(device, set, command);
    za_dispatch_with(device, commands, command, set);
    return true;
}

struct za_place za_whole(const struct buffer *buffer) {
    return (struct za_place){.buffer = buffer->handle, .size = buffer->size};
}

/* --- barriers ---------------------------------------------------------------------------------------- */

enum { COMPUTE = VK_PIPELINE_STAGE_COMPUTE_SHADER_BIT, COPY_STAGE = VK_PIPELINE_STAGE_TRANSFER_BIT };
enum { SHADERS = VK_ACCESS_SHADER_READ_BIT | VK_ACCESS_SHADER_WRITE_BIT };
enum { COPIED = VK_ACCESS_TRANSFER_READ_BIT | VK_ACCESS_TRANSFER_WRITE_BIT };

void za_barrier(const struct za_device *device, VkCommandBuffer commands, VkPipelineStageFlags source,
                VkAccessFlags writes, VkPipelineStageFlags target, VkAccessFlags uses) {
    const VkMemoryBarrier memory = {
        .sType = VK_STRUCTURE_TYPE_MEMORY_BARRIER, .srcAccessMask = writes, .dstAccessMask = uses};
    device->vk.CmdPipelineBarrier(commands, source, target, 0, 1, &memory, 0, NULL, 0, NULL);
}

void za_barrier_before(const struct za_device *device, VkCommandBuffer commands) {
    za_barrier(device, commands, VK_PIPELINE_STAGE_ALL_COMMANDS_BIT, VK_ACCESS_MEMORY_WRITE_BIT, COMPUTE | COPY_STAGE,
               SHADERS | COPIED);
}

void za_barrier_after(const struct za_device *device, VkCommandBuffer commands) {
    za_barrier(device, commands, COMPUTE | COPY_STAGE, VK_ACCESS_SHADER_WRITE_BIT | VK_ACCESS_TRANSFER_WRITE_BIT,
               VK_PIPELINE_STAGE_ALL_COMMANDS_BIT | VK_PIPELINE_STAGE_HOST_BIT,
               VK_ACCESS_MEMORY_READ_BIT | VK_ACCESS_MEMORY_WRITE_BIT | VK_ACCESS_HOST_READ_BIT);
}

static void say_barrier(const struct za_command *next) {
    const char *log = getenv("ZINC_ATTN_LOG");
    const unsigned long long begin = next->met.offset, end = begin + next->met.size;
    const unsigned long long buffer = (unsigned long long)next->met.buffer;
    if (!log || strcmp(log, "barriers") != 0) return;
    if (next->awaited)
        fprintf(stderr, "zinc_attn: barrier: %s waits for %s: bytes %llu to %llu of buffer %#llx\n",
                next->kernel->name, next->awaited->name, begin, end, buffer);
    else fprintf(stderr, "zinc_attn: barrier: %s waits for the list of commands before\n", next->kernel->name);
}

void za_barrier_between(const struct za_device *device, VkCommandBuffer commands, const struct za_command *next) {
    say_barrier(next);
    za_barrier(device, commands, COMPUTE, VK_ACCESS_SHADER_WRITE_BIT, COMPUTE, SHADERS);
}
