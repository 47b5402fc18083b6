/* A decode run over several layers from C: prompts of several rows, growing pages, forks, copy-on-write.

       embed [-d NAME] [-w] MANIFEST_DIR CASE...

   MANIFEST_DIR is what `zinc-attn export MANIFEST_DIR --shape ...` wrote, a CASE what make_case.py wrote. Results go to
   CASE.out: by step and layer, out (q_len, q_heads, v_head_dim) and lse (q_len, q_heads), float32. -w prints the words
   of every call's work buffer. Exit status 0, or 2 with one line on stderr.

   Of the library it uses zinc_attn.h alone. The page tables are its own: a page belongs to every sequence whose table
   names it, and a sequence that is about to write to a page of several gets a copy of its own first. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "case.h"
#include "zinc_attn.h"

struct sequence {
    uint32_t tokens, pages;
    uint32_t *table; /* (pages) ids, with room for every page of the cache */
};

struct run {
    struct za_attn *attn;
    struct za_cache *cache;
    const struct input *in;
    struct sequence *sequences; /* (in->sequences) */
    uint32_t *users;            /* (pages) sequences whose table names the page */
    uint32_t pages, page_size, count; /* count: sequences that there are */
    float *results; /* of one call: out, then lse */
    FILE *out;
    bool words; /* print the work buffers */
};

/* With -w: the work buffer of the last call. */
static void print_words(const struct run *run, const char *what, uint32_t number) {
    struct za_trace trace = za_trace(run->attn);
    if (!run->words) return;
    printf("%s %u:", what, number);
    for (size_t i = 0; i < trace.work_words; ++i) printf(trace.work[i] < 1 << 24 ? " %u" : " 0x%X", trace.work[i]);
    putchar('\n');
}

/* --- pages ------------------------------------------------------------------------------------------- */

/* A page that no sequence has. There is always one, see pages_needed. Any placement gives the same bits. */
static uint32_t take_page(struct run *run) {
    uint32_t page = run->pages - 1;
    while (run->users[page]) --page;
    run->users[page] = 1;
    return page;
}

/* As many pages as the steps could fill, and a copy for each. */
static uint32_t pages_needed(const struct input *in, uint32_t page_size) {
    uint32_t pages = 1;
    for (uint32_t i = 0; i < in->steps; ++i) pages += in->step[i].new_rows / page_size + 2;
    return pages;
}

/* A new sequence with the tokens of the one before it: the same page ids, each with one more user. */
static void fork_sequence(struct run *run) {
    struct sequence *made = &run->sequences[run->count++];
    if (run->count == 1) return; /* the first one is empty */
    made->tokens = made[-1].tokens;
    made->pages = made[-1].pages;
    for (uint32_t i = 0; i < made->pages; ++i) ++run->users[made->table[i] = made[-1].table[i]];
}

/* Room for new rows in every layer: a copy of the partly filled page where it has other users, then new pages. */
static bool grow(struct run *run, struct sequence *seq, uint32_t new_rows) {
    if (new_rows && seq->tokens % run->page_size) {
        uint32_t *last = &seq->table[seq->pages - 1], shared = *last;
        if (run->users[shared] > 1) {
            uint32_t own = take_page(run);
            if (!za_copy_page(run->cache, shared, own)) return complain("%s", za_error());
            if (run->words) printf("copy of page %u to page %u\n", shared, own);
            --run->users[shared];
            *last = own;
        }
    }
    while ((uint64_t)seq->pages * run->page_size < (uint64_t)seq->tokens + new_rows)
        seq->table[seq->pages++] = take_page(run);
    return true;
}

/* --- steps ------------------------------------------------------------------------------------------- */

/* Append and attend in every layer. The tokens count once all layers have them. masks, values: of this step; they move
   on to those of the next. */
static bool run_step(struct run *run, uint32_t number, const float **masks, const char **values) {
    const struct input *in = run->in;
    const struct step *step = &in->step[number];
    if (step->sequence == run->count) fork_sequence(run);
    struct sequence *seq = &run->sequences[step->sequence];
    if (run->words) printf("step %u:\n", number);
    if (!grow(run, seq, step->new_rows)) return false;
    size_t rows = (size_t)step->q_len * in->q_heads;
    const struct za_request request = {
        .tokens = seq->tokens + step->new_rows,
        .page_table = seq->table,
        .new_rows = step->new_rows,
        .q_len = step->q_len,
        .noncausal = in->noncausal,
        .mask = *masks,
        .mask_keys = step->mask_keys,
    };
    const struct za_call call = {
        .requests = 1,
        .request = &request,
        .scale = in->scale,
        .softcap = in->softcap,
        .window = in->window,
        .sinks = in->sinks,
        .alibi = in->alibi,
        .splits = in->splits,
    };
    for (uint32_t layer = 0; layer < in->layers; ++layer) {
        struct values of = input_next(in, step, values);
        const struct za_data data = {
            .k = of.k, .v = of.v, .q = of.q, .out = run->results, .lse = run->results + rows * in->v_head_dim};
        if (!za_run(run->cache, layer, &call, &data)) return complain("%s", za_error());
        print_words(run, "layer", layer);
        size_t n = rows * (in->v_head_dim + 1);
        if (fwrite(run->results, 4, n, run->out) != n) return complain("the results cannot be written");
    }
    seq->tokens += step->new_rows;
    *masks += (size_t)step->q_len * step->mask_keys;
    return true;
}

