/* Buffers, pipelines and descriptor sets. Every function that returns false has said why, see error.h. What is freed is
   freed once the library's submissions have ended; where that cannot be known, it is left to the driver. */
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

/* Descriptor sets of recorded dispatches, until they are all taken back. Pools of SETS are added as they are needed. */
enum { SETS = 48 };
struct sets {
    VkDescriptorPool *pools; /* (count) */
    uint32_t count, taken;   /* taken: sets, which fill the pools one after another */
};

/* A dispatch. Its barriers follow from what it reads and writes (levels.h), but for one: `beside`. */
struct za_command {
    const struct kernel *kernel;
    VkPipeline pipeline;
    struct za_place place[MAX_BINDINGS]; /* `size` is what the kernel sees */
    uint32_t groups[3];
    bool independent;       /* writes other parts of what the command before it writes, for which it does not wait */
    uint64_t products; /* multiplications, by which the time of a submission is bounded; 0: few */
    uint32_t level;    /* by za_level, as is all that follows */
    const struct kernel *awaited; /* the command's for which it waits, and the bytes that both use; NULL: for none */
    struct za_place met;
};

/* Memory of a type that has the flags; it is mapped where they say that the host sees it. A failure leaves nothing. */
enum { MAPPED = VK_MEMORY_PROPERTY_HOST_VISIBLE_BIT | VK_MEMORY_PROPERTY_HOST_COHERENT_BIT };
bool za_memory_make(struct za_device *device, VkDeviceSize size, VkMemoryPropertyFlags flags, const char *what,
                    struct buffer *buffer);
/* The host's own memory, which is not freed with the buffer; the processor alone takes it. */
bool za_memory_import(struct za_device *device, void *bytes, VkDeviceSize size, struct buffer *buffer);
/* What a kernel binds whole. host: memory that the host writes, or else the device's own. */
bool za_buffer_make(struct za_device *device, VkDeviceSize size, bool host, const char *what, struct buffer *buffer);
void za_buffer_free(struct za_device *device, struct buffer *buffer);

/* constants: the kernel's struct of them, or NULL where it has none. */
bool za_pipeline_make(struct za_device *device, const struct kernel *kernel, const void *constants,
                      struct pipeline *pipeline);
void za_pipeline_free(struct za_device *device, struct pipeline *pipeline);

bool za_sets_reset(struct za_device *device, struct sets *sets);
void za_sets_free(struct za_device *device, struct sets *sets);

/* A dispatch; `places` are in the order of the pipeline's bindings, whose sizes are the ranges that it sees. */
struct za_command za_command(const struct pipeline *pipeline, const struct za_place *places, const uint32_t groups[3]);
bool za_dispatch(struct za_device *device, VkCommandBuffer commands, struct sets *sets,
                 const struct za_command *command);

/* Its parts, where sets are used again: take a set, write the command's places, record. */
bool za_set_take(struct za_device *device, struct sets *sets, uint32_t bindings, VkDescriptorSet *set);
void za_set_write(struct za_device *device, VkDescriptorSet set, const struct za_command *command);
void za_dispatch_with(struct za_device *device, VkCommandBuffer commands, const struct za_command *command,
                      VkDescriptorSet set);

/* What was `written` in the stages `before` is there for `used` in the stages `behind`. */
void za_barrier(const struct za_device *device, VkCommandBuffer commands, VkPipelineStageFlags source,
                VkAccessFlags writes, VkPipelineStageFlags target, VkAccessFlags uses);

/* Barriers around what the library records. After the first one all that was written before is seen, and all that was
   read may be written; after the second one all commands and the host see what the library wrote. */
void za_barrier_before(const struct za_device *device, VkCommandBuffer commands);
void za_barrier_behind(const struct za_device *device, VkCommandBuffer commands);

/* Between dispatches of two levels, of which the second begins with `next`. ZINC_ATTN_LOG=barriers: a line on stderr
   says for what it waits. */
void za_barrier_between(const struct za_device *device, VkCommandBuffer commands, const struct za_command *next);

/* The whole of a buffer. */
struct za_place za_whole(const struct buffer *buffer);
