/* One decode step of zinc_attn from C: append the newest token to a paged cache, attend, merge, in one submission.
   No Python, no library but libvulkan.

       embed [-d NAME] MANIFEST_DIR CASE...

   MANIFEST_DIR is what `zinc-attn export MANIFEST_DIR --shape ...` wrote, a CASE what make_case.py wrote. Prints, per
   case, the SHA-256 of the bytes of out (q_heads, head_dim) and lse (q_heads), float32: the same on every device and
   for every layout. Exit status 0, or 2 with one line on stderr.

   Little-endian hosts only, as the files' words are used as they are. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gpu.h"
#include "manifest.h"
#include "sha256.h"

#define CASE_MAGIC "ZINCCASE"
enum { CASE_WORDS = 14, PREFILL_ROWS = 1024 };
static const double LOG2E = 1.4426950408889634;

/* A decode step's input: tokens keys and values, the last of them new; q sees keys [first, tokens). */
struct step {
    uint32_t q_heads, kv_heads, head_dim, tokens, first;
    uint32_t num_splits; /* 0: the manifest's split rule */
    double scale, softcap; /* scores become softcap * tanh(score / softcap); 0: they do not */
    float *q;          /* (q_heads, head_dim) */
    float *sinks;      /* (q_heads), logits that join the softmax without a value; NULL: none */
    const uint16_t *k; /* (tokens, kv_heads, head_dim), float16 */
    const uint16_t *v;
    char *file; /* which k and v lie in */
};

/* Who computes what; never shows in the bits. */
struct layout {
    uint32_t splits, leaves_per_state, first_leaf, units, first_unit, states, items;
    bool fixed, loop;
};

enum { APPEND, SINGLE, LOOP, SINGLE_CAPPED, LOOP_CAPPED, MERGE, PIPELINES };
static const char *const KERNEL_NAMES[PIPELINES] = {
    "append", "attend_single_f16", "attend_loop_f16", "attend_single_f16", "attend_loop_f16", "merge",
};

struct program {
    struct manifest manifest;
    const char *device; /* a piece of its name, or NULL */
    struct gpu gpu;
    const char *kind; /* of the device, as the manifest has it: "gpu" or "cpu" */
    struct shape shape;
    bool has_shape;
    struct pipeline pipelines[PIPELINES];
};

enum { WORK, Q, ROWS, K, V, STATES, OUT, BUFFERS };

/* What a case needs on the device. */
struct rig {
    struct buffer buffers[BUFFERS];
    VkDescriptorPool pool;
    VkDescriptorSet sets[PIPELINES];
    uint32_t pages;
};

static uint32_t ceil_div(uint32_t a, uint32_t b) { return a / b + (a % b != 0); }
static uint32_t least(uint32_t a, uint32_t b) { return a < b ? a : b; }
static uint32_t most(uint32_t a, uint32_t b) { return a > b ? a : b; }

/* --- the case ---------------------------------------------------------------------------------------- */

/* float32 inputs: no NaN, nothing above 2**60, and what is below 2**-40 counts as 0. */
static bool check_floats(const struct manifest *m, const char *path, const char *name, float *values, size_t n,
                         double *largest) {
    for (size_t i = 0; i < n; ++i) {
        if (!(fabsf(values[i]) <= m->max_input))
            return fail("%s: %s[%zu]: got %g, expected at most %g", path, name, i, (double)values[i],
                        (double)m->max_input);
        if (fabsf(values[i]) < m->min_input) values[i] = 0;
        *largest = fmax(*largest, fabs((double)values[i]));
    }
    return true;
}

