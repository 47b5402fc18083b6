/* zinc_attn for C: decode attention on Vulkan, as a part of an engine or by itself. The kernels are in the library.

   za_device    a Vulkan device: one that the library opens, or the host's own
   za_attn      the pipelines for one shape and the storage types of K and V
   za_cache     K and V of the layers that share a pair of buffers, in the library's memory or at places of the host's
   za_run       a call from host memory to host memory; za_run_at from and to buffers on the device. Both wait
   za_prepared  a call that is recorded into the host's command buffers, whose words change from step to step

   Pages and page tables are the host's own. docs/c-hosts.md explains what the library writes for the kernels.

   Errors. Every function that can fail returns false or NULL; then za_error is its reason and za_error_code its kind. A
   failed call has no effect that a later call could see, because the host counts a token only after the calls of all
   layers have succeeded. NULL for a handle or struct is refused; functions that cannot fail accept NULL only if their
   comment says so. The library does not notice handles that are not Vulkan's or are freed, arrays that are too short,
   and a page id that is twice in a table, so that its keys overwrite each other.

   Ownership. The structs, arrays and texts that the host passes stay the host's, and a function uses them only until it
   returns. The host frees an object after the last submission that uses it, and before the object from which it was
   made; until then the latter refuses to be closed.

   Threads. A za_device and all that was made from it belong to one thread at a time, as does the host's queue while one
   of the functions that submit runs: za_open, za_run, za_run_at, za_copy_page. A function that can fail refuses a
   second thread meanwhile (ZA_BUSY). za_error and za_error_code are of the calling thread.

   Little-endian machines only, as words are used as they lie in files. All arrays are row-major. */
#ifndef ZINC_ATTN_H
#define ZINC_ATTN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <vulkan/vulkan_core.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(ZA_STATIC) || !defined(__GNUC__)
#define ZA_API
#else
#define ZA_API __attribute__((visibility("default")))
#endif

/* A library whose za_abi gives the same number has these structs and functions. */
enum { ZA_ABI = 1 };
ZA_API uint32_t za_abi(void);

/* --- errors ------------------------------------------------------------------------------------------ */

enum za_code {
    ZA_OK,
    ZA_INVALID,     /* an argument: what was given and what is expected */
    ZA_UNSUPPORTED, /* the device or its driver cannot do it: no Vulkan 1.1, a limit, other bits of a float function */
    ZA_MEMORY,      /* out of host or device memory */
    ZA_BUSY,        /* another thread is in a function of this device */
    ZA_LOST,        /* the device was lost, or a submission did not end: every later call on this device gives this
                       code; free the objects of the device, and open it again */
    ZA_DRIVER       /* Vulkan gave another error */
};

/* The last failure in this thread: a line without a newline, and its kind. A success leaves both as they are. */
ZA_API const char *za_error(void);
ZA_API enum za_code za_error_code(void);

/* --- the device -------------------------------------------------------------------------------------- */

struct za_device;

/* A device of the host's. It outlives the za_device that is made from it. The library never destroys it, never waits
   for it to be idle, and submits to this queue only. */
struct za_host {
    VkInstance instance;
    VkPhysicalDevice physical; /* of Vulkan 1.1 at least */
    VkDevice device;
    uint32_t family; /* the family of the queue, which does compute */
    VkQueue queue;
    PFN_vkGetInstanceProcAddr get_proc;       /* every Vulkan function that the library calls comes from it */
    const VkPhysicalDeviceFeatures2 *enabled; /* the features with which the device was made, or NULL for none. Read
                                                 during za_device_from only */
};

/* Set the features that the library can use and `physical` offers in the structs of the host's chain, before
   vkCreateDevice. Nothing else in the chain changes. The library needs no feature. It can use:
     subgroupSizeControl (VkPhysicalDeviceSubgroupSizeControlFeatures or VkPhysicalDeviceVulkan13Features; before Vulkan
     1.3 with VK_EXT_subgroup_size_control): the library asks for subgroups of 32, which is faster on RDNA. Without the
     feature, or without its struct in the chain, the driver chooses the size. The size does not change the bits.
     cooperativeMatrix (VkPhysicalDeviceCooperativeMatrixFeaturesKHR, of VK_KHR_cooperative_matrix) with shaderInt8 and
     vulkanMemoryModel (their own structs or VkPhysicalDeviceVulkan12Features), and subgroups of 32, from Vulkan 1.3 on:
     int8 matrix units attend many rows of ZA_INTEGER, with the same bits. $ZINC_ATTN_UNITS=0 leaves them out. */
