// The C library's device and objects, for C++.
#ifndef ZINC_GRAPH_VULKAN_H
#define ZINC_GRAPH_VULKAN_H

#include "device.h"
extern "C" {
#include "error.h"
#include "objects.h"
#include "zinc_graph.h"
}
#ifndef LAID_H  // until branch attn is merged
#include <cstring>
struct za_command {
    VkPipeline pipeline;
    VkPipelineLayout layout;
    VkDescriptorSetLayout set_layout; /* of storage buffers 0, 1, ..., `bindings` of them */
    uint32_t bindings;
    uint32_t written;                    /* bit i: binding i is written; all others are read */
    struct za_place place[MAX_BINDINGS]; /* `size` is what the kernel sees */
    uint32_t groups[3];
    bool beside;       /* writes other parts of what the command before it writes; no barrier between the two */
    uint64_t products; /* multiplications, by which the time of a submission is bounded; 0: few */
};
inline struct za_command za_command(const struct za_device *device, const struct pipeline *pipeline,
                             const struct za_place *places, uint32_t written, const uint32_t groups[3]) {
    struct za_command command = {};
    command.pipeline = pipeline->handle;
    command.layout = device->layouts[pipeline->bindings];
    command.bindings = pipeline->bindings;
    command.written = written;
    memcpy(command.place, places, pipeline->bindings * sizeof *places);
    memcpy(command.groups, groups, sizeof command.groups);
    return command;
}
inline bool za_dispatch(struct za_device *device, VkCommandBuffer commands, struct sets *sets,
                 const struct za_command *command) {
    struct pipeline p = {command->pipeline, command->bindings};
    return za_dispatch(device, commands, sets, &p, command->place, command->groups);
}
#endif

#endif
