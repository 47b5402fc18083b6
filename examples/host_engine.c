/* An engine on Vulkan that takes its attention from native/: its device, its memory, its command buffers.

       host_engine TOKENS >results

   The model is a toy of three layers. A layer's q is its input (4 heads of 64), K is heads 0 and 1 of the input, and V
   heads 2 and 3. The output of attention is the next layer's input, and the last output is the next token's input. So
   nothing is read back: two command buffers are recorded once, and each token is a za_step and a submission, while the
   token before may still be running. stdout: the last output (4, 64), float32, whose SHA-256 on every device is, for 70
   tokens, d8f30f3be99a919f1da4e43d8b7379306169b42ba570fe99d04b76b280c21057. */
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
#include <vulkan/vulkan.h>

#include "zinc_attn.h"

enum { LAYERS = 3, SLOTS = 2, Q_HEADS = 4, KV_HEADS = 2, DIM = 64, PAGE = 16, PAGES = 16, VALUES = Q_HEADS * DIM };

static void stop(const char *what) {
    fprintf(stderr, "host_engine: %s\n", what);
    exit(2);
}

static void check(VkResult result, const char *what) {
    if (result != VK_SUCCESS) stop(what);
}

/* --- what any Vulkan program has --------------------------------------------------------------------- */

static VkInstance instance;
static VkPhysicalDevice physical;
static VkDevice device;
static VkQueue queue;
static uint32_t family;

static struct za_device *open_device(void) {
    VkApplicationInfo application = {.sType = VK_STRUCTURE_TYPE_APPLICATION_INFO, .apiVersion = VK_API_VERSION_1_1};
    VkInstanceCreateInfo create = {.sType = VK_STRUCTURE_TYPE_INSTANCE_CREATE_INFO, .pApplicationInfo = &application};
    check(vkCreateInstance(&create, NULL, &instance), "no instance");
    uint32_t count = 1, families = 16;
    if (vkEnumeratePhysicalDevices(instance, &count, &physical) < 0 || count == 0) stop("no Vulkan device");
    VkQueueFamilyProperties properties[16];
    vkGetPhysicalDeviceQueueFamilyProperties(physical, &families, properties);
    while (family < families && !(properties[family].queueFlags & VK_QUEUE_COMPUTE_BIT)) ++family;
    VkPhysicalDeviceFeatures2 features = {.sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_FEATURES_2};
    /* An engine for Vulkan 1.3 would put its VkPhysicalDeviceVulkan13Features into the chain. */
    if (!za_wanted_features(instance, physical, vkGetInstanceProcAddr, &features)) stop(za_error());
    float priority = 1;
    VkDeviceQueueCreateInfo queues = {VK_STRUCTURE_TYPE_DEVICE_QUEUE_CREATE_INFO, NULL, 0, family, 1, &priority};
    VkDeviceCreateInfo info = {.sType = VK_STRUCTURE_TYPE_DEVICE_CREATE_INFO, .pNext = &features};
    info.queueCreateInfoCount = 1, info.pQueueCreateInfos = &queues;
    check(vkCreateDevice(physical, &info, NULL, &device), "no device");
    vkGetDeviceQueue(device, family, 0, &queue);
    const struct za_host host = {instance, physical, device, family, queue, vkGetInstanceProcAddr, &features};
    return za_device_from(&host);
}

struct memory {
    VkBuffer buffer;
    VkDeviceMemory memory;
    VkDeviceSize used;
    char *mapped;
};

/* Memory that the host sees; an engine on a graphics card would take other memory, and copy what goes in and out. */
static struct memory allocate(VkDeviceSize size) {
    const VkMemoryPropertyFlags flags = VK_MEMORY_PROPERTY_HOST_VISIBLE_BIT | VK_MEMORY_PROPERTY_HOST_COHERENT_BIT;
    const VkBufferUsageFlags copies = VK_BUFFER_USAGE_TRANSFER_SRC_BIT | VK_BUFFER_USAGE_TRANSFER_DST_BIT;
    struct memory memory = {0};
    VkBufferCreateInfo create = {.sType = VK_STRUCTURE_TYPE_BUFFER_CREATE_INFO, .size = size, .usage = copies};
    create.usage |= VK_BUFFER_USAGE_STORAGE_BUFFER_BIT;
    check(vkCreateBuffer(device, &create, NULL, &memory.buffer), "no buffer");
    VkMemoryRequirements needs;
    VkPhysicalDeviceMemoryProperties types;
    vkGetBufferMemoryRequirements(device, memory.buffer, &needs);
    vkGetPhysicalDeviceMemoryProperties(physical, &types);
    VkMemoryAllocateInfo info = {.sType = VK_STRUCTURE_TYPE_MEMORY_ALLOCATE_INFO, .allocationSize = needs.size};
    while (!(needs.memoryTypeBits >> info.memoryTypeIndex & 1) ||
           (types.memoryTypes[info.memoryTypeIndex].propertyFlags & flags) != flags)
        if (++info.memoryTypeIndex == types.memoryTypeCount) stop("no memory of that kind");
    check(vkAllocateMemory(device, &info, NULL, &memory.memory), "out of memory");
    check(vkBindBufferMemory(device, memory.buffer, memory.memory, 0), "out of memory");
    check(vkMapMemory(device, memory.memory, 0, VK_WHOLE_SIZE, 0, (void **)&memory.mapped), "not mapped");
    return memory;
}