static bool check_values(const struct manifest *m, const char *path, struct step *step) {
    size_t n = (size_t)step->q_heads * step->head_dim, kv = (size_t)step->tokens * step->kv_heads * step->head_dim;
    double q_most = 0, sink_most = 0;
    if (!check_floats(m, path, "q", step->q, n, &q_most) ||
        (step->sinks && !check_floats(m, path, "sinks", step->sinks, step->q_heads, &sink_most)))
        return false;
    for (size_t i = 0; i < 2 * kv; ++i) { /* v lies behind k */
        if ((step->k[i] & 0x7FFF) >= 0x7C00)
            return fail("%s: %c[%zu]: got an infinity or NaN, expected a number", path, i < kv ? 'k' : 'v', i % kv);
    }
    if (!(q_most * 65504 * step->head_dim * fmax(1, 1.5 * fabs(step->scale)) <= (double)m->max_score))
        return fail("%s: got max|q| = %g and scale = %g, whose scores may overflow", path, q_most, step->scale);
    if (step->softcap != 0 && !(step->softcap >= (double)m->min_input && step->softcap <= (double)m->max_input))
        return fail("%s: got softcap %g, expected %g to %g, or 0 for none", path, step->softcap, (double)m->min_input,
                    (double)m->max_input);
    return true;
}

static bool step_read(const struct manifest *m, const char *path, struct step *step) {
    size_t size;
    *step = (struct step){0};
    step->file = read_file(path, &size);
    if (!step->file) return false;
    uint32_t words[CASE_WORDS];
    if (size < sizeof words || memcmp(step->file, CASE_MAGIC, strlen(CASE_MAGIC)) != 0)
        return fail("%s: not a file of make_case.py", path);
    memcpy(words, step->file, sizeof words); /* see make_case.py */
    if (words[2] != 1) return fail("%s: got version %u, expected 1", path, words[2]);
    step->q_heads = words[3], step->kv_heads = words[4], step->head_dim = words[5];
    step->tokens = words[6], step->num_splits = words[7];
    step->first = words[8] && words[8] < step->tokens ? step->tokens - words[8] : 0; /* words[8]: the window */
    memcpy(&step->scale, words + 10, sizeof step->scale);
    memcpy(&step->softcap, words + 12, sizeof step->softcap);
    if (step->q_heads > 1024 || step->kv_heads > 1024 || step->head_dim > 512 || step->tokens > 1 << 24 ||
        step->num_splits > 1 << 24)
        return fail("%s: got shape %u/%u/%u, %u tokens, %u splits, which is beyond what the kernels take", path,
                    step->q_heads, step->kv_heads, step->head_dim, step->tokens, step->num_splits);
    uint64_t q = (uint64_t)step->q_heads * step->head_dim;
    uint64_t kv = (uint64_t)step->tokens * step->kv_heads * step->head_dim;
    uint64_t sinks = words[9] ? step->q_heads : 0, expected = sizeof words + 4 * (q + sinks) + 2 * 2 * kv;
    if (size != expected)
        return fail("%s: got %zu bytes, expected %llu for shape %u/%u/%u and %u tokens", path, size,
                    (unsigned long long)expected, step->q_heads, step->kv_heads, step->head_dim, step->tokens);
    step->q = (float *)(void *)(step->file + sizeof words);
    step->sinks = sinks ? step->q + q : NULL;
    step->k = (const uint16_t *)(const void *)(step->q + q + sinks);
    step->v = step->k + kv;
    return check_values(m, path, step);
}

/* --- the layout -------------------------------------------------------------------------------------- */

/* Key where split `i` begins: even pieces of the keys that are seen, of whole units where the split rule cuts. */
static uint32_t boundary(const struct layout *layout, const struct manifest *m, const struct step *step, uint32_t i) {
    if (layout->fixed)
        return step->first + (uint32_t)((uint64_t)i * (step->tokens - step->first) / layout->splits);
    uint32_t unit = (uint32_t)((uint64_t)i * layout->units / layout->splits);
    return most(least((layout->first_leaf + unit * layout->leaves_per_state) * m->leaf, step->tokens), step->first);
}