ZA_API bool za_wanted_features(VkInstance instance, VkPhysicalDevice physical, PFN_vkGetInstanceProcAddr get_proc,
                               VkPhysicalDeviceFeatures2 *chain);

/* name: a part of the device's name. NULL: the best device, a discrete GPU before all others. "cpu": the processor,
   whose kernels are native code in libzinc_cpu, a library in the same folder. It needs no Vulkan driver, and its
   VkDevice has only the functions that this library calls. */
ZA_API struct za_device *za_device_open(const char *name);
ZA_API struct za_device *za_device_from(const struct za_host *host);
ZA_API bool za_device_close(struct za_device *device); /* after every za_attn of it; NULL does nothing */

struct za_device_info {
    const char *name;       /* lives as long as the za_device */
    bool cpu;               /* the driver runs on the CPU */
    bool wave32;            /* subgroups of 32 invocations are asked for */
    VkDeviceSize alignment; /* of the offset of a za_place: minStorageBufferOffsetAlignment */
    VkDeviceSize most;      /* bytes of a za_place that kernels use: maxStorageBufferRange */
};
ZA_API struct za_device_info za_device_info(const struct za_device *device);

/* The handles of a device that the library opened, or the host's own: buffers and command pools can be made with them.
   `enabled` is NULL. */
ZA_API struct za_host za_device_host(const struct za_device *device);

/* --- shapes ------------------------------------------------------------------------------------------ */

/* Storage types. f32, f16, bf16 and fp8_e4m3 store single values; fp8_e4m3 has a float32 scale per head. The other
   types store ggml's blocks, 32 head dimensions that share a scale. */
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

enum za_arithmetic {
    ZA_CANONICAL, /* every operation rounds */
    ZA_FUSED,     /* products are added before they are rounded; other bits, the same on every device */
    ZA_INTEGER    /* sums of integers, for K and V in q8_0, q5_0, q4_0 or iq4_nl; other bits, the same on every
                     device. A query vector is rounded to 12 bits on the device */
};

struct za_attn;

struct za_options {
    uint32_t q_heads, kv_heads;   /* q_heads: a multiple of kv_heads, up to 65,535 */
    uint32_t head_dim;            /* of q and K, any number from 1 to 576 */
    uint32_t v_head_dim;          /* of V and out, 1 to 576; 0: head_dim */
    bool latent;                  /* V is the first v_head_dim dimensions of K, and is stored as a part of K */
    enum za_dtype dtype, v_dtype; /* in which K is stored, and V; v_dtype 0 (ZA_AS_K): as K, which latent needs */
    enum za_arithmetic arithmetic;
    uint32_t page_size;          /* tokens of a page, a power of two up to 65,536; 0: 256 */
    uint32_t k_stride, v_stride; /* 0: K and V lie in tiles. Otherwise in rows, as most engines keep them: bytes from a
                                    row of K (of V) to the next, a multiple of 2, from a row's own bytes to 65,536. A
                                    row is one token's values of one KV head, head_dim of plain types, ggml's blocks of
                                    block types: rows of 64 in float16 without gaps have 128. v_stride: 0 where the
                                    shape is latent */
    uint32_t compute_units;      /* of the device, for the split rule and matrix units; 0: 64. It changes no bits */
};

/* Refuses a device without workgroups of 256 invocations and enough shared memory for them. Runs the kernel
   `primitives` (and `multiply_add` for ZA_FUSED) on known numbers, and refuses a driver that computes one of the
   results otherwise. Other pipelines are made by the first call that needs them, or by za_prepare. */
ZA_API struct za_attn *za_open(struct za_device *device, const struct za_options *options);
ZA_API bool za_close(struct za_attn *attn); /* after its caches and prepared calls; NULL does nothing */

struct za_info {
    uint32_t page_size;                      /* tokens of a page, from 1 on */
    uint32_t k_dim, v_dim;                   /* head_dim and v_head_dim in kernels, padded with zeros */
    uint32_t row_words;                      /* uint32 words of a new row of one KV head, see za_places */
    VkDeviceSize k_page_bytes, v_page_bytes; /* of a page in a layer; v: 0 where the shape is latent. Of rows: where
                                                tokens come first */
};
ZA_API struct za_info za_info(const struct za_attn *attn);

