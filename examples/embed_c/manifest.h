/* What `zinc-attn export` wrote, as this program needs it. Every function that returns false has printed why. */
#ifndef MANIFEST_H
#define MANIFEST_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "json.h"

enum { MANIFEST_VERSION = 2, MAX_SPEC = 16 };

/* Word offsets within the work buffer's records. */
struct work_layout {
    uint32_t header_words, item_words, row_words, append_words;
    struct {
        uint32_t q_heads, kv_heads, row_kv_heads, group, score_scale, state_stride, page_shift, page_tiles, rows,
            row_table, single_pass, append_table, softcap, softcap_inverse, sink_table;
    } header;
    struct {
        uint32_t first, limit, leaf_begin, leaf_end, rows, page_table, upload_begin, leaves_per_state;
    } item;
    struct {
        uint32_t count, unit, leaves_per_state;
    } row;
    struct {
        uint32_t position, page_table;
    } append;
};

struct manifest {
    char *directory;
    struct json root;
    struct work_layout work;
    uint32_t leaf, node, merge_dims;
    float min_input, max_input, max_score; /* magnitudes of q, k, v; bound of the scores */
};

/* One entry of the manifest's shapes: the numbers of a shape, dtype and page size on a kind of device. */
struct shape {
    uint32_t q_heads, kv_heads, head_dim, page_size;
    uint32_t group, head_chunks, token_words, page_words, page_tiles, state_words;
    const struct json *specialization, *splits;
};

/* One SPIR-V module, its checksum verified. */
struct kernel {
    const char *name;
    uint32_t *code;
    size_t code_bytes;
    uint32_t bindings;
    uint32_t constants;
    const char *constant_names[MAX_SPEC];
    uint32_t ids[MAX_SPEC], values[MAX_SPEC];
};

bool fail(const char *format, ...) __attribute__((format(printf, 1, 2))); /* prints to stderr; always false */

/* All bytes of a file, with a 0 behind them. The caller frees them. */
char *read_file(const char *path, size_t *size);

bool manifest_open(struct manifest *manifest, const char *directory);
void manifest_close(struct manifest *manifest);
/* kind: "gpu" or "cpu". */
bool manifest_shape(const struct manifest *manifest, uint32_t q_heads, uint32_t kv_heads, uint32_t head_dim,
                    const char *dtype, const char *kind, struct shape *shape);
/* The split rule's layout of `context` keys: splits, and leaves per emitted state. */
bool manifest_splits(const struct manifest *manifest, const struct shape *shape, uint32_t context, uint32_t *splits,
                     uint32_t *leaves_per_state);
bool kernel_load(const struct manifest *manifest, const struct shape *shape, const char *name, struct kernel *kernel);
/* Change a specialization constant from the shape's value. */
bool kernel_set(struct kernel *kernel, const char *constant, uint32_t value);
void kernel_free(struct kernel *kernel);

#endif