/* Leaves [begin, end) of split `i`: the units that start in it; the first split has that of the first key too. */
static void leaf_range(const struct layout *layout, const struct manifest *m, const struct step *step, uint32_t i,
                       uint32_t *begin, uint32_t *end) {
    uint32_t unit_keys = m->leaf * layout->leaves_per_state, leaves = ceil_div(step->tokens, m->leaf);
    *begin = ceil_div(boundary(layout, m, step, i), unit_keys) * layout->leaves_per_state;
    *begin = i ? least(*begin, leaves) : layout->first_leaf;
    *end = least(ceil_div(boundary(layout, m, step, i + 1), unit_keys) * layout->leaves_per_state, leaves);
}

static bool layout_make(const struct program *p, const struct step *step, struct layout *layout) {
    const struct manifest *m = &p->manifest;
    *layout = (struct layout){.fixed = step->num_splits != 0, .first_leaf = step->first / m->leaf};
    if (layout->fixed) {
        layout->splits = step->num_splits;
        layout->leaves_per_state = (step->tokens - step->first) / layout->splits >= m->leaf * m->node ? m->node : 1;
    } else if (!manifest_splits(m, &p->shape, step->tokens - layout->first_leaf * m->leaf, &layout->splits,
                                &layout->leaves_per_state)) {
        return false;
    }
    uint32_t unit_keys = m->leaf * layout->leaves_per_state;
    layout->units = ceil_div(ceil_div(step->tokens, m->leaf) - layout->first_leaf, layout->leaves_per_state);
    layout->first_unit = step->first / unit_keys;
    layout->states = ceil_div(step->tokens, unit_keys) - layout->first_unit;
    for (uint32_t i = 0; i < layout->splits; ++i) {
        uint32_t begin, end;
        leaf_range(layout, m, step, i, &begin, &end);
        layout->items += begin < end;
        layout->loop = layout->loop || (begin < end && end - begin > 1);
    }
    if (layout->items > p->gpu.properties.limits.maxComputeWorkGroupCount[0])
        return fail("%u splits: %s takes at most %u workgroups", layout->items, p->gpu.properties.deviceName,
                    p->gpu.properties.limits.maxComputeWorkGroupCount[0]);
    return true;
}

/* The build of pass 1 for a layout and a step. */
static int build_of(const struct layout *layout, const struct step *step) {
    if (step->softcap != 0) return layout->loop ? LOOP_CAPPED : SINGLE_CAPPED;
    return layout->loop ? LOOP : SINGLE;
}

/* --- what the host writes ---------------------------------------------------------------------------- */

/* The work buffer of a submission that appends tokens [first, first + appends) and, with a layout, attends. */
static void write_work(const struct program *p, const struct step *step, const struct layout *layout,
                       const struct rig *rig, uint32_t first, uint32_t appends) {
    const struct manifest *m = &p->manifest;
    const struct work_layout *at = &m->work;
    uint32_t *work = rig->buffers[WORK].mapped;
    uint32_t items = layout ? layout->items : 0, rows = layout ? 1 : 0, shift = 0;
    uint32_t row_table = at->header_words + items * at->item_words;
    uint32_t append_table = row_table + rows * at->row_words;
    uint32_t page_table = append_table + appends * at->append_words;
    uint32_t sink_table = page_table + rig->pages;
    float cap = (float)step->softcap;
    float score_scale = (float)(step->softcap != 0 ? step->scale : step->scale * LOG2E); /* in double, rounded once */
    while (p->shape.page_tiles >> shift > 1) ++shift;

    memset(work, 0, 4 * (size_t)page_table);
    work[at->header.q_heads] = step->q_heads;
    work[at->header.kv_heads] = work[at->header.row_kv_heads] = step->kv_heads;
    work[at->header.group] = p->shape.group;
    memcpy(&work[at->header.score_scale], &score_scale, 4);
    work[at->header.page_shift] = shift;
    work[at->header.page_tiles] = p->shape.page_tiles;
    work[at->header.rows] = rows;
    work[at->header.row_table] = row_table;
    work[at->header.append_table] = append_table;
    for (uint32_t i = 0; i < appends; ++i) {
        uint32_t *record = work + append_table + i * at->append_words;
        record[at->append.position] = first + i;
        record[at->append.page_table] = page_table;
    }
    /* Any placement of pages gives the same bits; here the last page comes first. */
    for (uint32_t i = 0; i < rig->pages; ++i) work[page_table + i] = rig->pages - 1 - i;
    if (!layout) return;

    work[at->header.state_stride] = layout->states;
    work[at->header.single_pass] = layout->states == 1;
    if (step->softcap != 0) {
        float inverse = (float)(1.0 / (double)cap);
        memcpy(&work[at->header.softcap], &cap, 4);
        memcpy(&work[at->header.softcap_inverse], &inverse, 4);
    }
    for (uint32_t h = 0; step->sinks && h < step->q_heads; ++h) {
        float score = step->sinks[h] * (float)LOG2E; /* in float32 */
        memcpy(&work[sink_table + h], &score, 4);
        work[at->header.sink_table] = sink_table;
    }
    uint32_t *item = work + at->header_words;
    for (uint32_t i = 0; i < layout->splits; ++i) {
        uint32_t begin, end;
        leaf_range(layout, m, step, i, &begin, &end);
        if (begin >= end) continue;
        item[at->item.first] = step->first;
        item[at->item.limit] = step->tokens;
        item[at->item.leaf_begin] = begin;
        item[at->item.leaf_end] = end;
        item[at->item.rows] = 1;
        item[at->item.page_table] = page_table;
        item[at->item.upload_begin] = UINT32_MAX; /* every token is in the cache */
        item[at->item.leaves_per_state] = layout->leaves_per_state;
        item += at->item_words;
    }
    work[row_table + at->row.count] = layout->states;
    work[row_table + at->row.unit] = layout->first_unit;
    work[row_table + at->row.leaves_per_state] = layout->leaves_per_state;
}

