/* What `zinc-attn export` wrote, as the library needs it. Every function that returns false has said why (error.h). */
#ifndef MANIFEST_H
#define MANIFEST_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "json.h"
#include "rows.h"
#include "zinc_attn.h"

enum { MANIFEST_VERSION = 8, MAX_SPEC = 32, MAX_CONSTANTS = 64 };

/* The fields of the work buffer's records that the library sets; all others stay 0, which is the plain operation. */
#define ZA_HEADER(X)                                                                                                   \
    X(q_heads) X(kv_heads) X(row_kv_heads) X(group) X(score_scale) X(state_stride) X(page_shift) X(page_tiles) X(rows) \
    X(row_table) X(single_pass) X(append_table) X(softcap) X(softcap_inverse) X(sink_table) X(alibi_table)             \
    X(scale_table) X(token_rows) X(head_rows) X(mask_slope_table) X(first_page)
#define ZA_ITEM(X) X(row) X(first) X(limit) X(leaf_begin) X(leaf_end) X(rows) X(page_table) X(leaves_per_state)
#define ZA_ROW(X) X(state) X(count) X(unit) X(leaves_per_state) X(position) X(mask) X(mask_begin) X(mask_end)
#define ZA_APPEND(X) X(position) X(page_table)

/* Their words within the records. */
#define ZA_WORD(name) uint32_t name;
struct work_layout {
    uint32_t header_words, item_words, row_words, append_words;
    struct { ZA_HEADER(ZA_WORD) } header;
    struct { ZA_ITEM(ZA_WORD) } item;
    struct { ZA_ROW(ZA_WORD) } row;
    struct { ZA_APPEND(ZA_WORD) } append;
};
#undef ZA_WORD

struct manifest {
    char *directory;
    struct json root;
    struct work_layout work;
    uint32_t leaf, node, merge_dims;
    uint32_t max_tokens, max_page_size, max_dims, max_q_heads;
    float min_input, max_input, max_score; /* magnitudes of q, k, v; bound of the scores */
};

/* What a family of kernels is specialized with, by name. */
struct constant {
    const char *family, *name;
    uint32_t value;
};

/* The numbers of a shape, its types and a page size on a kind of device. k_dim and v_dim are head_dim and v_head_dim as
   the device has them, filled up with zeros. */
struct shape {
    uint32_t q_heads, kv_heads, head_dim, v_head_dim, k_dim, v_dim, page_size, compute_units;
    bool latent;
    uint32_t scale_words; /* scales of heads in a work buffer: 2 * kv_heads where a type has them, else 0 */
    uint32_t group, head_chunks, token_words, page_tiles, state_words;
    uint64_t k_page_bytes, v_page_bytes; /* of rows: where tokens come first; v: 0 where the shape is latent */
    struct row_part k, v; /* of a row; v has no dimensions where the shape is latent */
    uint32_t constant_count;
    struct constant constants[MAX_CONSTANTS];
};

/* One SPIR-V module, its size and checksum verified. */
struct kernel {
    const char *name;
    uint32_t *code;
    size_t code_bytes;
    uint32_t bindings;
    uint32_t constants;
    const char *constant_names[MAX_SPEC];
    uint32_t ids[MAX_SPEC], values[MAX_SPEC];
};

/* All bytes of a file, with a 0 behind them. The caller frees them. */
char *za_read_file(const char *path, size_t *size);

/* Also that every module that it names is there as it was written. */
bool za_manifest_open(struct manifest *manifest, const char *directory);
void za_manifest_close(struct manifest *manifest);
/* Whether the formulas are for such a shape and page size, or for such a shape where that is 0. */
bool za_manifest_limits(const struct manifest *manifest, const struct za_options *options);
/* options: with the types and sizes of K and V. Without a page size the manifest lists the shape, with it. */
bool za_manifest_shape(struct manifest *manifest, const struct za_options *options, bool cpu, struct shape *shape);
bool za_kernel_load(const struct manifest *manifest, const struct shape *shape, const char *name,
                    struct kernel *kernel);
/* Change a specialization constant from the shape's value. */
bool za_kernel_set(struct kernel *kernel, const char *constant, uint32_t value);
void za_kernel_free(struct kernel *kernel);

#endif
