/* The layout of a call: the memory that it needs, its words, and its dispatches, for any recorder of commands. */
#pragma once
#include "objects.h"
#include "work.h"
#include "zinc_attn.h"

/* A laid-out call, and the bytes of its buffers. q: (rows, q_heads, k_dim); out: (rows, q_heads, v_dim), then lse. */
struct laid {
    struct rule rule;
    struct counts counts;
    struct parts parts;
    int attend, shared; /* numbers of the pipelines of pass 1; shared: for the items of several rows or by units */
    uint64_t work_bytes, states_bytes, q_bytes, out_bytes;
};

/* The places that the dispatches of a call bind; k and v are the cache's. Offsets are multiples of
   za_device_info.alignment. The offset of `work` is a multiple of 256, too. unrounded_q: for ZA_INTEGER, the q that
   za_round_q rounds. */
struct bindings {
    struct za_place work, rows, q, k, v, states, out, unrounded_q;
};

enum { CALL_COMMANDS = 4 }; /* append, attend of shared rows, attend, merge: at most */

/* Check a call on a layer of the cache and lay it out. lse false: the call writes no lse, and out ends where lse would
   begin. False: the call is refused, and za_error says why. za_lay also enters the device and makes the pipelines. */
bool za_lay_out(const struct za_cache *cache, const struct za_call *call, bool lse, struct laid *laid);
bool za_lay(struct za_cache *cache, const struct za_call *call, bool lse, struct laid *laid);

/* Fill in a layout whose counts are set; make its pipelines. */
void za_lay_counts(const struct za_attn *attn, bool softcap, struct laid *laid);
bool za_laid_pipelines(struct za_attn *attn, const struct laid *laid);

/* Write the words of the call, work_bytes bytes. All layers with equal steps and scales have the same words. */
void za_laid_write(const struct za_cache *cache, uint32_t layer, const struct za_call *call, const struct laid *laid,
                   uint32_t *work);

/* The dispatch before a call of ZA_INTEGER: it rounds query vectors (rows, q_heads, head_dim) to the q of the call. */
struct za_command za_round_q(const struct za_attn *attn, uint64_t rows, struct za_place unrounded_q, struct za_place q);

/* Make the call's dispatches, in order, and return their number. */
int za_laid_commands(const struct za_attn *attn, const struct laid *laid, const struct bindings *b,
                     struct za_command commands[CALL_COMMANDS]);