/* Rows of tokens [first, first + count): per token and KV head, K values, then V values. */
static void write_rows(const struct step *step, const struct rig *rig, uint32_t first, uint32_t count) {
    uint16_t *row = rig->buffers[ROWS].mapped;
    size_t size = step->head_dim;
    for (size_t i = 0; i < (size_t)count * step->kv_heads; ++i, row += 2 * size) {
        memcpy(row, step->k + (first * (size_t)step->kv_heads + i) * size, 2 * size);
        memcpy(row + size, step->v + (first * (size_t)step->kv_heads + i) * size, 2 * size);
    }
}

/* --- on the device ----------------------------------------------------------------------------------- */

static bool pipeline_need(struct program *p, int which) {
    if (p->pipelines[which].handle) return true;
    struct kernel kernel;
    bool capped = which == SINGLE_CAPPED || which == LOOP_CAPPED;
    bool few = which == MERGE && p->gpu.properties.limits.maxComputeWorkGroupInvocations < 8 * WAVE;
    bool ok = kernel_load(&p->manifest, &p->shape, KERNEL_NAMES[which], &kernel) &&
              (!capped || kernel_set(&kernel, "softcap", 1)) && (!few || kernel_set(&kernel, "lanes", WAVE)) &&
              pipeline_make(&p->gpu, &kernel, &p->pipelines[which]);
    kernel_free(&kernel);
    return ok;
}

