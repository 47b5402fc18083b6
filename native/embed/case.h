/* An input file of make_case.py: the steps of a decode run, and the values of every step and layer. */
#ifndef CASE_H
#define CASE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* New rows are appended to a sequence, then its last q_len tokens are attended, in every layer. */
struct step {
    uint32_t sequence; /* from 0 on; one that no step had before is forked from the one before it */
    uint32_t new_rows, q_len;
    uint32_t mask_keys; /* the last keys, which the step's mask is for; 0: it has none */
};

struct values {
    const float *q;    /* (q_len, q_heads, head_dim) */
    const void *k, *v; /* (new_rows, kv_heads, head_dim), v's v_head_dim, as struct za_call takes them; v is NULL where
                          the shape is latent */
};

struct input {
    uint32_t q_heads, kv_heads, head_dim, v_head_dim, dtype, v_dtype; /* the types: an enum za_dtype each */
    bool latent;
    uint32_t layers, steps, sequences, splits, window;
    bool noncausal;
    double scale, softcap;
    const float *sinks, *alibi;       /* (q_heads), or NULL */
    const float *k_scales, *v_scales; /* (layers, kv_heads) of fp8_e4m3, or NULL */
    const struct step *step;          /* (steps) */
    const float *masks;               /* by step: (q_len, mask_keys), for all layers */
    const char *values;               /* behind them, by step and layer: q, k, v */
    char *file;                       /* which all of these lie in */
};

/* False, with a line on stderr, for a file that is none of make_case.py. */
bool input_read(const char *path, struct input *input);
void input_free(struct input *input);

/* The values at `*at`, which moves on to those of the next layer, or of the next step behind the last layer. */
struct values input_next(const struct input *input, const struct step *step, const char **at);

bool complain(const char *format, ...) __attribute__((format(printf, 1, 2))); /* a line on stderr; always false */

#endif