/* --- caches ------------------------------------------------------------------------------------------ */

/* Bytes of a VkBuffer of the za_device's. A place that a kernel binds needs an offset that is a multiple of
   za_device_info.alignment, and a buffer with VK_BUFFER_USAGE_STORAGE_BUFFER_BIT. A copy needs a multiple of 4 and the
   usage that its comment names. The host keeps the buffer until no call, cache or recorded command buffer uses it.
   buffer VK_NULL_HANDLE: no place. */
struct za_place {
    VkBuffer buffer;
    VkDeviceSize offset, size;
};

struct za_cache;

/* K and V of `layers` layers in one buffer each, `pages` pages a layer. A page id names the same place in every layer.
   Layers that a storage buffer cannot hold together go into several caches. The place of a key is undefined before the
   key is appended: the host attends only appended keys. k_scales, v_scales: (layers, kv_heads), each from 2**-31 to
   2**51, for ZA_FP8_E4M3; the values of K and V of a head are multiplied by its scales. The library copies them. NULL
   for all other types; v_scales is NULL for a latent shape, too, whose V has K's scales. */
ZA_API struct za_cache *za_cache_make(struct za_attn *attn, uint32_t layers, uint32_t pages, const float *k_scales,
                                      const float *v_scales);

/* K and V in the host's memory: layer after layer, page after page; docs/c-hosts.md says where a value lies. The host
   may write K and V itself, in tiles with zeros after head_dim; then its calls need no new rows. If a layer's bytes are
   no multiple of za_device_info.alignment, make a cache of a single layer at each layer's place. Such caches are as
   good in any case.

   Rows (k_stride): let t = (layer * pages + page id) * page_size + token % page_size. The row of a token and KV head h
   has the number t * token_rows + h * head_rows, and begins at this number times k_stride (v_stride). Both 0 mean
   kv_heads and 1: tokens come first. With page_size 1 and token_rows 1 a page id is the number of KV head 0's row. The
   rows of a page do not collide: from page_size 2 on token_rows is at least head_rows * kv_heads, or head_rows at least
   token_rows * page_size. Two pages may share rows; the host chooses which ids it uses together. An appended row is
   written with all bytes of its stride. */
struct za_cache_places {
    uint32_t layers, pages;           /* pages of a layer */
    struct za_place k, v;             /* layers * pages * k_page_bytes, and v_page_bytes; v: none where it is latent. Of
                                         rows: to the end of the last one. Both filled up to a multiple of 4 */
    const float *k_scales, *v_scales; /* as for za_cache_make */
    uint32_t token_rows, head_rows;   /* rows from a token to the next, and from a KV head to the next, which may be 0
                                         where kv_heads is 1; of tiles both are 0 */
};
ZA_API struct za_cache *za_cache_from(struct za_attn *attn, const struct za_cache_places *places);
ZA_API void za_cache_free(struct za_cache *cache); /* after the last submission that uses it; NULL does nothing */

/* Copy page `source` to page `target` in every layer of the cache, and wait. A host calls it before it writes a token
   to a page that is in another sequence's table, too. ZA_UNSUPPORTED for rows whose pages are not in one piece. The
   host's places need VK_BUFFER_USAGE_TRANSFER_SRC_BIT and _DST_BIT. */
ZA_API bool za_copy_page(struct za_cache *cache, uint32_t source, uint32_t target);

/* --- calls ------------------------------------------------------------------------------------------- */

/* One sequence of a call: an ordered list of keys, and the query rows that see them. */
struct za_request {
    uint32_t tokens;            /* keys of the sequence, the new rows among them, at most 2**24 */
    uint32_t pages;             /* entries of page_table, at least ceil(tokens / page_size); others are not read */
    const uint32_t *page_table; /* key t lies in page page_table[t / page_size]; ids are below the cache's pages, in any
                                   order. Requests that follow each other with the same pointer share its words */
    uint32_t new_rows;          /* keys [tokens - new_rows, tokens) are appended before the call attends, no two of a
                                   call to the same place */
    uint32_t q_len; /* query rows, of keys [tokens - q_len, tokens); each sees its own key and the keys before, see
                       noncausal and mask. A row that sees no key gives out 0 and lse -inf (or what the sinks give) */
    bool noncausal; /* rows see the keys after their own, too */
    const float *mask;  /* (q_len, mask_keys): is added to the scores of the sequence's last mask_keys keys, the new
                           keys among them; -INFINITY hides a key from the row. The mask shows no key that the row does
                           not see without it. NULL: none */
    uint32_t mask_keys; /* at most the tokens; 0 where mask is NULL, and only there */
};

