/* The driver's pipeline cache, which a file keeps between processes: the file of
   zinc_attn/runtime/vulkan/pipeline_cache.py. No function fails: without the file, pipelines are compiled again. */
#pragma once
#include "functions.h"

struct za_pipeline_cache {
    VkPipelineCache handle; /* VK_NULL_HANDLE where the driver makes none */
    char file[4096];        /* "" where there is no folder for it */
    uint32_t sum;           /* the CRC-32 of the data in the file; 0: there is no file */
    uint32_t pending;       /* 2 after a pipeline was made; each call subtracts 1, and the call that reaches 0 saves */
};

/* Make the cache, with the file's data if this driver wrote them for this device. */
void za_pipeline_cache_open(struct za_pipeline_cache *cache, const struct za_functions *vk, VkDevice device,
                            const VkPhysicalDeviceProperties *properties);

/* Write the driver's data to the file, unless the file has them. */
void za_pipeline_cache_save(struct za_pipeline_cache *cache, const struct za_functions *vk, VkDevice device);
