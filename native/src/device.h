/* A device, and submissions of the library's own.
   Every function that returns false has said why, see error.h. */
#pragma once

#ifdef __cplusplus
#include <atomic>
using std::atomic_flag; /* of the same size as C's */
using std::atomic_uint;
#else
#include <stdatomic.h>
#endif
#include <stdbool.h>
#include <stdint.h>

#include "error.h"
#include "functions.h"
#include "pipeline_cache.h"
#include "units.h"
#include "zinc_attn.h"
#include "zinc_contract.h"

struct za_device {
    struct za_host host;
    bool owned; /* the library made it */
    bool processor; /* native code of the host, not Vulkan */
    struct za_functions vk;
    VkPhysicalDeviceProperties properties;
    VkPhysicalDeviceMemoryProperties memory;
    bool wave32; /* pipelines ask for subgroups of 32 */
    bool dots;   /* the integer dot product is on, in a device that the library made */
    struct za_units units; /* and so are these */
    VkCommandPool pool;
    VkCommandBuffer commands; /* of the library's own submissions, one at a time */
    VkFence fence;
    bool signalled; /* the fence could not be reset */
    bool lost;      /* the driver says so, or a submission is not known to have ended */
    bool running;   /* and may be running still: what it uses is not freed */
    atomic_flag busy;
    atomic_uint used_by; /* za_attn that are open */
    VkDescriptorSetLayout set_layouts[MAX_BINDINGS + 1]; /* by number of bindings, all storage buffers */
    VkPipelineLayout layouts[MAX_BINDINGS + 1];
    struct za_pipeline_cache cache;
};

/* Call a function of the device's that gives a VkResult. False, and why, where it is not VK_SUCCESS. */
#define za_do(device, name, ...) za_check((device)->vk.name(__VA_ARGS__), "vk" #name)

/* Between these two a thread has the device. za_enter is false where another one has it, or it is lost; za_leave gives
   what the thread's work came to, and a failure of ZA_LOST loses the device. */
bool za_enter(struct za_device *device);
bool za_leave(struct za_device *device, bool ok);
#define za_within(device, work) (za_enter(device) && za_leave(device, work))

/* Whether nothing that the library submitted is running, so that things may be freed. */
bool za_is_idle(struct za_device *device);

/* Record between begin and submit. The last submission waits until the device has finished; after one that is not the
   last, the next is of another command buffer. */
bool za_begin(struct za_device *device, VkCommandBuffer commands);
bool za_submit(struct za_device *device, VkCommandBuffer commands, bool last);
bool za_commands_begin(struct za_device *device); /* of device->commands */
bool za_commands_submit(struct za_device *device);

/* How pass 1 lies in its registers. */
struct registers za_device_registers(const struct za_device *device);