/* 0 and NULL are the defaults. Numbers of arrays, and of masks, are finite and of a magnitude up to 2**60. Together
   masks times slopes and alibi times distances add to a score at most 2**96. */
struct za_call {
    const struct za_request *request; /* (requests); their query rows, new rows and results follow each other */
    uint32_t requests;   /* 0: the call writes nothing; a step writes the results of rows that see no key */
    double scale;        /* of the scores, +-2**-126 to 2**126; 0: the default, 1 / sqrt(head_dim) */
    double softcap;      /* scores become softcap * tanh(score / softcap), 2**-40 to 2**60; 0: they stay as they are */
    uint32_t window;     /* a row sees no key before its own position - window + 1; 0: all */
    const float *sinks;  /* (q_heads) logits that join the softmax without a value; NULL: none */
    const float *alibi;  /* (q_heads) slopes: scores become score - slope * |key - row's own token|; NULL: none */
    const float *mask_slopes; /* (q_heads): a head's mask values are multiplied by its slope (ggml's ALiBi); NULL: 1.
                                 A call with query rows and no mask is refused, as the slopes would be of no effect */
    uint32_t splits; /* pieces that the keys of a request are cut into, whole nodes of 512 keys, times its q_len at most
                        2**24; 0: the split rule. Splits do not change the bits. 0 in steps of a prepared call */
};

/* The arrays of za_run in host memory. rows: the query rows of all requests, new: their new rows. */
struct za_data {
    const void *k, *v; /* (new, kv_heads, head_dim), v's v_head_dim; v is NULL where the shape is latent. By the type of
                          each: uint16_t, the bits of the values, for ZA_F16 and ZA_BF16; float for ZA_F32 and for the
                          others, to which the library quantizes. Finite; below 2**-40 is 0, and magnitudes are up to
                          2**60, to 448 times the head's scale for ZA_FP8_E4M3, to what float16 scales hold for blocks:
                          65,504 (Q5_1, Q4_1), 524,032 (Q4_0), 1,048,064 (Q5_0), 6,550,400 (IQ4_NL), 8,319,008 (Q8_0) */
    bool encoded;      /* k and v are rows that are stored already, as a llama.cpp cache has them: (new, kv_heads) rows
                          of ggml's blocks for block types, of bytes for ZA_FP8_E4M3, of values for the others */
    const float *q;    /* (rows, q_heads, head_dim), finite, magnitudes up to 2**60; below 2**-40 is 0 */
    float *out;        /* (rows, q_heads, v_head_dim) */
    float *lse;        /* (rows, q_heads): natural log of the sum of exp(score), or NULL where it is not wanted */
};

/* The same arrays in buffers on the device. The library does not see the values, so the host must make sure of these
   limits: values are finite, 0 or of a magnitude from 2**-40 to 2**60, and the sum of the largest |mask * slope|, the
   largest |alibi * tokens| and max|q| * max|k| * head_dim * max(1, 1.5 * |scale|, |scale| / softcap) is at most 2**96.
   Smaller magnitudes may change the last bits of results. Beyond the other limits results may be NaN. */
struct za_places {
    struct za_place rows; /* (new, kv_heads, row_words) uint32: K values, V values, K scales, V scales of each, see
                             docs/c-hosts.md; for f32, f16 and bf16 K's k_dim values, then V's v_dim. If K and V lie in
                             rows (k_stride): the k_stride bytes of K padded to words, then V's. No place if no request
                             has new rows */
    struct za_place q;    /* (rows, q_heads, head_dim) float32. If head_dim is below k_dim, the library copies it
                             (VK_BUFFER_USAGE_TRANSFER_SRC_BIT), except for ZA_INTEGER */
    struct za_place out;  /* (rows, q_heads, v_head_dim) float32 */
    struct za_place lse;  /* (rows, q_heads) float32, or none. If lse directly follows out in the same buffer, and
                             v_head_dim is v_dim, kernels write both in place. Otherwise the library copies both, and
                             the buffers need VK_BUFFER_USAGE_TRANSFER_DST_BIT */
};

