/* Runs the kernels `primitives` and `multiply_add` on the contract's numbers and compares with its results. */
#include "primitives.h"

#include <string.h>

#include "error.h"
#include "objects.h"

enum { NUMBERS, RESULTS, BUFFERS };

static bool run(struct za_device *device, const struct pipeline *pipeline, const struct buffer *buffers,
                uint32_t groups) {
    const struct za_place places[] = {za_whole(&buffers[NUMBERS]), za_whole(&buffers[RESULTS])};
    struct sets sets = {0};
    const struct za_command command = za_command(pipeline, places, (const uint32_t[]){groups, 1, 1});
    bool ok = za_begin(device, device->commands) && za_dispatch(device, device->commands, &sets, &command);
    if (ok) za_barrier_after(device, device->commands);
    ok = ok && za_submit(device, device->commands, true);
    za_sets_free(device, &sets);
    return ok;
}

/* constants: the kernel's, or NULL if it has none. False: za_error says why. *wrong: a result differs. */
static bool ask(struct za_device *device, const struct question *q, const void *constants, bool *wrong) {
    struct buffer buffers[BUFFERS] = {{0}};
    struct pipeline pipeline = {0};
    const size_t number_bytes = 4 * (size_t)q->number_count, result_bytes = 4 * (size_t)q->result_count;
    bool ok = za_pipeline_make(device, &za_kernels[q->kernel], constants, &pipeline) &&
              za_buffer_make(device, number_bytes, true, "numbers", &buffers[NUMBERS]) &&
              za_buffer_make(device, result_bytes, true, "results", &buffers[RESULTS]);
    if (ok) {
        memcpy(buffers[NUMBERS].mapped, q->numbers, number_bytes);
        memset(buffers[RESULTS].mapped, 0xFF, result_bytes); /* NaNs, so that a missing result is noticed */
    }
    ok = ok && run(device, &pipeline, buffers, q->workgroups);
    const uint32_t *results = buffers[RESULTS].mapped;
    *wrong = false;
    for (uint32_t i = 0; ok && i < q->result_count; ++i) {
        *wrong = results[i] != q->results[i];
        ok = !*wrong || za_fail_as(ZA_UNSUPPORTED, "the driver computes result %u of the kernel %s as 0x%08X, expected "
                                   "0x%08X, so that attention would have other bits; use another driver, or another "
                                   "version of it", i, za_kernels[q->kernel].name, results[i], q->results[i]);
    }
    for (int i = 0; i < BUFFERS; ++i) za_buffer_free(device, &buffers[i]);
    za_pipeline_free(device, &pipeline);
    return ok;
}

bool za_primitives_check(struct za_device *device) {
    bool wrong;
    return ask(device, &za_primitives, NULL, &wrong);
}

bool za_fused_choose(struct za_device *device, uint32_t *fused) {
    bool wrong;
    *fused = FUSED_NATIVE;
    if (ask(device, &za_multiply_add, fused, &wrong)) return true;
    *fused = FUSED_EMULATED;
    return wrong && ask(device, &za_multiply_add, fused, &wrong);
}
