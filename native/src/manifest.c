#include "manifest.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "derive.h"
#include "error.h"
#include "rows.h"
#include "sha256.h"
#include "storage.h"

#define FORMAT "zinc_attn export"

enum { COMPUTE_UNITS = 64 }; /* what export takes by default */

#define HEADER(name) {"header", #name, offsetof(struct work_layout, header.name)},
#define ITEM(name) {"item", #name, offsetof(struct work_layout, item.name)},
#define ROW(name) {"row", #name, offsetof(struct work_layout, row.name)},
#define APPEND(name) {"append", #name, offsetof(struct work_layout, append.name)},

static const struct {
    const char *record, *field;
    size_t at;
} FIELDS[] = {ZA_HEADER(HEADER) ZA_ITEM(ITEM) ZA_ROW(ROW) ZA_APPEND(APPEND)};

char *za_read_file(const char *path, size_t *size) {
    errno = 0;
    FILE *file = fopen(path, "rb");
    long end = -1;
    char *data = NULL;
    if (file && fseek(file, 0, SEEK_END) == 0) end = ftell(file);
    if (end >= 0 && end < INT32_MAX && fseek(file, 0, SEEK_SET) == 0 && (data = malloc((size_t)end + 1)) != NULL) {
        *size = fread(data, 1, (size_t)end, file);
        data[*size] = 0;
        if (*size != (size_t)end) {
            free(data);
            data = NULL;
        }
    }
    if (!data)
        za_fail_as(ZA_MANIFEST, "%s: cannot be read: %s; give a whole folder of `zinc-attn export`", path,
                   errno ? strerror(errno) : "not a file of at most 2 GiB");
    if (file) fclose(file);
    return data;
}

static char *path_in(const char *directory, const char *name) {
    size_t size = strlen(directory) + strlen(name) + 2;
    char *path = malloc(size);
    if (path) snprintf(path, size, "%s/%s", directory, name);
    return path;
}

static bool missing(const struct manifest *m, const char *what) {
    return za_fail_as(ZA_MANIFEST, "%s/manifest.json: it has no %s; export it again", m->directory, what);
}

/* The word of a field, and the words of its record. */
static bool find_field(const struct manifest *m, const char *record, const char *field, uint32_t *word) {
    const struct json *fields = za_json_get(za_json_get(za_json_get(&m->root, "work"), record), "fields");
    for (size_t i = 0; fields && i < fields->count; ++i) {
        const char *name = za_json_text(za_json_get(&fields->items[i], "name"));
        if (name && strcmp(name, field) == 0 && za_json_u32(za_json_get(&fields->items[i], "word"), word)) return true;
    }
    return za_fail_as(ZA_MANIFEST, "%s/manifest.json: record %s has no field %s; export it again", m->directory, record,
                      field);
}

static bool read_layout(struct manifest *m) {
    const struct json *work = za_json_get(&m->root, "work");
    struct work_layout *layout = &m->work;
    if (!za_json_u32(za_json_get(za_json_get(work, "header"), "words"), &layout->header_words) ||
        !za_json_u32(za_json_get(za_json_get(work, "item"), "words"), &layout->item_words) ||
        !za_json_u32(za_json_get(za_json_get(work, "row"), "words"), &layout->row_words) ||
        !za_json_u32(za_json_get(za_json_get(work, "append"), "words"), &layout->append_words))
        return missing(m, "sizes of the work buffer's records");
    for (size_t i = 0; i < sizeof FIELDS / sizeof *FIELDS; ++i) {
        uint32_t word, words;
        if (!find_field(m, FIELDS[i].record, FIELDS[i].field, &word)) return false;
        za_json_u32(za_json_get(za_json_get(work, FIELDS[i].record), "words"), &words);
        if (word >= words || words > 4096) return missing(m, "work buffer that makes sense");
        memcpy((char *)layout + FIELDS[i].at, &word, sizeof word);
    }
    return true;
}

static bool read_constant(const struct manifest *m, const char *name, uint32_t *integer, float *real) {
    const struct json *constant = za_json_get(za_json_get(&m->root, "constants"), name);
    const char *bits = za_json_text(za_json_get(constant, "float32_bits"));
    if (integer && za_json_u32(za_json_get(constant, "value"), integer) && *integer) return true;
    if (real && bits) {
        uint32_t word = (uint32_t)strtoul(bits, NULL, 16);
        memcpy(real, &word, sizeof word);
        return true;
    }
    return missing(m, name);
}

