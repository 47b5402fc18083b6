/* Buffers, pipelines and descriptor sets. A function that returns false has set za_error (error.h). Objects are freed
   after the library's submissions have ended. If it is not known that they have ended, the objects are not freed. */
#pragma once
#include "device.h"

struct buffer {
    VkBuffer handle;
    VkDeviceMemory memory;
    VkDeviceSize size;
    void *mapped; /* NULL for device memory that the host does not see */
};

struct pipeline {
    VkPipeline handle;
    const struct kernel *kernel;
};

/* Descriptor sets of recorded dispatches, which are all given back at once. Pools of SETS sets are added as needed. */
enum { SETS = 48 };
struct sets {
    VkDescriptorPool *pools; /* (count) */
    uint32_t count, taken;   /* taken: sets, which fill the pools one after another */
};

/* A dispatch. Its barriers follow from its reads and writes (levels.h), except for an independent dispatch. */
struct za_command {
    const struct kernel *kernel;
    VkPipeline pipeline;
    struct za_place place[MAX_BINDINGS]; /* `size` is what the kernel sees */
    uint32_t groups[3];
    bool independent;  /* writes other parts of the same result than the command before it, and does not wait for it */
    uint64_t products; /* multiplications, which bound the time of a submission; 0: few */
    /* set by za_level: */
    uint32_t level;
    const struct kernel *awaited; /* the kernel of a command for which it waits; NULL: it waits for none */
    struct za_place met;          /* bytes that both commands use */
};

/* A buffer in memory with the flags, mapped if the flags make it visible to the host. A failure leaves nothing. */
enum { MAPPED = VK_MEMORY_PROPERTY_HOST_VISIBLE_BIT | VK_MEMORY_PROPERTY_HOST_COHERENT_BIT };
bool za_memory_make(struct za_device *device, VkDeviceSize size, VkMemoryPropertyFlags flags, const char *what,
                    struct buffer *buffer);
/* The host's own memory, which is not freed with the buffer; the processor alone takes it. */
bool za_memory_import(struct za_device *device, void *bytes, VkDeviceSize size, struct buffer *buffer);
/* A buffer that a kernel binds whole. host: in memory that the host writes; otherwise in the device's own memory. */
bool za_buffer_make(struct za_device *device, VkDeviceSize size, bool host, const char *what, struct buffer *buffer);
void za_buffer_free(struct za_device *device, struct buffer *buffer);

/* constants: the kernel's struct of constants, or NULL if it has none. */
bool za_pipeline_make(struct za_device *device, const struct kernel *kernel, const void *constants,
                      struct pipeline *pipeline);
void za_pipeline_free(struct za_device *device, struct pipeline *pipeline);

bool za_sets_reset(struct za_device *device, struct sets *sets);
void za_sets_free(struct za_device *device, struct sets *sets);

/* A dispatch. `places` are in the order of the pipeline's bindings. */
struct za_command za_command(const struct pipeline *pipeline, const struct za_place *places, const uint32_t groups[3]);
bool za_dispatch(struct za_device *device, VkCommandBuffer commands, struct sets *sets,
                 const struct za_command *command);

/* The steps of za_dispatch, for a caller that uses sets again: take a set, write the command's places, record. */
bool za_set_take(struct za_device *device, struct sets *sets, uint32_t bindings, VkDescriptorSet *set);
void za_set_write(struct za_device *device, VkDescriptorSet set, const struct za_command *command);
void za_dispatch_with(struct za_device *device, VkCommandBuffer commands, const struct za_command *command,
                      VkDescriptorSet set);

/* A barrier: accesses `uses` of the stages `target` see what accesses `writes` of the stages `source` wrote. */
void za_barrier(const struct za_device *device, VkCommandBuffer commands, VkPipelineStageFlags source,
                VkAccessFlags writes, VkPipelineStageFlags target, VkAccessFlags uses);

/* Barriers around the library's commands. After the first barrier these commands see all earlier writes, and may write
   bytes that were read before. After the second barrier all commands and the host see what the library wrote. */
void za_barrier_before(const struct za_device *device, VkCommandBuffer commands);
void za_barrier_after(const struct za_device *device, VkCommandBuffer commands);

/* A barrier between two levels; `next` is the first dispatch of the second level. With ZINC_ATTN_LOG=barriers a line on
   stderr says for which kernel it waits. */
void za_barrier_between(const struct za_device *device, VkCommandBuffer commands, const struct za_command *next);

/* The whole of a buffer. */
struct za_place za_whole(const struct buffer *buffer);
