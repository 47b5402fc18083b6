/* Runs the kernels `primitives` and `multiply_add` on the contract's numbers and compares with its results. */
#include "primitives.h"

#include <string.h>

#include "error.h"
#include "objects.h"

enum { GIVEN, FOUND, BUFFERS };

static bool run(struct za_device *device, const struct pipeline *pipeline, const struct buffer *buffers,
                uint32_t groups) {
    const struct za_place places[] = {za_whole(&buffers[GIVEN]), za_whole(&buffers[FOUND])};
    struct sets sets = {0};
    const struct za_command command = za_command(pipeline, places, (const uint32_t[]){groups, 1, 1});
    bool ok = za_commands_begin(device) && za_dispatch(device, device->commands, &sets, &command);
    if (ok) za_barrier_behind(device, device->commands);
    ok = ok && za_commands_submit(device);
    za_sets_free(device, &sets);
    return ok;
}

/* The first result that differs, or the number of results. */
struct answer {
    uint32_t number, found;
};

static bool is_right(const struct question *q, const struct answer *answer) {
    return answer->number == q->result_count;
}

static bool refuse(const struct question *q, const struct answer *answer) {
    return za_fail_as(ZA_UNSUPPORTED, "the driver computes result %u of the kernel %s as 0x%08X, expected 0x%08X, so "
                      "that attention would have other bits; use another driver, or another version of it",
                      answer->number, za_kernels[q->kernel].name, answer->found, q->results[answer->number]);
}

/* constants: the kernel's, or NULL where it has none. */
static bool ask(struct za_device *device, const struct question *q, const void *constants, struct answer *answer) {
    struct buffer buffers[BUFFERS] = {{0}};
    struct pipeline pipeline = {0};
    const size_t given = 4 * (size_t)q->number_count, found = 4 * (size_t)q->result_count;
    bool ok = za_pipeline_make(device, &za_kernels[q->kernel], constants, &pipeline) &&
              za_buffer_make(device, given, true, "numbers", &buffers[GIVEN]) &&
              za_buffer_make(device, found, true, "results", &buffers[FOUND]);
    if (ok) {
        memcpy(buffers[GIVEN].mapped, q->numbers, given);
        memset(buffers[FOUND].mapped, 0xFF, found); /* NaNs, which are no results */
    }
    ok = ok && run(device, &pipeline, buffers, q->workgroups);
    if (ok) {
        const uint32_t *results = buffers[FOUND].mapped;
        for (answer->number = 0; !is_right(q, answer); ++answer->number)
            if ((answer->found = results[answer->number]) != q->results[answer->number]) break;
    }
    for (int i = 0; i < BUFFERS; ++i) za_buffer_free(device, &buffers[i]);
    za_pipeline_free(device, &pipeline);
    return ok;
}

bool za_primitives_check(struct za_device *device) {
    struct answer answer;
    return ask(device, &za_primitives, NULL, &answer) &&
           (is_right(&za_primitives, &answer) || refuse(&za_primitives, &answer));
}

bool za_fused_choose(struct za_device *device, uint32_t *fused) {
    static const uint32_t ways[] = {FUSED_NATIVE, FUSED_EMULATED};
    struct answer answer;
    for (int i = 0; i < 2; ++i) {
        *fused = ways[i];
        if (!ask(device, &za_multiply_add, fused, &answer)) return false;
        if (is_right(&za_multiply_add, &answer)) return true;
    }
    return refuse(&za_multiply_add, &answer);
}
