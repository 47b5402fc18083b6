/* A device, and submissions of the library's own.
   A function that returns false has set za_error (error.h). */
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
    struct za_units units; /* matrix units that are on */
    VkCommandPool pool;
    VkCommandBuffer commands; /* of the library's own submissions, one at a time */
    VkFence fence;
    bool signalled; /* the fence could not be reset */
    bool lost;      /* the driver says that the device is lost, or a submission is not known to have ended */
    bool running;   /* a submission may still run, so nothing that it uses is freed */
    atomic_flag busy;
    atomic_uint used_by; /* za_attn that are open */
    VkDescriptorSetLayout set_layouts[MAX_BINDINGS + 1]; /* by number of bindings, all storage buffers */
    VkPipelineLayout layouts[MAX_BINDINGS + 1];
    struct za_pipeline_cache cache;
};

/* Call a Vulkan function of the device. False, with za_error set, if its result is not VK_SUCCESS. */
#define za_do(device, name, ...) za_check((device)->vk.name(__VA_ARGS__), "vk" #name)

/* A thread has the device from za_enter to za_leave. za_enter is false if another thread has the device, or if the
   device is lost. za_leave returns `ok`, the result of the thread's work; a failure with ZA_LOST loses the device. */
bool za_enter(struct za_device *device);
bool za_leave(struct za_device *device, bool ok);
#define za_within(device, work) (za_enter(device) && za_leave(device, work))

/* Whether nothing that the library submitted is running, so that things may be freed. */
bool za_is_idle(struct za_device *device);

/* Commands are recorded between begin and submit. The last submission waits until the device has finished. A submission
   that is not the last does not wait, and the next submission takes another command buffer. */
bool za_begin(struct za_device *device, VkCommandBuffer commands);
bool za_submit(struct za_device *device, VkCommandBuffer commands, bool last);

/* How pass 1 uses the device's registers. */
struct registers za_device_registers(const struct za_device *device);