static bool rig_make(struct program *p, const struct step *step, const struct layout *layout, struct rig *rig) {
    const struct work_layout *at = &p->manifest.work;
    uint32_t appends = most(least(step->tokens, PREFILL_ROWS), 1);
    uint64_t out = (uint64_t)step->q_heads * (step->head_dim + 1);
    rig->pages = most(ceil_div(step->tokens, p->shape.page_size), 1);
    uint64_t words[BUFFERS] = {
        [WORK] = at->header_words + (uint64_t)layout->items * at->item_words + at->row_words +
                 (uint64_t)appends * at->append_words + rig->pages + step->q_heads,
        [Q] = (uint64_t)step->q_heads * step->head_dim,
        [ROWS] = (uint64_t)appends * p->shape.token_words,
        [K] = (uint64_t)rig->pages * p->shape.page_words,
        [V] = (uint64_t)rig->pages * p->shape.page_words,
        [STATES] = layout->states > 1 ? (uint64_t)layout->states * p->shape.state_words : 1,
        [OUT] = out,
    };
    static const char *const names[BUFFERS] = {"work", "q", "rows", "k", "v", "states", "out"};
    for (int i = 0; i < BUFFERS; ++i) {
        bool host = i == WORK || i == Q || i == ROWS || i == OUT;
        if (!buffer_make(&p->gpu, 4 * words[i], host, names[i], &rig->buffers[i])) return false;
    }
    memcpy(rig->buffers[Q].mapped, step->q, 4 * words[Q]);
    memset(rig->buffers[OUT].mapped, 0xFF, 4 * words[OUT]); /* NaN: what no kernel writes is seen */

    int build = build_of(layout, step);
    const struct buffer *b = rig->buffers, *target = layout->states == 1 ? &b[OUT] : &b[STATES];
    return pipeline_need(p, APPEND) && pipeline_need(p, build) && pipeline_need(p, MERGE) &&
           sets_make(&p->gpu, PIPELINES, &rig->pool) &&
           set_make(&p->gpu, rig->pool, &p->pipelines[APPEND],
                    (const struct buffer *[]){&b[WORK], &b[ROWS], &b[K], &b[V]}, &rig->sets[APPEND]) &&
           set_make(&p->gpu, rig->pool, &p->pipelines[build],
                    (const struct buffer *[]){&b[WORK], &b[Q], &b[K], &b[V], target, target, &b[WORK]},
                    &rig->sets[build]) &&
           set_make(&p->gpu, rig->pool, &p->pipelines[MERGE],
                    (const struct buffer *[]){&b[WORK], &b[STATES], &b[OUT]}, &rig->sets[MERGE]);
}

static void rig_free(struct program *p, struct rig *rig) {
    vkDestroyDescriptorPool(p->gpu.device, rig->pool, NULL);
    for (int i = 0; i < BUFFERS; ++i) buffer_free(&p->gpu, &rig->buffers[i]);
}

/* The prompt: all tokens but the last, in submissions of their own. */
static bool prefill(struct program *p, const struct step *step, struct rig *rig) {
    uint32_t count;
    for (uint32_t first = 0; first + 1 < step->tokens; first += count) {
        count = least(step->tokens - 1 - first, PREFILL_ROWS);
        write_work(p, step, NULL, rig, first, count);
        write_rows(step, rig, first, count);
        if (!commands_begin(&p->gpu)) return false;
        commands_dispatch(&p->gpu, &p->pipelines[APPEND], rig->sets[APPEND], count, step->kv_heads, 1);
        /* for all later submissions: the second scope of a barrier is not bounded by its own */
        commands_barrier(&p->gpu, VK_PIPELINE_STAGE_COMPUTE_SHADER_BIT,
                         VK_ACCESS_SHADER_READ_BIT | VK_ACCESS_SHADER_WRITE_BIT);
        if (!commands_submit(&p->gpu)) return false;
    }
    return true;
}

/* Append the last token, attend, merge: one submission. */
static bool decode(struct program *p, const struct step *step, const struct layout *layout, struct rig *rig) {
    struct gpu *gpu = &p->gpu;
    int build = build_of(layout, step);
    uint32_t appends = step->tokens ? 1 : 0;
    write_work(p, step, layout, rig, step->tokens - appends, appends);
    write_rows(step, rig, step->tokens - appends, appends);
    if (!commands_begin(gpu)) return false;
    if (appends) {
        commands_dispatch(gpu, &p->pipelines[APPEND], rig->sets[APPEND], appends, step->kv_heads, 1);
        commands_barrier(gpu, VK_PIPELINE_STAGE_COMPUTE_SHADER_BIT, VK_ACCESS_SHADER_READ_BIT); /* k, v */
    }
    if (layout->items)
        commands_dispatch(gpu, &p->pipelines[build], rig->sets[build], layout->items, step->kv_heads,
                          p->shape.head_chunks);
    if (layout->states != 1) {
        commands_barrier(gpu, VK_PIPELINE_STAGE_COMPUTE_SHADER_BIT, VK_ACCESS_SHADER_READ_BIT); /* states */
        commands_dispatch(gpu, &p->pipelines[MERGE], rig->sets[MERGE],
                          ceil_div(step->head_dim, p->manifest.merge_dims), step->q_heads, 1);
    }
    commands_barrier(gpu, VK_PIPELINE_STAGE_HOST_BIT, VK_ACCESS_HOST_READ_BIT); /* out */
    return commands_submit(gpu);
}

