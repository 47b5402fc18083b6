#include "laid.h"

#include "attn.h"
#include "check.h"

void za_lay_counts(const struct za_attn *attn, bool softcap, struct laid *laid) {
    const struct shape *shape = &attn->shape;
    const struct counts *counts = &laid->counts;
    laid->parts = za_parts(shape, counts);
    laid->attend = za_attend_of(attn, counts, softcap);
    laid->work_bytes = 4 * (laid->parts.base + laid->parts.end);
    laid->states_bytes = counts->single_pass ? 0 : 4 * counts->states * shape->sizes.state_words;
    laid->q_bytes = za_q_bytes(shape, counts->rows);
    laid->out_bytes = 4 * counts->rows * shape->q_heads * (shape->v_dim + (counts->lse ? 1 : 0));
}

bool za_lay_out(const struct za_cache *cache, const struct za_call *call, bool lse, struct laid *laid) {
    const struct za_attn *attn = cache->attn;
    const VkPhysicalDeviceLimits *limits = &attn->device->properties.limits;
    *laid = (struct laid){.rule = {
        .rows_each = za_rows_together(&attn->shape.sizes, limits->maxComputeSharedMemorySize),
        .most_shared = limits->maxComputeWorkGroupCount[1],
        .fused = attn->arithmetic == FUSED_NATIVE || attn->arithmetic == FUSED_EMULATED,
    }};
    if (!za_check_call(&attn->shape, call, cache->pages)) return false;
    laid->counts = za_counts(&attn->shape, call, laid->rule);
    laid->counts.lse = lse;
    za_lay_counts(attn, call->softcap != 0, laid);
    return za_check_counts(attn->device, &laid->counts, &laid->parts);
}

bool za_laid_pipelines(struct za_attn *attn, const struct laid *laid) {
    const struct counts *counts = &laid->counts;
    return (attn->arithmetic != INTEGER_SUMS || !counts->rows || za_need_pipeline(attn, ROUND)) &&
           (!counts->new_rows || za_need_pipeline(attn, APPEND)) &&
           (!counts->items || za_need_pipeline(attn, laid->attend)) &&
           (!counts->shared || za_need_pipeline(attn, za_shared_of(laid->attend))) &&
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

struct za_command za_round_q(const struct za_attn *attn, uint64_t rows, struct za_place given_q, struct za_place q) {
    const struct za_place places[] = {[ROUND_Q_BIND_Q] = given_q, [ROUND_Q_BIND_ROUNDED] = q};
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
    const struct za_place places[] = {
        [ATTEND_BIND_WORK] = b->work, [ATTEND_BIND_Q] = b->q, [ATTEND_BIND_K] = b->k, [ATTEND_BIND_V] = b->v,
        [ATTEND_BIND_STATES] = target, [ATTEND_BIND_OUT] = target};
    const int pipeline = shared ? za_shared_of(laid->attend) : laid->attend;
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
