/* Runs the kernels `primitives` and `multiply_add` on the manifest's numbers and compares with its results. */
#include "primitives.h"

#include <string.h>

#include "error.h"
#include "objects.h"

enum { GIVEN, FOUND, BUFFERS, MOST_WORDS = 1 << 16 };

/* A kernel's numbers and results, lists of a section of the manifest that is named like it. */
struct question {
    const char *kernel;
    const struct json *numbers, *results, *groups;
};

/* A list of a section, NULL where it is none of a sane length. */
static const struct json *list(const struct manifest *m, const char *section, const char *name) {
    const struct json *found = za_json_get(za_json_get(&m->root, section), name);
    return found && found->type == JSON_ARRAY && found->count && found->count <= MOST_WORDS ? found : NULL;
}

static bool run(struct za_device *device, const struct pipeline *pipeline, const struct buffer *buffers,
                uint32_t groups) {
    const struct za_place places[] = {za_whole(&buffers[GIVEN]), za_whole(&buffers[FOUND])};
    struct sets sets = {0};
    bool ok = za_commands_begin(device) &&
              za_dispatch(device, device->commands, &sets, pipeline, places, (const uint32_t[]){groups, 1, 1});
    if (ok) za_barrier_behind(device, device->commands);
    ok = ok && za_commands_submit(device);
    za_sets_free(device, &sets);
    return ok;
}

/* The first result that differs, or the number of results. */
struct answer {
    size_t number;
    uint32_t found, expected;
};

static bool is_right(const struct question *q, const struct answer *answer) {
    return answer->number == q->results->count;
}

static bool refuse(const struct question *q, const struct answer *answer) {
    return za_fail_as(ZA_UNSUPPORTED, "the driver computes result %zu of the kernel %s as 0x%08X, expected 0x%08X, so "
                      "that attention would have other bits; use another driver, or another version of it",
                      answer->number, q->kernel, answer->found, answer->expected);
}

static bool compare(const struct question *q, const uint32_t *found, struct answer *answer) {
    for (answer->number = 0; answer->number < q->results->count; ++answer->number) {
        if (!za_json_u32(&q->results->items[answer->number], &answer->expected))
            return za_fail_as(ZA_MANIFEST, "manifest: result %zu of %s is no word", answer->number, q->kernel);
        answer->found = found[answer->number];
        if (answer->found != answer->expected) break;
    }
    return true;
}

/* Ask with the constant `fused`, 0 for a kernel without it. */
static bool ask(struct za_device *device, const struct manifest *m, const struct shape *shape,
                const struct question *q, uint32_t fused, struct answer *answer) {
    struct buffer buffers[BUFFERS] = {{0}};
    struct pipeline pipeline = {0};
    struct kernel kernel = {0};
    uint32_t count;
    if (!q->numbers || !q->results || !q->groups || !za_json_u32(&q->groups->items[0], &count))
        return za_fail_as(ZA_MANIFEST, "%s/manifest.json: it has no %s; export it again", m->directory, q->kernel);
    bool ok = za_kernel_load(m, shape, q->kernel, &kernel) && (!fused || za_kernel_set(&kernel, "fused", fused)) &&
              za_pipeline_make(device, &kernel, &pipeline) &&
              za_buffer_make(device, 4 * q->numbers->count, true, "numbers", &buffers[GIVEN]) &&
              za_buffer_make(device, 4 * q->results->count, true, "results", &buffers[FOUND]);
    uint32_t *given = buffers[GIVEN].mapped;
    for (size_t i = 0; ok && i < q->numbers->count; ++i)
        if (!za_json_u32(&q->numbers->items[i], &given[i]))
            ok = za_fail_as(ZA_MANIFEST, "manifest: number %zu of %s is no word", i, q->kernel);
    if (ok) memset(buffers[FOUND].mapped, 0xFF, 4 * q->results->count); /* NaNs, which are no results */
    ok = ok && run(device, &pipeline, buffers, count) && compare(q, buffers[FOUND].mapped, answer);
    for (int i = 0; i < BUFFERS; ++i) za_buffer_free(device, &buffers[i]);
    za_pipeline_free(device, &pipeline);
    za_kernel_free(&kernel);
    return ok;
}

bool za_primitives_check(struct za_device *device, const struct manifest *m, const struct shape *shape) {
    const struct question q = {"primitives", list(m, "primitives", "numbers"), list(m, "primitives", "results"),
                               list(m, "primitives", "workgroups")};
    struct answer answer;
    return ask(device, m, shape, &q, 0, &answer) && (is_right(&q, &answer) || refuse(&q, &answer));
}

bool za_fused_choose(struct za_device *device, const struct manifest *m, const struct shape *shape, uint32_t *fused) {
    const struct question q = {"multiply_add", list(m, "multiply_add", "triples"), list(m, "multiply_add", "sums"),
                               list(m, "multiply_add", "workgroups")};
    struct answer answer;
    for (*fused = 1; *fused <= 2; ++*fused) {
        if (!ask(device, m, shape, &q, *fused, &answer)) return false;
        if (is_right(&q, &answer)) return true;
    }
    return refuse(&q, &answer);
}
