/* The driver's pipeline cache, which a file keeps between processes: at the place and in the format that
   zinc_attn/runtime/vulkan/pipeline_cache.py has. No function here fails: what cannot be read is compiled again. */
#pragma once
#include "functions.h"

struct za_pipeline_cache {
    VkPipelineCache handle; /* VK_NULL_HANDLE where the driver makes none */
    char file[4096];        /* "" where there is no folder for it */
    uint32_t sum;           /* of the data in the file; 0: there are none */
    uint32_t pending;       /* 2 after a pipeline was made; each call takes 1 off, and the one that comes to 0 saves */
};

/* With the data of the file, if this driver wrote them for this device. */
void za_pipeline_cache_open(struct za_pipeline_cache *cache, const struct za_functions *vk, VkDevice device,
                            const VkPhysicalDeviceProperties *properties);

/* Write the driver's data to the file, unless they are there. */
void za_pipeline_cache_save(struct za_pipeline_cache *cache, const struct za_functions *vk, VkDevice device);