/* The next place of a buffer; 256 bytes suit every device's alignment. */
static struct za_place place(struct memory *memory, VkDeviceSize size) {
    struct za_place next = {memory->buffer, memory->used, size};
    memory->used += (size + 255) / 256 * 256;
    return next;
}

/* --- the model --------------------------------------------------------------------------------------- */

/* values[0] is the first layer's input, values[i + 1] layer i's output, followed by room for lse, so that kernels write
   both in place; rows: K and V of the token in a layer. */
struct model {
    struct za_place values[LAYERS + 1], rows[LAYERS];
};

/* The projections of the toy: a row of KV head h is K, which is head h of the input, then V, which is head h + 2. */
static void project(VkCommandBuffer commands, struct za_place input, struct za_place rows) {
    VkBufferCopy regions[2 * KV_HEADS];
    const VkDeviceSize head = DIM * sizeof(float);
    for (uint32_t i = 0; i < 2 * KV_HEADS; ++i)
        regions[i] = (VkBufferCopy){input.offset + (i / 2 + i % 2 * KV_HEADS) * head, rows.offset + i * head, head};
    vkCmdCopyBuffer(commands, input.buffer, rows.buffer, 2 * KV_HEADS, regions);
}

/* A token through all layers. za_record brings its own barriers, which the engine's copies need, too. */
static void record(struct za_prepared *prepared, uint32_t slot, VkCommandBuffer commands, struct za_cache *cache,
                   const struct model *model) {
    const VkBufferCopy feedback = {model->values[LAYERS].offset, model->values[0].offset, VALUES * sizeof(float)};
    const VkPipelineStageFlags every = VK_PIPELINE_STAGE_ALL_COMMANDS_BIT, host = VK_PIPELINE_STAGE_HOST_BIT;
    const VkMemoryBarrier all = {VK_STRUCTURE_TYPE_MEMORY_BARRIER, NULL, VK_ACCESS_MEMORY_WRITE_BIT,
                                 VK_ACCESS_MEMORY_READ_BIT | VK_ACCESS_MEMORY_WRITE_BIT};
    VkCommandBufferBeginInfo info = {.sType = VK_STRUCTURE_TYPE_COMMAND_BUFFER_BEGIN_INFO};
    check(vkBeginCommandBuffer(commands, &info), "not recorded");
    for (uint32_t layer = 0; layer < LAYERS; ++layer) {
        const struct za_place out = model->values[layer + 1];
        const struct za_places places = {
            .rows = model->rows[layer], .q = model->values[layer], .out = out,
            .lse = {out.buffer, out.offset + VALUES * sizeof(float), Q_HEADS * sizeof(float)}};
        project(commands, places.q, places.rows);
        if (!za_record(prepared, slot, commands, cache, layer, &places)) stop(za_error());
    }
    /* The last output is the next token's input, which all later commands and the host see. */
    vkCmdCopyBuffer(commands, model->values[LAYERS].buffer, model->values[0].buffer, 1, &feedback);
    vkCmdPipelineBarrier(commands, every, every | host, 0, 1, &all, 0, NULL, 0, NULL);
    check(vkEndCommandBuffer(commands), "not recorded");
}

/* --- the run ----------------------------------------------------------------------------------------- */

