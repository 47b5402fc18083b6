/* The little of Vulkan 1.1 that the operation needs: one compute queue, buffers, pipelines, one submission at a time.
   Every function that returns false has printed why; gpu_close frees whatever was made until then. */
#ifndef GPU_H
#define GPU_H

#include <stdbool.h>
#include <stdint.h>
#include <vulkan/vulkan.h>

#include "manifest.h"

enum { MAX_BINDINGS = 8, WAVE = 32 };

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
bool gpu_open(struct gpu *gpu, const char *name);
void gpu_close(struct gpu *gpu);

bool buffer_make(struct gpu *gpu, VkDeviceSize size, bool host, const char *what, struct buffer *buffer);
void buffer_free(struct gpu *gpu, struct buffer *buffer);

bool pipeline_make(struct gpu *gpu, const struct kernel *kernel, struct pipeline *pipeline);
void pipeline_free(struct gpu *gpu, struct pipeline *pipeline);

/* A pool for `sets` descriptor sets, and a set of it that binds buffers 0, 1, ... of a pipeline. */
bool sets_make(struct gpu *gpu, uint32_t sets, VkDescriptorPool *pool);
bool set_make(struct gpu *gpu, VkDescriptorPool pool, const struct pipeline *pipeline,
              const struct buffer *const buffers[], VkDescriptorSet *set);

/* Record between begin and submit; submit waits until the device has finished. */
bool commands_begin(struct gpu *gpu);
void commands_dispatch(struct gpu *gpu, const struct pipeline *pipeline, VkDescriptorSet set, uint32_t x, uint32_t y,
                       uint32_t z);
void commands_barrier(struct gpu *gpu, VkPipelineStageFlags stage, VkAccessFlags access); /* behind shader writes */
bool commands_submit(struct gpu *gpu);

#endif
