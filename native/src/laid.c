#include "laid.h"

#include "attn.h"
#include "check.h"

void za_lay_counts(const struct za_attn *attn, bool softcap, struct laid *laid) {
    const struct shape *shape = &attn->shape;
    const struct counts *counts = &laid->counts;
    laid->parts = za_parts(shape, counts);
    laid->attend = za_attend_of(attn, counts, softcap);
    laid->shared = za_shared_of(laid->attend);
    if (laid->rule.units) laid->shared = za_attend_by_units(counts, softcap, laid->rule.units);
    laid->work_bytes = 4 * (laid->parts.base + laid->parts.end);
    laid->states_bytes = counts->single_pass ? 0 : 4 * counts->states * shape->sizes.state_words;
    if (laid->rule.whole) laid->states_bytes = 4 * counts->rows * shape->q_heads * shape->v_dim; /* totals of nodes */
    laid->q_bytes = za_q_bytes(shape, counts->rows);
    laid->out_bytes = 4 * counts->rows * shape->q_heads * (shape->v_dim + (counts->lse ? 1 : 0));
}

bool za_lay_out(const struct za_cache *cache, const struct za_call *call, bool lse, struct laid *laid) {
    const struct za_attn *attn = cache->attn;
    const struct shape *shape = &attn->shape;
    const VkPhysicalDeviceLimits *limits = &attn->device->properties.limits;
    uint32_t rows = 0; /* of the longest request that is for matrix units */
    *laid = (struct laid){.rule = {
        .rows_each = za_rows_together(&shape->sizes, limits->maxComputeSharedMemorySize),
        .most_shared = limits->maxComputeWorkGroupCount[1],
        .fused = attn->arithmetic == FUSED_NATIVE || attn->arithmetic == FUSED_EMULATED,
    }};
    if (!za_check_call(shape, call, cache->pages)) return false;
    for (uint32_t i = 0; attn->units && i < call->requests; ++i)
        if (za_many(shape, &call->request[i])) rows = (uint32_t)za_max(rows, call->request[i].q_len);
    if (rows)
        laid->rule.units = za_units_vectors(&shape->sizes, limits, attn->device->units.m, rows * shape->sizes.group);
    laid->rule.whole = rows && !call->splits && za_walks(shape, call, laid->rule);
    laid->counts = za_counts(shape, call, laid->rule);
    laid->counts.lse = lse;
    za_lay_counts(attn, call->softcap != 0, laid);
    return za_check_counts(attn->device, &laid->counts, &laid->parts);
}

bool za_laid_pipelines(struct za_attn *attn, const struct laid *laid) {
    const struct counts *counts = &laid->counts;
    return (attn->arithmetic != INTEGER_SUMS || !counts->rows || za_need_pipeline(attn, ROUND)) &&
           (!counts->new_rows || za_need_pipeline(attn, APPEND)) &&
           (!counts->items || za_need_pipeline(attn, laid->attend)) &&
           (!counts->shared || za_need_pipeline(attn, laid->shared)) &&
           (!counts->rows || counts->single_pass || za_need_pipeline(attn, MERGE));
}

bool za_lay(struct za_cache *cache, const struct za_call *call, bool lse, struct laid *laid) {
    struct za_attn *attn = cache->attn;
    return za_enter(attn->device) &&
           za_leave(attn->device, za_lay_out(cache, call, lse, laid) && za_laid_pipelines(attn, laid));
}

void za_laid_write(const struct za_cache *cache, uint32_t layer, const struct za_call *call, const struct laid *laid,
                   uint32_t *work) {
    const struct layer layer_words = za_layer_of(cache, layer);
    za_work_write(&cache->attn->shape, call, laid->rule, &laid->counts, &layer_words, work);
}

/* --- dispatches -------------------------------------------------------------------------------------- */

struct za_command za_round_q(const struct za_attn *attn, uint64_t rows, struct za_place unrounded_q,
                             struct za_place q) {
    const struct za_place places[] = {[ROUND_Q_BIND_Q] = unrounded_q, [ROUND_Q_BIND_ROUNDED] = q};
    uint32_t groups[3];
    za_round_q_groups(&attn->shape.sizes, rows, groups);
    return za_command(&attn->pipelines[ROUND], places, groups);
}

static struct za_command append(const struct za_attn *attn, const struct laid *laid, const struct bindings *b) {
    const struct za_place places[] = {[APPEND_BIND_WORK] = b->work, [APPEND_BIND_ROWS] = b->rows,
                                      [APPEND_BIND_K] = b->k, [APPEND_BIND_V] = b->v};
    uint32_t groups[3];
    za_append_groups(&attn->shape.sizes, laid->counts.new_rows, groups);
    return za_command(&attn->pipelines[APPEND], places, groups);
}

static struct za_command attend(const struct za_attn *attn, const struct laid *laid, const struct bindings *b,
                                bool shared) {
    const struct za_place target = laid->counts.single_pass ? b->out : b->states;
    const struct za_place states = laid->rule.whole ? b->states : target;
    const struct za_place places[] = {
        [ATTEND_BIND_WORK] = b->work, [ATTEND_BIND_Q] = b->q, [ATTEND_BIND_K] = b->k, [ATTEND_BIND_V] = b->v,
        [ATTEND_BIND_STATES] = states, [ATTEND_BIND_OUT] = target};
    const int pipeline = shared ? laid->shared : laid->attend;
    uint32_t groups[3];
    za_attend_groups(&attn->shape.sizes, shared ? laid->counts.shared : laid->counts.items,
                     za_vectors_of(attn, pipeline), groups);
    return za_command(&attn->pipelines[pipeline], places, groups);
}

static struct za_command merge(const struct za_attn *attn, const struct laid *laid, const struct bindings *b) {
    const struct za_place places[] = {
        [MERGE_BIND_WORK] = b->work, [MERGE_BIND_STATES] = b->states, [MERGE_BIND_OUT] = b->out};
    uint32_t groups[3];
    za_merge_groups(&attn->shape.sizes, laid->counts.rows, groups);
    return za_command(&attn->pipelines[MERGE], places, groups);
}

int za_laid_commands(const struct za_attn *attn, const struct laid *laid, const struct bindings *bound,
                     struct za_command commands[CALL_COMMANDS]) {
    const struct counts *counts = &laid->counts;
    struct bindings b = *bound;
    int n = 0;
    b.work.offset += 4 * laid->parts.base;
    b.work.size -= 4 * laid->parts.base;
    if (counts->new_rows) commands[n++] = append(attn, laid, &b);
    const int first = n;
    if (counts->shared) commands[n++] = attend(attn, laid, &(struct bindings){
        .work = bound->work, .q = b.q, .k = b.k, .v = b.v, .states = b.states, .out = b.out}, true);
    if (counts->items) commands[n++] = attend(attn, laid, &b, false);
    if (n > first)
        commands[first].products = counts->keys * attn->shape.q_heads * (attn->shape.k_dim + attn->shape.v_dim);
    if (n > first + 1) commands[n - 1].independent = true;
    if (counts->rows && !counts->single_pass) commands[n++] = merge(attn, laid, &b);
    return n;
}