/* Append, attend and merge in one layer of the cache; they return when the results are written. No places overlap, and
   no other submission uses them meanwhile. For a request q_len 0 appends only, new_rows 0 attends only. ZA_UNSUPPORTED
   for more workgroups than the device takes, see docs/c-hosts.md: make several calls. */
ZA_API bool za_run(struct za_cache *cache, uint32_t layer, const struct za_call *call, const struct za_data *data);
ZA_API bool za_run_at(struct za_cache *cache, uint32_t layer, const struct za_call *call,
                      const struct za_places *places);

/* How the last za_run or za_run_at of the za_attn was made; see docs/c-hosts.md. Valid until the next call. */
struct za_trace {
    const uint32_t *work; /* the words of the work buffer */
    size_t work_words;
    uint32_t splits; /* of the first request that attends */
    uint32_t shared; /* items of several rows or by matrix units, which lie in other words; see docs/c-hosts.md */
};
ZA_API struct za_trace za_trace(const struct za_attn *attn);

/* --- recorded calls ---------------------------------------------------------------------------------- */

/* The most that a step of a prepared call may have. A recorded command buffer dispatches for the whole room, so a room
   for twice the tokens costs workgroups that return at once. Prepare and record again when a sequence outgrows it. */
struct za_room {
    uint32_t slots;     /* frames in flight, 1 to 64; each has its own words */
    uint32_t requests;  /* of a step */
    uint32_t rows;      /* query rows of a step, over all requests; out and lse always are laid out for so many */
    uint32_t new_rows;  /* over all requests; 0: the recording appends nothing */
    uint32_t tokens;    /* of a request, at most 2**24 */
    uint32_t pages;     /* entries of all page tables; 0: requests * ceil(tokens / page_size) */
    uint32_t mask_keys; /* of a request; 0: steps have no masks */
    bool sinks;         /* steps may have sinks */
    bool softcap, alibi; /* true: every step has the option; false: no step has it */
    bool mask_slopes;    /* true: every step with a mask has slopes; false: no step has them */
};

struct za_prepared;

/* Makes the pipelines and the memory: the words of each slot, and the states between attend and merge. */
ZA_API struct za_prepared *za_prepare(struct za_attn *attn, const struct za_room *room);
ZA_API void za_prepared_free(struct za_prepared *prepared); /* after its last submission; NULL does nothing */

/* Record append, attend and merge for a slot and a layer of a cache into `commands`, which is in the recording state,
   outside a render pass, and is submitted to queues of the za_device's family. Memory barriers come before them,
   between each two, and after the last. After the first barrier they see the writes of all earlier commands, and the
   states are free. After the last barrier all commands and the host see their results. The host needs no other barrier.
   The compute pipeline and the descriptor sets are bound anew. places: for the room's rows and new rows.

   Any number of layers and command buffers may be recorded for a slot. Layers whose calls have the same requests and
   options share a prepared call, because only their places differ. Layers that differ in a window, sinks, slopes or
   scales of heads need a prepared call each. All submissions that use a prepared call go to the same queue, or the
   host's semaphores order them.

   After a failure the command buffer may hold a part of the commands; reset it. */
ZA_API bool za_record(struct za_prepared *prepared, uint32_t slot, VkCommandBuffer commands, struct za_cache *cache,
                      uint32_t layer, const struct za_places *places);

/* Write the words of a slot for the next submission of its command buffers. The device then reads these words until the
   submission has ended. The host knows its end by a fence or a timeline semaphore; the library keeps no count. With two
   slots the host writes a step while the other step runs. At least one layer must be recorded for the slot before a
   step. The call's numbers and page tables are checked against the room and the smallest cache that was recorded for
   the slot. A step may have fewer requests, rows, keys and new rows than the room: the other rows are not appended, and
   the other results are 0 and -inf (or what the sinks give). Before its first step a slot has no requests. */
ZA_API bool za_step(struct za_prepared *prepared, uint32_t slot, const struct za_call *call);

/* Forget the recordings of a slot, so that it can be recorded anew without more memory. The submissions of its command
   buffers must have ended, and the host must not submit them again. The slot is then as after za_prepare: it must be
   recorded before its next step, and has no requests until then. When no slot has recordings, the next recording may be
   of a cache with other scales and steps of rows. A host that records every frame calls za_reset first. */
ZA_API bool za_reset(struct za_prepared *prepared, uint32_t slot);

#ifdef __cplusplus
}
#endif
#endif
