// Included before every source file of Kompute's binding (kp) by scripts/build_kp.sh.
//
// Kompute calls most of Vulkan through the pointer overloads of vulkan.hpp and drops the VkResult: a wait that failed
// looks like a finished one, a submission that failed is waited for without end, and an allocation that failed is
// written to. Here every such function gets a twin that throws std::runtime_error, which pybind11 makes a Python
// RuntimeError, and the macros below put the twin in the function's place, in vulkan.hpp as in Kompute's own code.
//
// A function that Kompute calls in a destructor must not throw, so vkFlushMappedMemoryRanges is not in the list; it is
// called for coherent memory alone, where it has nothing to do. vkDestroy and vkFree functions return nothing.
#pragma once

namespace zinc_attn {
struct Access; // of kp_zinc_attn.hpp, which Kompute's classes name as a friend
}

#if __has_include(<vulkan/vulkan.h>) // a source file without Vulkan on its include path makes no Vulkan call

#include <stdexcept>
#include <string>

#include <vulkan/vulkan.h>

namespace zinc_attn {

inline VkResult
checked(const char* function, VkResult result)
{
    // VK_TIMEOUT throws, too: Kompute would take the sequence for a finished one and destroy its fence. After a throw
    // the sequence still runs, and eval_await() can wait for it again.
    if (result < 0 || result == VK_TIMEOUT) {
        throw std::runtime_error("zinc_attn: " + std::string(function) + ": VkResult " +
                                 std::to_string(static_cast<int>(result)));
    }
    return result;
}

}

#define ZINC_ATTN_CHECKED(function)                                                                                    \
    template<typename... Arguments>                                                                                    \
    inline VkResult checked_##function(Arguments... arguments)                                                         \
    {                                                                                                                  \
        return zinc_attn::checked(#function, ::function(arguments...));                                                \
    }

ZINC_ATTN_CHECKED(vkCreateInstance)
ZINC_ATTN_CHECKED(vkEnumeratePhysicalDevices)
ZINC_ATTN_CHECKED(vkEnumerateDeviceExtensionProperties)
ZINC_ATTN_CHECKED(vkEnumerateInstanceLayerProperties)
ZINC_ATTN_CHECKED(vkCreateDevice)
ZINC_ATTN_CHECKED(vkCreateCommandPool)
ZINC_ATTN_CHECKED(vkAllocateCommandBuffers)
ZINC_ATTN_CHECKED(vkBeginCommandBuffer)
ZINC_ATTN_CHECKED(vkEndCommandBuffer)
ZINC_ATTN_CHECKED(vkCreateFence)
ZINC_ATTN_CHECKED(vkQueueSubmit)
ZINC_ATTN_CHECKED(vkWaitForFences)
ZINC_ATTN_CHECKED(vkCreateQueryPool)
ZINC_ATTN_CHECKED(vkGetQueryPoolResults)
ZINC_ATTN_CHECKED(vkCreateBuffer)
ZINC_ATTN_CHECKED(vkAllocateMemory)
ZINC_ATTN_CHECKED(vkBindBufferMemory)
ZINC_ATTN_CHECKED(vkMapMemory)
ZINC_ATTN_CHECKED(vkCreateDescriptorPool)
ZINC_ATTN_CHECKED(vkCreateDescriptorSetLayout)
ZINC_ATTN_CHECKED(vkAllocateDescriptorSets)
ZINC_ATTN_CHECKED(vkCreateShaderModule)
ZINC_ATTN_CHECKED(vkCreatePipelineLayout)
ZINC_ATTN_CHECKED(vkCreatePipelineCache)
ZINC_ATTN_CHECKED(vkCreateComputePipelines)

#define vkCreateInstance checked_vkCreateInstance
#define vkEnumeratePhysicalDevices checked_vkEnumeratePhysicalDevices
#define vkEnumerateDeviceExtensionProperties checked_vkEnumerateDeviceExtensionProperties
#define vkEnumerateInstanceLayerProperties checked_vkEnumerateInstanceLayerProperties
#define vkCreateDevice checked_vkCreateDevice
#define vkCreateCommandPool checked_vkCreateCommandPool
#define vkAllocateCommandBuffers checked_vkAllocateCommandBuffers
#define vkBeginCommandBuffer checked_vkBeginCommandBuffer
#define vkEndCommandBuffer checked_vkEndCommandBuffer
#define vkCreateFence checked_vkCreateFence
#define vkQueueSubmit checked_vkQueueSubmit
#define vkWaitForFences checked_vkWaitForFences
#define vkCreateQueryPool checked_vkCreateQueryPool
#define vkGetQueryPoolResults checked_vkGetQueryPoolResults
#define vkCreateBuffer checked_vkCreateBuffer
#define vkAllocateMemory checked_vkAllocateMemory
#define vkBindBufferMemory checked_vkBindBufferMemory
#define vkMapMemory checked_vkMapMemory
#define vkCreateDescriptorPool checked_vkCreateDescriptorPool
#define vkCreateDescriptorSetLayout checked_vkCreateDescriptorSetLayout
#define vkAllocateDescriptorSets checked_vkAllocateDescriptorSets
#define vkCreateShaderModule checked_vkCreateShaderModule
#define vkCreatePipelineLayout checked_vkCreatePipelineLayout
#define vkCreatePipelineCache checked_vkCreatePipelineCache
#define vkCreateComputePipelines checked_vkCreateComputePipelines

#endif

// vulkan.hpp declares its dispatcher and its pointer overloads noexcept, through which no exception can pass.
#define VULKAN_HPP_NOEXCEPT
#define VULKAN_HPP_NOEXCEPT_WHEN_NO_EXCEPTIONS