/* Each token waits for the token that had its slot before, not for the previous token. */
static void decode(struct za_prepared *prepared, const VkCommandBuffer *commands, const VkFence *fences,
                   uint32_t tokens) {
    uint32_t table[PAGES];
    for (uint32_t i = 0; i < PAGES; ++i) table[i] = PAGES - 1 - i; /* the engine places pages as it likes */
    VkSubmitInfo submit = {.sType = VK_STRUCTURE_TYPE_SUBMIT_INFO, .commandBufferCount = 1};
    for (uint32_t token = 0; token < tokens; ++token) {
        const uint32_t slot = token % SLOTS;
        const struct za_request request = {
            .tokens = token + 1, .pages = PAGES, .page_table = table, .new_rows = 1, .q_len = 1};
        const struct za_call call = {.requests = 1, .request = &request};
        check(vkWaitForFences(device, 1, &fences[slot], VK_TRUE, UINT64_MAX), "lost");
        check(vkResetFences(device, 1, &fences[slot]), "lost");
        if (!za_step(prepared, slot, &call)) stop(za_error());
        submit.pCommandBuffers = &commands[slot];
        check(vkQueueSubmit(queue, 1, &submit, fences[slot]), "not submitted");
    }
}

int main(int argc, char **argv) {
    const uint32_t tokens = argc == 2 ? (uint32_t)strtoul(argv[1], NULL, 10) : UINT32_MAX;
    if (tokens > PAGE * PAGES || isatty(STDOUT_FILENO)) stop("usage: host_engine TOKENS >results, at most 256 tokens");
    struct za_device *attention = open_device();
    const struct za_options options = {Q_HEADS, KV_HEADS, DIM, .dtype = ZA_F32, .page_size = PAGE};
    struct za_attn *attn = attention ? za_open(attention, &options) : NULL;
    if (!attn) stop(za_error());
    struct memory memory = allocate(16 << 20);
    const struct za_info info = za_info(attn);
    struct za_cache_places kv = {.layers = LAYERS, .pages = PAGES};
    kv.k = place(&memory, LAYERS * PAGES * info.k_page_bytes);
    kv.v = place(&memory, LAYERS * PAGES * info.v_page_bytes);
    struct model model;
    for (uint32_t i = 0; i <= LAYERS; ++i) model.values[i] = place(&memory, (VALUES + Q_HEADS) * sizeof(float));
    for (uint32_t i = 0; i < LAYERS; ++i) model.rows[i] = place(&memory, 4 * (VkDeviceSize)info.row_words * KV_HEADS);
    struct za_cache *cache = za_cache_from(attn, &kv);
    const struct za_room room = {.slots = SLOTS, .requests = 1, .rows = 1, .new_rows = 1, .tokens = PAGE * PAGES};
    struct za_prepared *prepared = cache ? za_prepare(attn, &room) : NULL;
    if (!prepared) stop(za_error());
    VkCommandPoolCreateInfo pool_info = {VK_STRUCTURE_TYPE_COMMAND_POOL_CREATE_INFO, NULL, 0, family};
    VkCommandPool pool;
    check(vkCreateCommandPool(device, &pool_info, NULL, &pool), "no command pool");
    VkCommandBufferAllocateInfo of_pool = {
        .sType = VK_STRUCTURE_TYPE_COMMAND_BUFFER_ALLOCATE_INFO, .commandPool = pool, .commandBufferCount = SLOTS};
    VkCommandBuffer commands[SLOTS];
    VkFence fences[SLOTS];
    check(vkAllocateCommandBuffers(device, &of_pool, commands), "no command buffers");
    VkFenceCreateInfo signalled = {.sType = VK_STRUCTURE_TYPE_FENCE_CREATE_INFO, .flags = VK_FENCE_CREATE_SIGNALED_BIT};
    for (uint32_t slot = 0; slot < SLOTS; ++slot) {
        check(vkCreateFence(device, &signalled, NULL, &fences[slot]), "no fence");
        record(prepared, slot, commands[slot], cache, &model);
    }
    float *values = (float *)(void *)(memory.mapped + model.values[0].offset);
    for (int i = 0; i < VALUES; ++i) values[i] = (float)((i * 37 + 11) % 61 - 30) / 16;
    decode(prepared, commands, fences, tokens);
    check(vkDeviceWaitIdle(device), "lost");
    fwrite(values, sizeof *values, VALUES, stdout);
    za_prepared_free(prepared);
    za_cache_free(cache);
    za_close(attn);
    za_device_close(attention);
    for (uint32_t slot = 0; slot < SLOTS; ++slot) vkDestroyFence(device, fences[slot], NULL);
    vkDestroyCommandPool(device, pool, NULL);
    vkDestroyBuffer(device, memory.buffer, NULL);
    vkFreeMemory(device, memory.memory, NULL);
    vkDestroyDevice(device, NULL);
    vkDestroyInstance(instance, NULL);
    return 0;
}
