#include "case.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "zinc_attn.h"

enum { HEADER_BYTES = 64, HEADER_WORDS = HEADER_BYTES / 4, MOST = 1 << 20 };

bool complain(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    fputs("embed: ", stderr);
    vfprintf(stderr, format, arguments);
    fputc('\n', stderr);
    va_end(arguments);
    return false;
}

static char *read_all(const char *path, size_t *size) {
    errno = 0;
    FILE *file = fopen(path, "rb");
    long end = file && fseek(file, 0, SEEK_END) == 0 ? ftell(file) : -1;
    char *data = NULL;
    if (end >= 0 && end < INT32_MAX && fseek(file, 0, SEEK_SET) == 0 && (data = malloc((size_t)end + 1)) != NULL) {
        *size = fread(data, 1, (size_t)end, file);
        if (*size != (size_t)end) {
            free(data);
            data = NULL;
        }
    }
    if (!data) complain("%s: cannot be read: %s", path, errno ? strerror(errno) : "not a file of at most 2 GiB");
    if (file) fclose(file);
    return data;
}

/* Bytes of q, and of k and v together, of one step and layer. */
static uint64_t q_bytes(const struct input *in, const struct step *step) {
    return 4 * (uint64_t)step->q_len * in->q_heads * in->head_dim;
}

static uint64_t kv_bytes(const struct input *in, const struct step *step) {
    uint64_t values = (uint64_t)step->new_rows * in->kv_heads * in->head_dim;
    return values * (in->dtype == ZA_F16 || in->dtype == ZA_BF16 ? 2 : 4) * 2;
}

/* The header's numbers, and where the arrays behind it lie. `expected` becomes the bytes of the whole file. */
static bool read_header(const char *path, struct input *in, size_t size, uint64_t *expected) {
    uint32_t words[HEADER_WORDS];
    if (size < sizeof words || memcmp(in->file, "ZINCCASE", 8) != 0)
        return complain("%s: not a file of make_case.py", path);
    memcpy(words, in->file, sizeof words); /* see make_case.py */
    if (words[2] != 2) return complain("%s: got version %u, expected 2", path, words[2]);
    in->q_heads = words[3], in->kv_heads = words[4], in->head_dim = words[5], in->dtype = words[6];
    in->layers = words[7], in->steps = words[8], in->splits = words[9], in->window = words[10];
    memcpy(&in->scale, words + 12, sizeof in->scale);
    memcpy(&in->softcap, words + 14, sizeof in->softcap);
    if (in->q_heads > 1024 || in->kv_heads > 1024 || in->head_dim > 512 || in->head_dim % 2 ||
        in->dtype >= ZA_DTYPES || in->layers > 1024 || in->steps > MOST)
        return complain("%s: got shape %u/%u/%u, dtype %u, %u layers and %u steps, which is beyond what it may have",
                        path, in->q_heads, in->kv_heads, in->head_dim, in->dtype, in->layers, in->steps);
    uint64_t sinks = words[11] ? in->q_heads : 0;
    *expected = sizeof words + sizeof(struct step) * (uint64_t)in->steps + 4 * sinks;
    if (size < *expected) return complain("%s: got %zu bytes, which end within the steps", path, size);
    in->step = (const struct step *)(const void *)(in->file + sizeof words);
    in->sinks = sinks ? (const float *)(const void *)(in->step + in->steps) : NULL;
    in->values = (const char *)(in->step + in->steps) + 4 * sinks;
    return true;
}

bool input_read(const char *path, struct input *in) {
    size_t size = 0;
    uint64_t expected = 0, tokens = 0;
    *in = (struct input){0};
    in->file = read_all(path, &size);
    if (!in->file || !read_header(path, in, size, &expected)) return false;
    for (uint32_t i = 0; i < in->steps; ++i) {
        const struct step *step = &in->step[i];
        tokens += step->new_rows;
        if (step->sequence > in->sequences || step->q_len > MOST || tokens > MOST)
            return complain("%s: step %u: got sequence %u, %u new rows and %u query rows, expected at most sequence %u "
                            "and %u rows", path, i, step->sequence, step->new_rows, step->q_len, in->sequences, MOST);
        if (step->sequence == in->sequences) ++in->sequences;
        expected += in->layers * (q_bytes(in, step) + kv_bytes(in, step));
    }
    if (size == expected) return true;
    return complain("%s: got %zu bytes, expected %llu for shape %u/%u/%u and %u steps", path, size,
                    (unsigned long long)expected, in->q_heads, in->kv_heads, in->head_dim, in->steps);
}

void input_free(struct input *in) {
    free(in->file);
    *in = (struct input){0};
}

struct values input_next(const struct input *in, const struct step *step, const char **at) {
    struct values found = {.q = (const float *)(const void *)*at, .k = *at + q_bytes(in, step)};
    found.v = (const char *)found.k + kv_bytes(in, step) / 2;
    *at += q_bytes(in, step) + kv_bytes(in, step);
    return found;
}
