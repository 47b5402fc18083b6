// The pipelines of Kompute's algorithms, made once per device. scripts/lib/patch_kp.py includes this in Kompute's sources.
//
// Kompute makes a pipeline for each algorithm, so a driver compiles a kernel again for every recording of it. Here
// algorithms of the same code, constants and layout share one, which lives as long as the device.
#pragma once

#include <cstddef>
#include <map>
#include <mutex>
#include <string>

#include <vulkan/vulkan.h>

namespace zinc_attn {

// A pipeline and the layouts that it was made with, which are compatible with those of every algorithm of its key.
struct SharedPipeline
{
    VkPipeline pipeline;
    VkPipelineLayout layout;
    VkDescriptorSetLayout sets;
};

struct SharedPipelines
{
    std::mutex mutex;
    std::map<VkDevice, std::map<std::string, SharedPipeline>> of_device;
};

inline SharedPipelines&
shared_pipelines()
{
    static SharedPipelines all;
    return all;
}

inline void
append(std::string& key, const void* data, std::size_t size)
{
    key.append(reinterpret_cast<const char*>(&size), sizeof(size));
    key.append(static_cast<const char*>(data), size);
}

// The pipeline of a key, which `make` returns as a SharedPipeline where the device has none. `made` says whether it was
// called: then the layouts are the table's, too.
template<typename Make>
VkPipeline
shared_pipeline(VkDevice device, const std::string& key, bool& made, Make make)
{
    const std::lock_guard<std::mutex> lock(shared_pipelines().mutex);
    auto& known = shared_pipelines().of_device[device];
    auto at = known.find(key);
    made = at == known.end();
    if (made) {
        at = known.emplace(key, make()).first;
    }
    return at->second.pipeline;
}

// Destroy the pipelines of a device that is about to be destroyed.
inline void
forget_pipelines(VkDevice device)
{
    const std::lock_guard<std::mutex> lock(shared_pipelines().mutex);
    for (const auto& one : shared_pipelines().of_device[device]) {
        vkDestroyPipeline(device, one.second.pipeline, nullptr);
        vkDestroyPipelineLayout(device, one.second.layout, nullptr);
        vkDestroyDescriptorSetLayout(device, one.second.sets, nullptr);
    }
    shared_pipelines().of_device.erase(device);
}

}
