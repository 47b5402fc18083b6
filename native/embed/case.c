#include "case.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "zinc_attn.h"

enum { VERSION = 4, HEADER_WORDS = 21, MOST = 1 << 20 };

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

/* Bytes of q, of k, of v, and of all three, of one step and layer. */
static uint64_t q_bytes(const struct input *in, const struct step *step) {
    return 4 * (uint64_t)step->q_len * in->q_heads * in->head_dim;
}

/* Whole words: what values of two bytes leave of the last one is filled up. */
static uint64_t row_bytes(const struct input *in, const struct step *step, uint32_t dtype, uint32_t dims) {
    uint64_t values = (uint64_t)step->new_rows * in->kv_heads * dims;
    return dtype == ZA_F16 || dtype == ZA_BF16 ? (values + 1) / 2 * 4 : 4 * values;
}

static uint64_t k_bytes(const struct input *in, const struct step *step) {
    return row_bytes(in, step, in->dtype, in->head_dim);
}

static uint64_t v_bytes(const struct input *in, const struct step *step) {
    return in->latent ? 0 : row_bytes(in, step, in->v_dtype, in->v_head_dim);
}

static uint64_t layer_bytes(const struct input *in, const struct step *step) {
    return q_bytes(in, step) + k_bytes(in, step) + v_bytes(in, step);
}

static uint64_t mask_bytes(const struct step *step) { return 4 * (uint64_t)step->q_len * step->mask_keys; }

/* The header's numbers, and where the arrays behind it lie. `expected` becomes the bytes of the whole file. */
static bool read_header(const char *path, struct input *in, size_t size, uint64_t *expected) {
    uint32_t words[HEADER_WORDS];
    if (size < sizeof words || memcmp(in->file, "ZINCCASE", 8) != 0)
        return complain("%s: not a file of make_case.py", path);
    memcpy(words, in->file, sizeof words); /* see make_case.py */
    if (words[2] != VERSION) return complain("%s: got version %u, expected %d", path, words[2], VERSION);
    in->q_heads = words[3], in->kv_heads = words[4], in->head_dim = words[5], in->v_head_dim = words[6];
    in->latent = words[7] != 0, in->dtype = words[8], in->v_dtype = words[9];
    in->layers = words[10], in->steps = words[11], in->splits = words[12], in->window = words[13];
    in->noncausal = words[16] != 0;
    memcpy(&in->scale, words + 17, sizeof in->scale);
    memcpy(&in->softcap, words + 19, sizeof in->softcap);
    if (in->q_heads > 1024 || in->kv_heads > 1024 || in->head_dim > 1024 || in->v_head_dim > 1024 ||
        in->dtype >= ZA_DTYPES || in->v_dtype >= ZA_DTYPES || in->layers > 1024 || in->steps > MOST)
        return complain("%s: got shape %u/%u/%u/%u, dtypes %u and %u, %u layers and %u steps, which is beyond what it "
                        "may have", path, in->q_heads, in->kv_heads, in->head_dim, in->v_head_dim, in->dtype, in->v_dtype,
                        in->layers, in->steps);
    size_t sinks = words[14] ? in->q_heads : 0, alibi = words[15] ? in->q_heads : 0, scales = in->layers * in->kv_heads;
    size_t k_scales = in->dtype == ZA_FP8_E4M3 ? scales : 0;
    size_t v_scales = in->v_dtype == ZA_FP8_E4M3 && !in->latent ? scales : 0;
    *expected = sizeof words + sizeof(struct step) * (uint64_t)in->steps + 4 * (sinks + alibi + k_scales + v_scales);
    if (size < *expected) return complain("%s: got %zu bytes, which end within the steps", path, size);
    in->step = (const struct step *)(const void *)(in->file + sizeof words);
    const float *behind = (const float *)(const void *)(in->step + in->steps);
    in->sinks = sinks ? behind : NULL;
    in->alibi = alibi ? behind + sinks : NULL;
    in->k_scales = k_scales ? behind + sinks + alibi : NULL;
    in->v_scales = v_scales ? behind + sinks + alibi + k_scales : NULL;
    in->masks = behind + sinks + alibi + k_scales + v_scales;
    return true;
}

bool input_read(const char *path, struct input *in) {
    size_t size = 0;
    uint64_t expected = 0, tokens = 0, masks = 0;
    *in = (struct input){0};
    in->file = read_all(path, &size);
    if (!in->file || !read_header(path, in, size, &expected)) return false;
    for (uint32_t i = 0; i < in->steps && expected < INT32_MAX; ++i) { /* no file is larger */
        const struct step *step = &in->step[i];
        tokens += step->new_rows;
        if (step->sequence > in->sequences || step->q_len > MOST || tokens > MOST || step->mask_keys > MOST)
            return complain("%s: step %u: got sequence %u, %u new rows, %u query rows and a mask of %u keys, expected "
                            "at most sequence %u and %u rows and keys", path, i, step->sequence, step->new_rows,
                            step->q_len, step->mask_keys, in->sequences, MOST);
        if (step->sequence == in->sequences) ++in->sequences;
        masks += mask_bytes(step);
        expected += mask_bytes(step) + in->layers * layer_bytes(in, step);
    }
    if (size == expected) {
        in->values = (const char *)in->masks + masks;
        return true;
    }
    return complain("%s: got %zu bytes, expected %llu for shape %u/%u/%u/%u and %u steps", path, size,
                    (unsigned long long)expected, in->q_heads, in->kv_heads, in->head_dim, in->v_head_dim, in->steps);
}

void input_free(struct input *in) {
    free(in->file);
    *in = (struct input){0};
}

struct values input_next(const struct input *in, const struct step *step, const char **at) {
    struct values found = {.q = (const float *)(const void *)*at, .k = *at + q_bytes(in, step)};
    found.v = in->latent ? NULL : (const char *)found.k + k_bytes(in, step);
    *at += layer_bytes(in, step);
    return found;
}