/* The text's checksum is that of the text with 64 zeros in its place; so no byte of it is another one. */
static bool check_digest(const struct manifest *m, const char *text, size_t size) {
    static const char name[] = "\"manifest_sha256\": \"";
    static const char zeros[] = "0000000000000000000000000000000000000000000000000000000000000000";
    const char *found = strstr(text, name);
    size_t at = found ? (size_t)(found - text) + sizeof name - 1 : 0;
    if (!found || size - at < 65 || text[at + 64] != '"') return missing(m, "manifest_sha256");
    char hex[65];
    struct sha256 hash;
    za_sha256_begin(&hash);
    za_sha256_add(&hash, text, at);
    za_sha256_add(&hash, zeros, 64);
    za_sha256_add(&hash, text + at + 64, size - at - 64);
    za_sha256_end(&hash, hex);
    if (memcmp(hex, text + at, 64) == 0) return true;
    return za_fail_as(ZA_MANIFEST, "%s/manifest.json: got manifest_sha256 %.64s, expected %s; the file was changed, "
                      "export it again", m->directory, text + at, hex);
}

static bool check_version(const struct manifest *m) {
    const char *format = za_json_text(za_json_get(&m->root, "format"));
    uint32_t version;
    if (!format || strcmp(format, FORMAT) != 0)
        return za_fail_as(ZA_MANIFEST, "%s/manifest.json: got format %s, expected " FORMAT, m->directory,
                          format ? format : "none");
    if (!za_json_u32(za_json_get(&m->root, "version"), &version)) return missing(m, "version");
    if (version != MANIFEST_VERSION)
        return za_fail_as(ZA_MANIFEST, "%s/manifest.json: got version %u, expected %d; export it with the zinc-attn "
                          "that this library was written for", m->directory, version, MANIFEST_VERSION);
    return true;
}

/* The module's code, if it has the manifest's size and checksum. */
static bool read_code(const struct manifest *m, const struct json *entry, struct kernel *kernel) {
    const char *file = za_json_text(za_json_get(entry, "file")), *expected = za_json_text(za_json_get(entry, "sha256"));
    uint32_t bytes;
    if (!file || !expected || strchr(file, '/') || !za_json_u32(za_json_get(entry, "bytes"), &bytes))
        return missing(m, "file name, size and checksum of a kernel");
    char *path = path_in(m->directory, file), hex[65];
    if (!path) return za_no_memory();
    kernel->code = (uint32_t *)(void *)za_read_file(path, &kernel->code_bytes);
    bool ok = kernel->code != NULL;
    if (ok) {
        struct sha256 hash;
        za_sha256_begin(&hash);
        za_sha256_add(&hash, kernel->code, kernel->code_bytes);
        za_sha256_end(&hash, hex);
        if (kernel->code_bytes != bytes || strcmp(hex, expected) != 0) {
            ok = za_fail_as(ZA_MANIFEST, "%s: got %zu bytes of SHA-256 %s, expected %u of %s; export again", path,
                            kernel->code_bytes, hex, bytes, expected);
        } else if (bytes < 20 || bytes % 4 || kernel->code[0] != 0x07230203) {
            ok = za_fail_as(ZA_MANIFEST, "%s: no SPIR-V of this machine's byte order", path);
        }
    }
    free(path);
    return ok;
}

static bool check_modules(const struct manifest *m) {
    const struct json *kernels = za_json_get(&m->root, "kernels");
    bool good = true;
    for (size_t i = 0; kernels && i < kernels->count && good; ++i) {
        struct kernel kernel = {0};
        good = read_code(m, &kernels->items[i], &kernel);
        za_kernel_free(&kernel);
    }
    return good;
}

bool za_manifest_open(struct manifest *m, const char *directory) {
    *m = (struct manifest){0};
    m->directory = malloc(strlen(directory) + 1);
    char *path = path_in(directory, "manifest.json");
    if (!path || !m->directory) {
        free(path);
        return za_no_memory();
    }
    strcpy(m->directory, directory);
    size_t size, at = 0;
    char *text = za_read_file(path, &size);
    bool good = text && za_json_parse(text, &m->root, &at);
    if (text && !good) za_fail_as(ZA_MANIFEST, "%s: not JSON at byte %zu of %zu", path, at, size);
    good = good && check_version(m) && check_digest(m, text, size);
    free(text);
    free(path);
    return good && read_layout(m) && read_constant(m, "KEYS_PER_LEAF", &m->leaf, NULL) &&
           read_constant(m, "LEAVES_PER_NODE", &m->node, NULL) && read_constant(m, "MIN_INPUT", NULL, &m->min_input) &&
           read_constant(m, "MAX_INPUT", NULL, &m->max_input) && read_constant(m, "MAX_SCORE", NULL, &m->max_score) &&
           read_constant(m, "MERGE_DIMS", &m->merge_dims, NULL) &&
           read_constant(m, "MAX_CONTEXT", &m->max_tokens, NULL) &&
           read_constant(m, "MAX_PAGE_SIZE", &m->max_page_size, NULL) &&
           read_constant(m, "MAX_HEAD_DIM", &m->max_dims, NULL) &&
           read_constant(m, "MAX_Q_HEADS", &m->max_q_heads, NULL) && check_modules(m);
}

