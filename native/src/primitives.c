/* Runs the kernel `primitives` on the manifest's numbers and compares its results with the manifest's. */
#include "primitives.h"

#include <string.h>

#include "error.h"

enum { GIVEN, FOUND, BUFFERS, MOST_WORDS = 1 << 16 };

/* A list of the manifest's section `primitives`, NULL where it is none of a sane length. */
static const struct json *list(const struct manifest *m, const char *name) {
    const struct json *found = za_json_get(za_json_get(&m->root, "primitives"), name);
    return found && found->type == JSON_ARRAY && found->count && found->count <= MOST_WORDS ? found : NULL;
}

static bool run(struct gpu *gpu, const struct pipeline *pipeline, const struct buffer *buffers, uint32_t groups) {
    const struct buffer *const bound[] = {&buffers[GIVEN], &buffers[FOUND]};
    return za_commands_begin(gpu) && za_commands_dispatch(gpu, pipeline, bound, groups, 1, 1) && za_commands_submit(gpu);
}

static bool compare(const struct gpu *gpu, const struct json *results, const uint32_t *found) {
    for (size_t i = 0; i < results->count; ++i) {
        uint32_t expected;
        if (!za_json_u32(&results->items[i], &expected)) return za_fail("manifest: primitives.results[%zu] is no word", i);
        if (found[i] != expected)
            return za_fail("%s: the driver computes result %zu of the kernel primitives as 0x%08X, expected 0x%08X, so "
                           "that attention would have other bits; use another driver, or another version of it",
                           gpu->properties.deviceName, i, found[i], expected);
    }
    return true;
}

bool za_primitives_check(struct gpu *gpu, const struct manifest *m, const struct shape *shape) {
    const struct json *numbers = list(m, "numbers"), *results = list(m, "results"), *groups = list(m, "workgroups");
    struct buffer buffers[BUFFERS] = {{0}};
    struct pipeline pipeline = {0};
    struct kernel kernel = {0};
    uint32_t count;
    if (!numbers || !results || !groups || !za_json_u32(&groups->items[0], &count))
        return za_fail("%s/manifest.json: it has no primitives; export it again", m->directory);
    bool ok = za_kernel_load(m, shape, "primitives", &kernel) && za_pipeline_make(gpu, &kernel, &pipeline) &&
              za_buffer_make(gpu, 4 * numbers->count, true, "numbers", &buffers[GIVEN]) &&
              za_buffer_make(gpu, 4 * results->count, true, "results", &buffers[FOUND]);
    uint32_t *given = buffers[GIVEN].mapped;
    for (size_t i = 0; ok && i < numbers->count; ++i)
        if (!za_json_u32(&numbers->items[i], &given[i])) ok = za_fail("manifest: primitives.numbers[%zu] is no word", i);
    if (ok) memset(buffers[FOUND].mapped, 0xFF, 4 * results->count); /* NaNs, which are no results */
    ok = ok && run(gpu, &pipeline, buffers, count) && compare(gpu, results, buffers[FOUND].mapped);
    for (int i = 0; i < BUFFERS; ++i) za_buffer_free(gpu, &buffers[i]);
    za_pipeline_free(gpu, &pipeline);
    za_kernel_free(&kernel);
    return ok;
}
