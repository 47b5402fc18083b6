/* A call that is laid out: the memory that it needs, its words, and its dispatches, for any recorder of commands. */
#pragma once
#include "objects.h"
#include "work.h"
#include "zinc_attn.h"

/* A call of `counts`, whose bytes these are. q: (rows, q_heads, k_dim); out: (rows, q_heads, v_dim), lse behind it. */
struct laid {
    struct rule rule;
    struct counts counts;
    struct parts parts;
    int attend; /* number of the pipeline of pass 1 */
    uint64_t work_bytes, states_bytes, q_bytes, out_bytes;
};

/* What the dispatches of a call bind; k and v as the cache has them. Offsets are multiples of za_device_info.alignment,
   that of `work` of 256, too. given_q: of ZA_INTEGER, what za_round_q makes q of. */
struct bindings {
    struct za_place work, rows, q, k, v, states, out, given_q;
};

enum { CALL_COMMANDS = 4 }; /* append, attend of shared rows, attend, merge: at most */

/* Check a call on a layer of the cache and lay it out; lse false: it is not wanted, and out ends where it would begin.
   False, and why (za_error), for what is refused. The second one makes its pipelines, too, and is for other threads. */
bool za_lay_out(const struct za_cache *cache, const struct za_call *call, bool lse, struct laid *laid);
bool za_lay(struct za_cache *cache, const struct za_call *call, bool lse, struct laid *laid);

/* From the counts to all else. */
void za_lay_counts(const struct za_attn *attn, bool softcap, struct laid *laid);
bool za_laid_pipelines(struct za_attn *attn, const struct laid *laid);

/* Write the call's work_bytes. Layers of equal steps and scales have the same words, wherever they lie. */
void za_laid_write(const struct za_cache *cache, uint32_t layer, const struct za_call *call, const struct laid *laid,
                   uint32_t *work);

/* What comes before a call of ZA_INTEGER: query vectors (rows, q_heads, head_dim), to q as its dispatches take it. */
struct za_command za_round_q(const struct za_attn *attn, uint64_t rows, struct za_place given_q, struct za_place q);

/* The call's dispatches, in order; returns their number. */
int za_laid_commands(const struct za_attn *attn, const struct laid *laid, const struct bindings *b,
                     struct za_command commands[CALL_COMMANDS]);
