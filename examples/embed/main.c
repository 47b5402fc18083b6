/* A decode run over several layers from C: a prompt in chunks, forks, growing pages, copy-on-write.

       embed [-d NAME] [-w STEP] Q_HEADS/KV_HEADS/HEAD_DIM PROMPT CHUNK TOKENS RESULTS

   PROMPT tokens are appended in float16 and attended in chunks of CHUNK, then forked, and both sequences decode TOKENS
   tokens by turns. RESULTS becomes, by call and layer, out (q_len, q_heads, head_dim) and lse (q_len, q_heads), in
   float32; digest.py prints its SHA-256. -w prints the work buffers of one step, from 0 on: eight words a line, after
   the number of the first word. Exit status 0, or 2 with one line on stderr.

   The program uses zinc_attn.h alone, and has its own page tables: a page belongs to every sequence whose table names
   the page, and a sequence that is about to write to a shared page first gets a copy. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "zinc_attn.h"

enum { LAYERS = 2, SEQUENCES = 2, PAGE_SIZE = 64, MAX_TOKENS = 1 << 20 };

struct sequence {
    uint32_t tokens, pages;
    uint32_t *table; /* (pages) ids, with room for every page of the cache */
};

struct run {
    struct za_attn *attn;
    struct za_cache *cache;
    struct za_options options;
    struct sequence sequences[SEQUENCES];
    uint32_t prompt, chunk, steps;
    uint32_t *users; /* (pages) sequences whose table names the page */
    uint32_t pages;
    uint32_t drawn; /* numbers so far */
    uint16_t *k, *v;
    float *q, *out; /* of one call; out, then lse */
    FILE *results;
    uint32_t shown; /* the step whose work buffers are printed */
};

static bool complain(const char *what, const char *why) {
    fprintf(stderr, "embed: %s%s%s\n", what, *why ? ": " : "", why);
    return false;
}

/* --- pages ------------------------------------------------------------------------------------------- */

/* A page that no sequence has; the cache has enough pages (make). Any placement gives the same bits. */
static uint32_t take_page(struct run *run) {
    uint32_t page = run->pages - 1;
    while (run->users[page]) --page;
    run->users[page] = 1;
    return page;
}

/* The second sequence gets the tokens of the first one: the same page ids, each with one more user. */
static void fork_sequence(struct run *run) {
    const struct sequence *first = &run->sequences[0];
    struct sequence *second = &run->sequences[1];
    second->tokens = first->tokens;
    second->pages = first->pages;
    for (uint32_t i = 0; i < first->pages; ++i) ++run->users[second->table[i] = first->table[i]];
}

/* Room for new rows in every layer: a copy of the partly filled page where it has other users, then new pages. */
static bool grow(struct run *run, struct sequence *seq, uint32_t new_rows) {
    if (new_rows && seq->tokens % PAGE_SIZE) {
        uint32_t *last = &seq->table[seq->pages - 1], shared = *last;
        if (run->users[shared] > 1) {
            uint32_t own = take_page(run);
            if (!za_copy_page(run->cache, shared, own)) return complain(za_error(), "");
            if (run->steps == run->shown) printf("copy of page %u to page %u\n", shared, own);
            --run->users[shared];
            *last = own;
        }
    }
    while ((uint64_t)seq->pages * PAGE_SIZE < (uint64_t)seq->tokens + new_rows)
        seq->table[seq->pages++] = take_page(run);
    return true;
}

/* --- calls ------------------------------------------------------------------------------------------- */

/* Numbers of digest.py, of either sign: float16 from 1/8 to 2, float32 from 1/8 to 2. */
static uint32_t draw(struct run *run) {
    uint32_t x = run->drawn++ * 0x9E3779B1U;
    x = (x ^ x >> 15) * 0x85EBCA77U;
    return x ^ x >> 13;
}

static void draw_halves(struct run *run, uint16_t *to, size_t n) {
    for (size_t i = 0; i < n; ++i) {
        uint32_t x = draw(run);
        to[i] = (uint16_t)((x & 0x8000) | (0x3000 + (x & 0x0FFF)));
    }
}

static void draw_floats(struct run *run, float *to, size_t n) {
    for (size_t i = 0; i < n; ++i) {
        uint32_t x = draw(run), bits = (x & 0x80000000) | (0x3E000000 + (x & 0x01FFFFFF));
        memcpy(&to[i], &bits, sizeof bits);
    }
}

/* The work buffer of the last call, where its step is shown. */
static void print_words(const struct run *run, uint32_t layer, const struct za_request *request) {
    struct za_trace trace = za_trace(run->attn);
    if (run->steps != run->shown) return;
    printf("layer %u: %u tokens, %u new, %u query rows, %zu words", layer, request->tokens, request->new_rows,
           request->q_len, trace.work_words);
    for (size_t i = 0; i < trace.work_words; ++i) {
        if (i % 8 == 0) printf("\n%5zu:", i);
        printf(trace.work[i] < 1 << 24 ? " %u" : " 0x%X", trace.work[i]);
    }
    putchar('\n');
}

