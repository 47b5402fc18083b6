/* Functions of Vulkan in front of libvulkan's. They make chosen calls fail, count calls by name, and count the objects
   that live.

   faults.py writes wrappers.h, which has a function for each that the package or the C library calls. A program takes
   them in libvulkan's place where this library is preloaded or linked before libvulkan. It is for one thread at a time.
   ZINC_ATTN_FAULT="FUNCTION NTH RESULT CARRY_OUT PERSISTENT" arms a fault as the program starts. */
#define _GNU_SOURCE
#define VK_NO_PROTOTYPES
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <vulkan/vulkan.h>

enum mode { PASS, REFUSE, CARRY_OUT };
static enum mode enter(int function, VkResult *result);

/* Commands that were submitted and not waited for; misused: how often such a command buffer was begun again. */
static VkCommandBuffer pending[64];
static int pendings;
long fault_misused;
static void begin(VkCommandBuffer c) {
    for (int i = 0; i < pendings && i < 64; i++) fault_misused += pending[i] == c;
}
static void submit(uint32_t n, const VkSubmitInfo *s) {
    for (uint32_t i = 0; i < n; i++) pending[pendings++ % 64] = s[i].pCommandBuffers[0];
}

#include "wrappers.h" /* NAMES, COUNT, OWN, fault_next, fault_calls, fault_live */

static struct {
    int function, result, carry_out, persistent, fired;
    long countdown;
} faults[16];
static int armed;
int fault_fired; /* how many calls were hit since fault_disarm */

static int find(const char *name) {
    int i = 0;
    while (i < COUNT && strcmp(NAMES[i], name)) i++;
    return i;
}

static enum mode enter(int function, VkResult *result) {
    fault_calls[function]++;
    for (int i = 0; i < armed; i++) {
        if (function != faults[i].function || (faults[i].fired && !faults[i].persistent)) continue;
        if (!faults[i].fired && --faults[i].countdown > 0) continue;
        faults[i].fired = 1;
        fault_fired++;
        *result = faults[i].result;
        return faults[i].carry_out ? CARRY_OUT : REFUSE;
    }
    return PASS;
}

/* From now on the n-th call (from 1) of a function returns `result`; and all later ones if persistent. Up to 16. */
void fault_arm(const char *function, long n, int result, int carry_out, int persistent) {
    if (find(function) == COUNT) abort(); /* a test names what is not there */
    faults[armed].function = find(function);
    faults[armed].countdown = n;
    faults[armed].result = result;
    faults[armed].carry_out = carry_out;
    faults[armed].persistent = persistent;
    faults[armed++].fired = 0;
}
void fault_disarm(void) { armed = fault_fired = 0; }

static PFN_vkGetInstanceProcAddr of_instance;
static PFN_vkGetDeviceProcAddr of_device;
PFN_vkVoidFunction vkGetInstanceProcAddr(VkInstance instance, const char *name) {
    const int i = find(name);
    return i < COUNT && fault_next[i] ? OWN[i] : of_instance(instance, name);
}
PFN_vkVoidFunction vkGetDeviceProcAddr(VkDevice device, const char *name) {
    const int i = find(name);
    return i < COUNT && fault_next[i] ? OWN[i] : of_device(device, name);
}

__attribute__((constructor)) static void start(void) {
    void *loader = dlopen("libvulkan.so.1", RTLD_NOW);
    char function[64];
    int fields[4];
    of_instance = (PFN_vkGetInstanceProcAddr)dlsym(loader, "vkGetInstanceProcAddr");
    of_device = (PFN_vkGetDeviceProcAddr)dlsym(loader, "vkGetDeviceProcAddr");
    for (int i = 0; i < COUNT; i++) fault_next[i] = (PFN_vkVoidFunction)dlsym(loader, NAMES[i]);
    const char *wish = getenv("ZINC_ATTN_FAULT");
    if (wish && sscanf(wish, "%63s %d %d %d %d", function, fields, fields + 1, fields + 2, fields + 3) == 5)
        fault_arm(function, fields[0], fields[1], fields[2], fields[3]);
}

/* Blocks of memory that a library has and did not free; it is linked with ld --wrap of these names. */
_Atomic long fault_blocks;
void *__wrap_malloc(size_t size) {
    void *made = malloc(size);
    fault_blocks += made != NULL;
    return made;
}
void *__wrap_calloc(size_t count, size_t size) {
    void *made = calloc(count, size);
    fault_blocks += made != NULL;
    return made;
}
void *__wrap_realloc(void *block, size_t size) {
    void *made = realloc(block, size);
    fault_blocks += !block && made;
    return made;
}
void __wrap_free(void *block) {
    fault_blocks -= block != NULL;
    free(block);
}