void za_manifest_close(struct manifest *m) {
    za_json_free(&m->root);
    free(m->directory);
    m->directory = NULL;
}

/* The types as the manifest names them: that of K, and V's behind a slash where it is another one. */
static void name_types(const struct za_options *o, char name[32]) {
    const char *k = za_storage[o->dtype].name, *v = za_storage[o->v_dtype].name;
    snprintf(name, 32, "%s%s%s", k, o->dtype != o->v_dtype ? "/" : "", o->dtype != o->v_dtype ? v : "");
}

static bool is_number(const struct json *object, const char *name, uint32_t value) {
    uint32_t found;
    return za_json_u32(za_json_get(object, name), &found) && found == value;
}

/* Whether entry is that of the shape and of how K and V lie. */
static bool is_entry_of(const struct json *entry, const struct za_options *o) {
    const char *dtype = za_json_text(za_json_get(entry, "dtype"));
    const struct json *latent = za_json_get(entry, "latent"), *sizes = za_json_get(entry, "sizes");
    char types[32];
    name_types(o, types);
    return is_number(entry, "q_heads", o->q_heads) && is_number(entry, "kv_heads", o->kv_heads) &&
           is_number(entry, "head_dim", o->head_dim) && is_number(entry, "v_head_dim", o->v_head_dim) && latent &&
           latent->type == (o->latent ? JSON_TRUE : JSON_FALSE) && dtype && strcmp(dtype, types) == 0 &&
           (!o->page_size || is_number(entry, "page_size", o->page_size)) &&
           is_number(sizes, "k_stride", o->k_stride) && is_number(sizes, "v_stride", o->v_stride);
}

static bool no_entry(const struct manifest *m, const struct za_options *o) {
    char text[64], v_text[16] = "", types[32], rows[64];
    if (o->v_head_dim != o->head_dim || o->latent) snprintf(v_text, sizeof v_text, "/%u", o->v_head_dim);
    snprintf(text, sizeof text, "%u/%u/%u%s%s", o->q_heads, o->kv_heads, o->head_dim, v_text,
             o->latent ? "/latent" : "");
    name_types(o, types);
    snprintf(rows, sizeof rows, "rows of %u bytes of K and %u of V", o->k_stride, o->v_stride);
    return za_fail_as(ZA_MANIFEST, "%s/manifest.json: it has no sizes for shape %s, %s, %s; give a page_size, or "
                      "export it with --shape %s --dtype %s --kv-layout %s", m->directory, text, types,
                      o->k_stride ? rows : "tiles", text, types, o->k_stride ? "NHD (without gaps)" : "tiles");
}

static bool same_words(const struct row_part *a, const struct row_part *b) {
    return a->value_words == b->value_words && a->scale_words == b->scale_words;
}

/* That a row has as many words as rows.c writes. */
static bool check_rows(const struct manifest *m, const struct za_options *options, struct shape *shape) {
    const struct row_part k = za_row_part(options->dtype, shape->head_dim, shape->k_dim, options->k_stride);
    struct row_part v = {.dtype = options->v_dtype};
    if (!shape->latent) v = za_row_part(options->v_dtype, shape->v_head_dim, shape->v_dim, options->v_stride);
    uint32_t words = (k.value_words + k.scale_words + v.value_words + v.scale_words) * shape->kv_heads;
    bool filled = shape->k_dim >= shape->head_dim && shape->v_dim >= shape->v_head_dim && shape->k_dim % 8 == 0 &&
                  shape->v_dim % 8 == 0 && (!shape->latent || shape->k_dim >= shape->v_dim);
    if (!filled || !same_words(&shape->k, &k) || !same_words(&shape->v, &v) || shape->token_words != words)
        return za_fail_as(ZA_MANIFEST, "%s/manifest.json: its formulas make rows of %u and %u dimensions and tokens of "
                          "%u words, expected %u words; export it again", m->directory, shape->k_dim, shape->v_dim,
                          shape->token_words, words);
    shape->k = k;
    shape->v = v;
    return true;
}