/* Append and attend in every layer. The tokens count once all layers have them. */
static bool step(struct run *run, struct sequence *seq, uint32_t new_rows, uint32_t q_len) {
    const struct za_options *o = &run->options;
    const size_t kv = (size_t)new_rows * o->kv_heads * o->head_dim, rows = (size_t)q_len * o->q_heads;
    if (!grow(run, seq, new_rows)) return false;
    const struct za_request request = {
        .tokens = seq->tokens + new_rows, .pages = seq->pages, .page_table = seq->table, .new_rows = new_rows,
        .q_len = q_len};
    const struct za_call call = {.requests = 1, .request = &request};
    const struct za_data data = {
        .k = run->k, .v = run->v, .q = run->q, .out = run->out, .lse = run->out + rows * o->head_dim};
    for (uint32_t layer = 0; layer < LAYERS; ++layer) {
        const size_t n = rows * (o->head_dim + 1);
        draw_floats(run, run->q, rows * o->head_dim);
        draw_halves(run, run->k, kv);
        draw_halves(run, run->v, kv);
        if (!za_run(run->cache, layer, &call, &data)) return complain(za_error(), "");
        print_words(run, layer, &request);
        if (fwrite(run->out, 4, n, run->results) != n) return complain("the results cannot be written", "");
    }
    seq->tokens += new_rows;
    ++run->steps;
    return true;
}

/* --- the run ----------------------------------------------------------------------------------------- */

static bool make(struct run *run, struct za_device *device, uint32_t tokens) {
    const struct za_options *o = &run->options;
    run->attn = za_open(device, o);
    if (!run->attn) return complain(za_error(), "");
    struct za_device_info info = za_device_info(device);
    printf("%s (%s), subgroups of 32 %s\n", info.name, info.cpu ? "cpu" : "gpu",
           info.wave32 ? "requested" : "not offered");
    run->pages = run->prompt / PAGE_SIZE + 2 + SEQUENCES * (tokens / PAGE_SIZE + 4);
    size_t kv = (size_t)run->chunk * o->kv_heads * o->head_dim, rows = (size_t)run->chunk * o->q_heads;
    run->users = calloc(run->pages, sizeof *run->users);
    run->k = malloc(2 * kv);
    run->v = malloc(2 * kv);
    run->q = malloc(4 * rows * o->head_dim);
    run->out = malloc(4 * rows * (o->head_dim + 1));
    bool ok = run->users && run->k && run->v && run->q && run->out;
    for (int i = 0; i < SEQUENCES; ++i)
        if (!(run->sequences[i].table = calloc(run->pages, sizeof(uint32_t)))) ok = false;
    if (!ok) return complain("out of memory", "");
    run->cache = za_cache_make(run->attn, LAYERS, run->pages, NULL, NULL);
    return run->cache || complain(za_error(), "");
}

static bool decode(struct run *run, uint32_t tokens) {
    struct sequence *first = &run->sequences[0], *second = &run->sequences[1];
    while (first->tokens < run->prompt) {
        uint32_t left = run->prompt - first->tokens, n = left < run->chunk ? left : run->chunk;
        if (!step(run, first, n, n)) return false;
    }
    fork_sequence(run);
    if (!step(run, second, 0, 1)) return false;
    for (uint32_t token = 0; token < tokens; ++token)
        if (!step(run, first, 1, 1) || !step(run, second, 1, 1)) return false;
    struct za_trace trace = za_trace(run->attn);
    printf("%u calls, last splits %u\n", run->steps * LAYERS, trace.splits);
    return true;
}

static void run_free(struct run *run) {
    za_cache_free(run->cache);
    za_close(run->attn);
    for (int i = 0; i < SEQUENCES; ++i) free(run->sequences[i].table);
    free(run->users);
    free(run->k);
    free(run->v);
    free(run->q);
    free(run->out);
}

int main(int argc, char **argv) {
    struct run run = {.options = {.dtype = ZA_F16, .page_size = PAGE_SIZE}, .shown = UINT32_MAX};
    const char *name = NULL;
    uint32_t tokens = 0;
    int arg = 1;
    if (argc - arg > 1 && strcmp(argv[arg], "-d") == 0) name = argv[arg + 1], arg += 2;
    bool good = true;
    if (argc - arg > 1 && strcmp(argv[arg], "-w") == 0) good = sscanf(argv[arg + 1], "%u", &run.shown) == 1, arg += 2;
    if (!good || argc - arg != 5 ||
        sscanf(argv[arg], "%u/%u/%u", &run.options.q_heads, &run.options.kv_heads, &run.options.head_dim) != 3 ||
        sscanf(argv[arg + 1], "%u", &run.prompt) != 1 || sscanf(argv[arg + 2], "%u", &run.chunk) != 1 ||
        sscanf(argv[arg + 3], "%u", &tokens) != 1 || !run.prompt || !run.chunk || run.prompt > MAX_TOKENS ||
        run.chunk > MAX_TOKENS || tokens > MAX_TOKENS) {
        complain("usage", "embed [-d NAME] [-w STEP] Q_HEADS/KV_HEADS/HEAD_DIM PROMPT CHUNK TOKENS RESULTS");
        return 2;
    }
    struct za_device *device = za_device_open(name);
    bool ok = device ? make(&run, device, tokens) : complain(za_error(), "");
    if (ok && !(run.results = fopen(argv[arg + 4], "wb"))) ok = complain(argv[arg + 4], "cannot be written");
    ok = ok && decode(&run, tokens);
    if (run.results && fclose(run.results) != 0 && ok) ok = complain(argv[arg + 4], "cannot be written");
    run_free(&run);
    za_device_close(device);
    return ok ? 0 : 2;
}
