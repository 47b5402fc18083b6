#define _DEFAULT_SOURCE /* flock */
#include "pipeline_cache.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

/* A file: MAGIC, the CRC-32 of the driver's data, and the data, which begin with a header. */
#define MAGIC "zinc_attn pipeline cache 2\n"
enum { SUM = sizeof MAGIC - 1, DATA = SUM + 4, HEADER = sizeof(VkPipelineCacheHeaderVersionOne), MOST = 1 << 28 };

static uint32_t crc32_of(const unsigned char *data, size_t size) {
    uint32_t crc = UINT32_MAX;
    for (size_t i = 0; i < size; ++i) {
        crc ^= data[i];
        for (int bit = 0; bit < 8; ++bit) crc = crc >> 1 ^ (crc & 1 ? 0xEDB88320 : 0);
    }
    return ~crc;
}

static void find_file(struct za_pipeline_cache *cache, const VkPhysicalDeviceProperties *p) {
    static const char *const places[][2] = {
        {"ZINC_ATTN_CACHE_DIR", ""}, {"XDG_CACHE_HOME", "/zinc_attn"}, {"HOME", "/.cache/zinc_attn"}};
    const char *folder = NULL;
    int i = 0, size = 0;
    while (i < 3 && (!(folder = getenv(places[i][0])) || !*folder)) ++i;
    if (i == 0 || (i < 3 && *folder == '/')) /* a folder of the user's counts only if it is absolute */
        size = snprintf(cache->file, sizeof cache->file, "%s%s/pipelines/%08x-%08x-%08x-%08x.bin", folder, places[i][1],
                        p->vendorID, p->deviceID, p->driverVersion, crc32_of(p->pipelineCacheUUID, VK_UUID_SIZE));
    if (size >= (int)sizeof cache->file) *cache->file = 0;
}

/* Read the file of the driver's data for the device: *size bytes, to be freed. NULL: it is missing or another file. */
static unsigned char *read_file(const char *path, const VkPhysicalDeviceProperties *p, size_t *size) {
    const uint32_t version = VK_PIPELINE_CACHE_HEADER_VERSION_ONE;
    VkPipelineCacheHeaderVersionOne header = {HEADER, version, p->vendorID, p->deviceID, {0}};
    struct stat status;
    memcpy(header.pipelineCacheUUID, p->pipelineCacheUUID, VK_UUID_SIZE);
    const int file = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    const bool fits = file >= 0 && fstat(file, &status) == 0 && S_ISREG(status.st_mode) &&
                      status.st_size >= DATA + HEADER && status.st_size <= MOST;
    unsigned char *bytes = fits ? calloc(1, *size = (size_t)status.st_size) : NULL;
    const uint32_t sum = bytes && read(file, bytes, *size) == (ssize_t)*size ? crc32_of(bytes + DATA, *size - DATA) : 0;
    if (file >= 0) close(file);
    if (bytes && memcmp(bytes, MAGIC, SUM) == 0 && memcmp(bytes + SUM, &sum, sizeof sum) == 0 &&
        memcmp(bytes + DATA, &header, HEADER) == 0)
        return bytes;
    free(bytes);
    return NULL;
}

/* Write a file with another name, which all processes share, and rename it, so that no process sees a part of it. A
   process that cannot lock the file writes nothing. A part that a killed process left is overwritten. */
static bool write_file(struct za_pipeline_cache *cache, const unsigned char *bytes, size_t size) {
    char *path = cache->file, unfinished[sizeof cache->file];
    struct stat named, opened;
    for (char *end = path; (end = strchr(end + 1, '/')); *end = '/') {
        *end = 0;
        mkdir(path, 0777);
    }
    strcpy(unfinished, path);
    strcpy(strrchr(unfinished, '/') + 1, "unfinished");
    const int file = open(unfinished, O_WRONLY | O_CREAT | O_CLOEXEC | O_NONBLOCK | O_NOFOLLOW, 0600);
    const bool locked = file >= 0 && flock(file, LOCK_EX | LOCK_NB) == 0 && fstat(file, &opened) == 0 &&
                        stat(unfinished, &named) == 0 && named.st_ino == opened.st_ino; /* not renamed since */
    const bool ok = locked && ftruncate(file, 0) == 0 && write(file, bytes, size) == (ssize_t)size &&
                    rename(unfinished, path) == 0;
    if (locked && !ok) unlink(unfinished);
    if (file >= 0) close(file);
    return ok;
}

void za_pipeline_cache_open(struct za_pipeline_cache *cache, const struct za_functions *vk, VkDevice device,
                            const VkPhysicalDeviceProperties *properties) {
    size_t size = DATA;
    find_file(cache, properties);
    unsigned char *bytes = read_file(cache->file, properties, &size);
    if (bytes) memcpy(&cache->sum, bytes + SUM, sizeof cache->sum);
    const VkPipelineCacheCreateInfo create = {
        .sType = VK_STRUCTURE_TYPE_PIPELINE_CACHE_CREATE_INFO,
        .initialDataSize = bytes ? size - DATA : 0,
        .pInitialData = bytes ? bytes + DATA : NULL,
    };
    if (vk->CreatePipelineCache(device, &create, NULL, &cache->handle) != VK_SUCCESS) cache->handle = VK_NULL_HANDLE;
    free(bytes);
}

void za_pipeline_cache_save(struct za_pipeline_cache *cache, const struct za_functions *vk, VkDevice device) {
    size_t size = 0;
    cache->pending = 0;
    if (!cache->handle || !*cache->file || vk->GetPipelineCacheData(device, cache->handle, &size, NULL) != VK_SUCCESS)
        return;
    unsigned char *bytes = size > HEADER ? calloc(1, DATA + size) : NULL;
    if (bytes && vk->GetPipelineCacheData(device, cache->handle, &size, bytes + DATA) == VK_SUCCESS) {
        const uint32_t sum = crc32_of(bytes + DATA, size);
        memcpy(bytes, MAGIC, SUM);
        memcpy(bytes + SUM, &sum, sizeof sum);
        if (sum != cache->sum && write_file(cache, bytes, DATA + size)) cache->sum = sum;
    }
    free(bytes);
}
