/* The little of Vulkan 1.1 that the operation needs: one compute queue, buffers, pipelines, one submission at a time.
   Every function that returns false has said why, see error.h; za_gpu_close frees whatever was made until then. */
#ifndef GPU_H
#define GPU_H

#include <stdbool.h>
#include <stdint.h>
#include <vulkan/vulkan.h>

#include "manifest.h"

enum { MAX_BINDINGS = 8, MAX_SETS = 4, WAVE = 32 };

struct gpu {
    uint32_t api; /* Vulkan version that the instance was made for */
    VkInstance instance;
    VkPhysicalDevice physical;
    VkPhysicalDeviceProperties properties;
    VkPhysicalDeviceMemoryProperties memory;
    bool wave32; /* pipelines ask for subgroups of 32 */
    VkDevice device;
    VkQueue queue;
    VkCommandPool pool;
    VkCommandBuffer commands;
    VkFence fence;
    VkDescriptorPool sets; /* of one submission */
    bool lost;             /* a submission was made, and is not known to have ended */
    VkDescriptorSetLayout set_layouts[MAX_BINDINGS + 1]; /* by number of bindings, all storage buffers */
    VkPipelineLayout layouts[MAX_BINDINGS + 1];
};

struct buffer {
    VkBuffer handle;
    VkDeviceMemory memory;
    VkDeviceSize size;
    void *mapped; /* NULL for device memory that the host does not see */
};

struct pipeline {
    VkPipeline handle;
    uint32_t bindings;
};

/* name: a piece of the wanted device's name, or NULL for the best: discrete, integrated, others. */
bool za_gpu_open(struct gpu *gpu, const char *name);
void za_gpu_close(struct gpu *gpu);

bool za_buffer_make(struct gpu *gpu, VkDeviceSize size, bool host, const char *what, struct buffer *buffer);
void za_buffer_free(struct gpu *gpu, struct buffer *buffer);

bool za_pipeline_make(struct gpu *gpu, const struct kernel *kernel, struct pipeline *pipeline);
void za_pipeline_free(struct gpu *gpu, struct pipeline *pipeline);

/* Record between begin and submit, at most MAX_SETS dispatches; `buffers` are in the order of the pipeline's bindings.
   A barrier lets what shaders wrote be seen by later stages. Submit waits until the device has finished; then the host
   and all later submissions see what was written. */
bool za_commands_begin(struct gpu *gpu);
bool za_commands_dispatch(struct gpu *gpu, const struct pipeline *pipeline, const struct buffer *const buffers[],
                          uint32_t x, uint32_t y, uint32_t z);
void za_commands_barrier(struct gpu *gpu, VkPipelineStageFlags stages, VkAccessFlags access);
bool za_commands_submit(struct gpu *gpu);

const char *za_result_name(VkResult result);
bool za_check(VkResult result, const char *what);

#endif