/* --- a case ------------------------------------------------------------------------------------------ */

static bool run_make(struct run *run) {
    const struct input *in = run->in;
    uint32_t rows = 0;
    for (uint32_t i = 0; i < in->steps; ++i) rows = in->step[i].q_len > rows ? in->step[i].q_len : rows;
    run->page_size = za_info(run->attn).page_size;
    run->pages = pages_needed(in, run->page_size);
    run->sequences = calloc(in->sequences + 1, sizeof *run->sequences);
    run->users = calloc(run->pages, sizeof *run->users);
    run->results = malloc(4 * ((size_t)rows * in->q_heads * (in->v_head_dim + 1) + 1));
    bool ok = run->sequences && run->users && run->results;
    for (uint32_t i = 0; ok && i < in->sequences; ++i)
        ok = (run->sequences[i].table = calloc(run->pages, sizeof(uint32_t))) != NULL;
    if (!ok) return complain("out of memory");
    run->cache = za_cache_make(run->attn, in->layers, run->pages, in->k_scales, in->v_scales);
    return run->cache || complain("%s", za_error());
}

static void run_free(struct run *run) {
    za_cache_free(run->cache);
    for (uint32_t i = 0; run->sequences && i < run->in->sequences; ++i) free(run->sequences[i].table);
    free(run->sequences);
    free(run->users);
    free(run->results);
}

static bool run_case(struct za_attn *attn, const struct input *in, const char *path, bool words) {
    struct run run = {.attn = attn, .in = in, .words = words};
    size_t length = strlen(path) + sizeof ".out";
    char *out = malloc(length);
    if (!out) return complain("out of memory");
    snprintf(out, length, "%s.out", path);
    run.out = fopen(out, "wb");
    bool ok = run.out ? run_make(&run) : complain("%s: cannot be written", out);
    const float *masks = in->masks;
    const char *values = in->values;
    for (uint32_t i = 0; ok && i < in->steps; ++i) ok = run_step(&run, i, &masks, &values);
    if (run.out && fclose(run.out) != 0 && ok) ok = complain("%s: cannot be written", out);
    struct za_trace trace = za_trace(attn);
    if (ok)
        printf("%s  %u steps, %u layers, last splits %u, unit %u, %s\n", out, in->steps, in->layers, trace.splits,
               trace.leaves_per_state, trace.loop ? "loop" : "single");
    run_free(&run);
    free(out);
    return ok;
}

/* The library for the case's shape; it serves the cases that follow, which must have the same. */
static bool need_attn(struct za_device *device, struct za_attn **attn, struct za_options *options,
                      const struct input *in, const char *path) {
    struct za_options wanted = {
        .manifest = options->manifest,
        .q_heads = in->q_heads,
        .kv_heads = in->kv_heads,
        .head_dim = in->head_dim,
        .v_head_dim = in->v_head_dim,
        .latent = in->latent,
        .dtype = (enum za_dtype)in->dtype,
        .v_dtype = (enum za_dtype)in->v_dtype,
    };
    if (*attn && (wanted.q_heads != options->q_heads || wanted.kv_heads != options->kv_heads ||
                  wanted.head_dim != options->head_dim || wanted.v_head_dim != options->v_head_dim ||
                  wanted.latent != options->latent || wanted.dtype != options->dtype ||
                  wanted.v_dtype != options->v_dtype))
        return complain("%s: its shape or dtype is not that of the first case", path);
    if (*attn) return true;
    *options = wanted;
    *attn = za_open(device, options);
    if (!*attn) return complain("%s", za_error());
    struct za_device_info info = za_device_info(device);
    printf("%s (%s), subgroups of 32 %s\n", info.name, info.cpu ? "cpu" : "gpu",
           info.wave32 ? "requested" : "not offered");
    return true;
}

int main(int argc, char **argv) {
    struct za_options options = {0};
    struct za_attn *attn = NULL;
    const char *name = NULL;
    bool words = false;
    int at = 1;
    if (argc - at > 1 && strcmp(argv[at], "-d") == 0) name = argv[at + 1], at += 2;
    if (argc - at > 0 && strcmp(argv[at], "-w") == 0) words = true, ++at;
    if (argc - at < 2) {
        fputs("usage: embed [-d NAME] [-w] MANIFEST_DIR CASE...\n", stderr);
        return 2;
    }
    options.manifest = argv[at];
    struct za_device *device = za_device_open(name);
    bool ok = device || complain("%s", za_error());
    for (int i = at + 1; ok && i < argc; ++i) {
        struct input in;
        ok = input_read(argv[i], &in) && need_attn(device, &attn, &options, &in, argv[i]) &&
             run_case(attn, &in, argv[i], words);
        input_free(&in);
    }
    za_close(attn);
    za_device_close(device);
    return ok ? 0 : 2;
}