static void print_digest(const struct step *step, const struct layout *layout, const struct rig *rig,
                         const char *path) {
    struct sha256 hash;
    char hex[65];
    sha256_begin(&hash);
    sha256_add(&hash, rig->buffers[OUT].mapped, 4 * (size_t)step->q_heads * (step->head_dim + 1));
    sha256_end(&hash, hex);
    printf("%s  %s  keys %u to %u, splits %u, unit %u, %s\n", hex, path, step->first, step->tokens, layout->splits,
           layout->leaves_per_state, layout->loop ? "loop" : "single");
}

/* --- the program ------------------------------------------------------------------------------------- */

/* The device, opened when the first case is known to be good. */
static bool device_need(struct program *p) {
    if (p->gpu.device) return true;
    if (!gpu_open(&p->gpu, p->device)) return false;
    const VkPhysicalDeviceProperties *properties = &p->gpu.properties;
    p->kind = properties->deviceType == VK_PHYSICAL_DEVICE_TYPE_CPU ? "cpu" : "gpu";
    printf("%s (%s), subgroups of 32 %s\n", properties->deviceName, p->kind,
           p->gpu.wave32 ? "requested" : "not offered");
    return true;
}

/* The manifest's numbers for the case's shape; the pipelines are for one shape, that of the first case. */
static bool shape_need(struct program *p, const struct step *step, const char *path) {
    if (!p->has_shape) {
        p->has_shape = manifest_shape(&p->manifest, step->q_heads, step->kv_heads, step->head_dim, "f16", p->kind,
                                      &p->shape);
        if (p->has_shape && p->shape.token_words != step->kv_heads * step->head_dim)
            return fail("%s: a token has %u words there, expected K and V of %u float16 per KV head",
                        p->manifest.directory, p->shape.token_words, step->head_dim);
        return p->has_shape;
    }
    if (step->q_heads == p->shape.q_heads && step->kv_heads == p->shape.kv_heads &&
        step->head_dim == p->shape.head_dim)
        return true;
    return fail("%s: its shape is not that of the first case", path);
}

static bool run_case(struct program *p, const char *path) {
    struct step step;
    struct layout layout;
    struct rig rig = {0};
    bool ok = step_read(&p->manifest, path, &step) && device_need(p) && shape_need(p, &step, path) &&
              layout_make(p, &step, &layout) && rig_make(p, &step, &layout, &rig) && prefill(p, &step, &rig) &&
              decode(p, &step, &layout, &rig);
    if (ok) print_digest(&step, &layout, &rig, path);
    if (p->gpu.device) rig_free(p, &rig);
    free(step.file);
    return ok;
}

int main(int argc, char **argv) {
    struct program program = {0};
    int at = 1;
    if (argc > 2 && strcmp(argv[1], "-d") == 0) program.device = argv[2], at = 3;
    if (argc - at < 2) {
        fputs("usage: embed [-d NAME] MANIFEST_DIR CASE...\n", stderr);
        return 2;
    }
    bool ok = manifest_open(&program.manifest, argv[at]);
    for (int i = at + 1; ok && i < argc; ++i) ok = run_case(&program, argv[i]);
    if (program.gpu.device) {
        for (int i = 0; i < PIPELINES; ++i) pipeline_free(&program.gpu, &program.pipelines[i]);
    }
    gpu_close(&program.gpu);
    manifest_close(&program.manifest);
    return ok ? 0 : 2;
}
