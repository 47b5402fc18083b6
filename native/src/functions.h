/* The little of Vulkan 1.1 that the library needs. */
#pragma once
#include "zinc_attn.h"

/* The functions that the library calls, all of which come from the host's get_proc. */
#define ZA_VULKAN(X)                                                                                                   \
    X(DestroyInstance) X(EnumeratePhysicalDevices) X(GetPhysicalDeviceProperties) X(GetPhysicalDeviceProperties2)      \
    X(GetPhysicalDeviceFeatures2) X(GetPhysicalDeviceMemoryProperties) X(GetPhysicalDeviceQueueFamilyProperties)       \
    X(EnumerateDeviceExtensionProperties) X(CreateDevice) X(DestroyDevice) X(GetDeviceQueue) X(DeviceWaitIdle)         \
    X(QueueSubmit) X(QueueWaitIdle) X(CreateCommandPool) X(DestroyCommandPool) X(AllocateCommandBuffers)               \
    X(ResetCommandBuffer) X(BeginCommandBuffer) X(EndCommandBuffer) X(CreateFence) X(DestroyFence) X(WaitForFences)    \
    X(ResetFences) X(CreateDescriptorPool) X(DestroyDescriptorPool) X(ResetDescriptorPool) X(AllocateDescriptorSets)   \
    X(UpdateDescriptorSets) X(CreateDescriptorSetLayout) X(DestroyDescriptorSetLayout) X(CreatePipelineLayout)         \
    X(DestroyPipelineLayout) X(CreateShaderModule) X(DestroyShaderModule) X(CreateComputePipelines) X(DestroyPipeline) \
    X(CreateBuffer) X(DestroyBuffer) X(GetBufferMemoryRequirements) X(AllocateMemory) X(FreeMemory)                    \
    X(BindBufferMemory) X(MapMemory) X(CmdBindPipeline) X(CmdBindDescriptorSets) X(CmdDispatch) X(CmdPipelineBarrier)  \
    X(CmdCopyBuffer) X(CmdFillBuffer) X(CreatePipelineCache) X(DestroyPipelineCache) X(GetPipelineCacheData)

struct za_functions {
#define X(name) PFN_vk##name name;
    ZA_VULKAN(X)
#undef X
};
