#include "check.h"

#include <math.h>

#include "error.h"

enum { MAX_TOKENS = 1 << 24, MAX_PIECES = 1 << 24 };

static bool check_floats(const struct manifest *m, const char *name, const float *values, size_t n) {
    for (size_t i = 0; i < n; ++i) {
        if (!(fabsf(values[i]) <= m->max_input)) /* also where it is NaN */
            return za_fail("%s[%zu]: got %g, expected at most %g", name, i, (double)values[i], (double)m->max_input);
    }
    return true;
}

/* What is added to scores: finite, or -inf for a key that a row does not see. */
static bool check_mask(const struct manifest *m, const struct za_call *call) {
    size_t n = (size_t)call->q_len * call->mask_keys;
    if (call->mask_keys > call->tokens)
        return za_fail("mask_keys: got %u, expected at most the %u tokens", call->mask_keys, call->tokens);
    if (n && !call->mask) return za_fail("mask: got NULL, expected q_len * mask_keys = %zu numbers", n);
    for (size_t i = 0; i < n; ++i) {
        if (!(fabsf(call->mask[i]) <= m->max_input) && call->mask[i] != -INFINITY)
            return za_fail("mask[%zu, %zu]: got %g, expected at most %g, or -INFINITY for a key that the row does not "
                           "see", i / call->mask_keys, i % call->mask_keys, (double)call->mask[i],
                           (double)m->max_input);
    }
    return true;
}

static bool check_numbers(const struct manifest *m, const struct za_call *call, uint32_t layers) {
    if (call->layer >= layers) return za_fail("layer: got %u, expected one below %u", call->layer, layers);
    if (call->tokens > MAX_TOKENS) return za_fail("tokens: got %u, expected at most %d", call->tokens, MAX_TOKENS);
    if (call->new_rows > call->tokens)
        return za_fail("new_rows: got %u, expected at most the %u tokens", call->new_rows, call->tokens);
    if (call->q_len > MAX_TOKENS || (uint64_t)call->q_len * call->splits > MAX_PIECES)
        return za_fail("q_len, splits: got %u and %u, expected a product of at most %d", call->q_len, call->splits,
                       MAX_PIECES);
    if (call->softcap != 0 && !(call->softcap >= (double)m->min_input && call->softcap <= (double)m->max_input))
        return za_fail("softcap: got %g, expected %g to %g, or 0 for none", call->softcap, (double)m->min_input,
                       (double)m->max_input);
    double scale = fabs(call->scale);
    if (scale != 0 && !(scale >= 0x1p-126 && scale <= 0x1p126)) /* also where it is NaN */
        return za_fail("scale: got %g, expected a magnitude from 2**-126 to 2**126, or 0 for 1 / sqrt(head_dim)",
                       call->scale);
    return true;
}

bool za_check_call(const struct manifest *m, const struct shape *shape, const struct za_call *call, uint32_t layers,
                   uint32_t pages) {
    if (!check_numbers(m, call, layers)) return false;
    if (shape->latent && call->v && call->new_rows)
        return za_fail("v: got an array, expected NULL; V of a latent shape is part of k");
    uint32_t used = call->tokens / shape->page_size + (call->tokens % shape->page_size != 0);
    for (uint32_t i = 0; i < used; ++i) {
        if (call->page_table[i] >= pages)
            return za_fail("page_table[%u]: got %u, expected a page below %u", i, call->page_table[i], pages);
    }
    return check_floats(m, "q", call->q, (size_t)call->q_len * shape->q_heads * shape->head_dim) &&
           (!call->sinks || check_floats(m, "sinks", call->sinks, shape->q_heads)) &&
           (!call->alibi || check_floats(m, "alibi", call->alibi, shape->q_heads)) && check_mask(m, call);
}

bool za_check_scores(const struct manifest *m, const struct shape *shape, const struct za_call *call,
                     double largest_k) {
    size_t n = (size_t)call->q_len * shape->q_heads * shape->head_dim;
    double largest_q = 0;
    for (size_t i = 0; i < n; ++i) largest_q = fmax(largest_q, fabs((double)call->q[i]));
    if (largest_q * largest_k * shape->head_dim * fmax(1, 1.5 * fabs(call->scale)) <= (double)m->max_score) return true;
    return za_fail("q, k: got max|q| = %g, max|k| = %g and scale = %g, whose scores may overflow", largest_q, largest_k,
                   call->scale);
}

bool za_check_groups(const struct gpu *gpu, const struct za_call *call, uint32_t items) {
    const uint32_t *most = gpu->properties.limits.maxComputeWorkGroupCount;
    if (items <= most[0] && call->q_len <= most[2] && call->new_rows <= most[0]) return true;
    return za_fail("q_len, new_rows: got %u and %u, which make %u items; %s takes at most %u rows and %u items or new "
                   "rows in a call; make several calls", call->q_len, call->new_rows, items,
                   gpu->properties.deviceName, most[2], most[0]);
}
