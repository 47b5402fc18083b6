/* zinc_attn for C: decode attention on Vulkan from the exported SPIR-V modules, in buffers of the library's own.

   A host opens a za_attn for one shape and the storage types of K and V, makes a za_cache for the layers that share a
   pair of K and V buffers, and then makes one call per layer and step: append the new rows, attend, merge, in one
   submission. Pages and page tables are the host's own; main.c shows how they grow and how sequences are forked.
   docs/c-hosts.md explains what the library writes for the kernels.

   Every function that can fail returns false or NULL, and za_error says why. A failed call has no effect that a later
   call could see, because the host counts a token only after the calls of all layers have succeeded. A za_attn and its
   caches belong to one thread at a time. Little-endian machines only, as words are used as they lie in files. */
#ifndef ZINC_ATTN_H
#define ZINC_ATTN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Storage types. Of one value: f32, f16, bf16, and fp8_e4m3, which has a float32 scale per head. Of ggml's blocks, 32
   head dimensions that share a scale: the others. */
enum za_dtype {
    ZA_AS_K, /* of v_dtype alone: K's type */
    ZA_F32,
    ZA_F16,
    ZA_BF16,
    ZA_Q8_0,
    ZA_FP8_E4M3,
    ZA_Q5_1,
    ZA_Q5_0,
    ZA_Q4_1,
    ZA_Q4_0,
    ZA_IQ4_NL,
    ZA_DTYPES
};

struct za_options {
    const char *manifest; /* the folder that `zinc-attn export` wrote, for this shape and these types */
    const char *device;   /* a piece of the device's name; NULL: the best one, a discrete GPU before all others */
    uint32_t q_heads, kv_heads, head_dim;
    uint32_t v_head_dim;          /* the size of V and out; 0: head_dim */
    bool latent;                  /* V is the first v_head_dim dimensions of K, and is stored once, as a part of it */
    enum za_dtype dtype, v_dtype; /* in which K is stored, and V; v_dtype 0 (ZA_AS_K): as K, which latent needs */
};

struct za_info {
    const char *device;
    bool cpu;           /* the driver runs on the CPU */
    bool wave32;        /* subgroups of 32 invocations were requested, which is faster on RDNA */
    uint32_t page_size; /* tokens of a page */
};

/* One layer's call for one sequence. Arrays are row-major; an array of no elements may be NULL. */
struct za_call {
    uint32_t layer;             /* of the cache, from 0 on */
    uint32_t tokens;            /* keys of the sequence, the new rows among them */
    const uint32_t *page_table; /* token t lies in page page_table[t / page_size]; ids are below the cache's pages */

    uint32_t new_rows; /* tokens [tokens - new_rows, tokens) are appended before the call attends */
    const void *k, *v; /* (new_rows, kv_heads, head_dim), v's v_head_dim; v is NULL where the shape is latent. By the
                          type of each: uint16_t, the bits of the values, for ZA_F16 and ZA_BF16; float for ZA_F32 and
                          for the others, to which the library quantizes */
    bool encoded;      /* k and v are rows that are stored already, as a llama.cpp cache has them: (new_rows, kv_heads)
                          rows of ggml's blocks for block types, of bytes for ZA_FP8_E4M3, of values for the others */

    uint32_t q_len; /* query rows, those of tokens [tokens - q_len, tokens); each sees its own key and those before,
                       see noncausal and mask. A row that sees no key, as where tokens is 0, gives out 0 and lse -inf
                       (or what the sinks give) */
    const float *q; /* (q_len, q_heads, head_dim) */
    float *out;     /* (q_len, q_heads, v_head_dim) */
    float *lse;     /* (q_len, q_heads): natural log of the sum of exp(score), or NULL where it is not wanted */

    double scale;       /* of the scores, +-2**-126 to 2**126; 0: the default, 1 / sqrt(head_dim) */
    double softcap;     /* scores become softcap * tanh(score / softcap); 0: they stay as they are */
    uint32_t window;    /* keys that a row sees at most, its own among them; 0: all */
    bool noncausal;     /* rows see the keys behind their own, too */
    const float *sinks; /* (q_heads) logits that join the softmax without a value; NULL: none */
    const float *alibi; /* (q_heads) slopes: scores become score - slope * |key - row's own token|; NULL: none */
    const float *mask;  /* (q_len, mask_keys): is added to the scores of the sequence's last mask_keys keys, the new
                           ones among them; -INFINITY for a key that the row does not see. It hides or changes keys that
                           the row would see without it, and leaves the keys before them as they are */
    uint32_t mask_keys; /* 0: no mask */
    uint32_t splits;    /* number of pieces that the keys are cut into; 0: the split rule. Never shows in the bits. */
};

/* How the last call was made, for reading beside docs/c-hosts.md. Valid until the next call. */
struct za_trace {
    const uint32_t *work; /* the words of the work buffer */
    size_t work_words;
    uint32_t splits, leaves_per_state;
    bool loop; /* pass 1 ran attend_loop, otherwise attend_single */
};

struct za_attn;
struct za_cache;

/* The reason of the last failure in this thread, a line without a newline. */
const char *za_error(void);

struct za_attn *za_open(const struct za_options *options);
void za_close(struct za_attn *attn); /* after its caches were freed; NULL does nothing */
struct za_info za_info(const struct za_attn *attn);
struct za_trace za_trace(const struct za_attn *attn);

/* K and V of `layers` layers in one buffer each, `pages` pages a layer. A page id names the same place in every layer.
   Layers that one storage buffer cannot hold together go into several caches. k_scales, v_scales: (layers, kv_heads),
   each from 2**-31 to 2**51, what the heads of a layer multiply K's and V's values by, for ZA_FP8_E4M3. They are copied;
   NULL for all other types, and v_scales where the shape is latent, whose V has K's scales. */
struct za_cache *za_cache_make(struct za_attn *attn, uint32_t layers, uint32_t pages, const float *k_scales,
                               const float *v_scales);
void za_cache_free(struct za_attn *attn, struct za_cache *cache); /* NULL does nothing */

/* Append, attend and merge; returns when out and lse are written. q_len 0 appends only, new_rows 0 attends only. */
bool za_run(struct za_attn *attn, struct za_cache *cache, const struct za_call *call);

/* Copy page `source` to page `target` in every layer of the cache: before a token is written to a page that another
   sequence's table names, too. */
bool za_copy_page(struct za_attn *attn, struct za_cache *cache, uint32_t source, uint32_t target);

#ifdef __cplusplus
}
#endif
#endif