bool za_manifest_limits(const struct manifest *m, const struct za_options *o) {
    uint32_t page = o->page_size;
    if (page > m->max_page_size || (page & (page - 1)))
        return za_fail("options.page_size: got %u, expected a power of two up to %u", page, m->max_page_size);
    if (o->q_heads <= m->max_q_heads && o->q_heads % o->kv_heads == 0 && o->head_dim <= m->max_dims &&
        o->v_head_dim <= m->max_dims)
        return true;
    return za_fail("options: got shape %u/%u/%u/%u, expected at most %u query heads, a multiple of the KV heads, and "
                   "head sizes up to %u", o->q_heads, o->kv_heads, o->head_dim, o->v_head_dim, m->max_q_heads,
                   m->max_dims);
}

bool za_manifest_shape(struct manifest *m, const struct za_options *options, bool cpu, struct shape *shape) {
    const struct json *shapes = za_json_get(&m->root, "shapes"), *entry = NULL;
    for (size_t i = 0; shapes && i < shapes->count && !entry; ++i)
        if (is_entry_of(&shapes->items[i], options)) entry = &shapes->items[i];
    struct za_options o = *options;
    if (!o.page_size && (!entry || !za_json_u32(za_json_get(entry, "page_size"), &o.page_size) || !o.page_size))
        return no_entry(m, options);
    *shape = (struct shape){
        .q_heads = o.q_heads,
        .kv_heads = o.kv_heads,
        .head_dim = o.head_dim,
        .v_head_dim = o.v_head_dim,
        .page_size = o.page_size,
        .latent = o.latent,
        .compute_units = COMPUTE_UNITS,
    };
    if (entry && (!za_json_u32(za_json_get(entry, "compute_units"), &shape->compute_units) || !shape->compute_units))
        return missing(m, "compute_units of the shape");
    if (za_storage[o.dtype].head_scale || za_storage[o.v_dtype].head_scale) shape->scale_words = 2 * o.kv_heads;
    return za_derive(m, &o, cpu, shape) && check_rows(m, &o, shape);
}

static bool find_value(const struct shape *shape, const char *family, const char *name, uint32_t *value) {
    for (uint32_t i = 0; family && i < shape->constant_count; ++i) {
        const struct constant *constant = &shape->constants[i];
        if (strcmp(constant->family, family) != 0 || strcmp(constant->name, name) != 0) continue;
        *value = constant->value;
        return true;
    }
    return false;
}

/* The values of a kernel's specialization constants: its own fixed ones, and those of the shape, by family and name. */
static bool read_constants(const struct manifest *m, const struct shape *shape, const struct json *entry,
                           struct kernel *kernel) {
    const struct json *constants = za_json_get(entry, "specialization_constants");
    const char *family = za_json_text(za_json_get(entry, "family"));
    if (!constants || constants->count > MAX_SPEC) return missing(m, "specialization constants of a kernel");
    kernel->constants = (uint32_t)constants->count;
    for (size_t i = 0; i < constants->count; ++i) {
        const char *name = za_json_text(za_json_get(&constants->items[i], "name"));
        kernel->constant_names[i] = name;
        const struct json *fixed = za_json_get(&constants->items[i], "fixed");
        if (!name || !za_json_u32(za_json_get(&constants->items[i], "id"), &kernel->ids[i]) ||
            !(fixed ? za_json_u32(fixed, &kernel->values[i]) : find_value(shape, family, name, &kernel->values[i])))
            return missing(m, "value for a specialization constant");
    }
    return true;
}

bool za_kernel_load(const struct manifest *m, const struct shape *shape, const char *name, struct kernel *kernel) {
    const struct json *kernels = za_json_get(&m->root, "kernels");
    *kernel = (struct kernel){0};
    for (size_t i = 0; kernels && i < kernels->count; ++i) {
        const struct json *entry = &kernels->items[i], *bindings = za_json_get(entry, "bindings");
        kernel->name = za_json_text(za_json_get(entry, "name"));
        if (!kernel->name || strcmp(kernel->name, name) != 0) continue;
        if (!bindings || !bindings->count) return missing(m, "bindings of a kernel");
        kernel->bindings = (uint32_t)bindings->count;
        return read_constants(m, shape, entry, kernel) && read_code(m, entry, kernel);
    }
    return za_fail_as(ZA_MANIFEST, "%s/manifest.json: it has no kernel %s", m->directory, name);
}

bool za_kernel_set(struct kernel *kernel, const char *constant, uint32_t value) {
    for (uint32_t i = 0; i < kernel->constants; ++i) {
        if (strcmp(kernel->constant_names[i], constant) != 0) continue;
        kernel->values[i] = value;
        return true;
    }
    return za_fail_as(ZA_MANIFEST, "kernel %s: it has no specialization constant %s; export again", kernel->name,
                      constant);
}

void za_kernel_free(struct kernel *kernel) {
    free(kernel->code);
    kernel->code = NULL;
}
