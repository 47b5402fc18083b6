#include "derive.h"

#include <string.h>

#include "error.h"
#include "formula.h"
#include "storage.h"

/* The quantities that the library takes as they are. */
static const struct {
    const char *name;
    size_t at;
} SIZES[] = {
    {"k_dim", offsetof(struct shape, k_dim)},
    {"v_dim", offsetof(struct shape, v_dim)},
    {"group", offsetof(struct shape, group)},
    {"head_chunks", offsetof(struct shape, head_chunks)},
    {"k_values", offsetof(struct shape, k.value_words)},
    {"k_scales", offsetof(struct shape, k.scale_words)},
    {"v_values", offsetof(struct shape, v.value_words)},
    {"v_scales", offsetof(struct shape, v.scale_words)},
    {"token_words", offsetof(struct shape, token_words)},
    {"page_tiles", offsetof(struct shape, page_tiles)},
    {"state_words", offsetof(struct shape, state_words)},
};

/* Type `dtype` by its place among the manifest's types, which is its number in kernels. */
static int64_t number_of(const struct manifest *m, enum za_dtype dtype) {
    const struct json *types = za_json_get(&m->root, "dtypes");
    for (size_t i = 0; types && i < types->count; ++i)
        if (types->items[i].name && strcmp(types->items[i].name, za_storage[dtype].name) == 0) return (int64_t)i;
    return -1;
}

static bool set_inputs(const struct manifest *m, const struct za_options *o, bool cpu, struct names *names) {
    const struct storage_type *k = &za_storage[o->dtype], *v = &za_storage[o->v_dtype];
    const struct {
        const char *name;
        int64_t value;
    } given[] = {
        {"q_heads", o->q_heads},         {"kv_heads", o->kv_heads},      {"head_dim", o->head_dim},
        {"v_head_dim", o->v_head_dim},   {"latent", o->latent},          {"page_size", o->page_size},
        {"k_storage", number_of(m, o->dtype)}, {"v_storage", number_of(m, o->v_dtype)},
        {"k_bits", k->bits},             {"v_bits", v->bits},            {"k_halves", k->halves},
        {"v_halves", v->halves},         {"k_fifth", k->fifth_bits},     {"v_fifth", v->fifth_bits},
        {"softcap", 0},                  {"fused", 0},                   {"alibi", 0},
        {"masked", 0},                   {"nhd", o->k_stride != 0},      {"kind", cpu ? 'c' : 'g'},
        {"k_stride", o->k_stride},       {"v_stride", o->v_stride}, /* a host may have larger ones than the formulas */
    };
    for (size_t i = 0; i < sizeof given / sizeof *given; ++i)
        if (!za_name_set(names, given[i].name, given[i].value)) return false;
    return number_of(m, o->dtype) >= 0 && number_of(m, o->v_dtype) >= 0;
}

/* Add the values of the manifest's quantities that need nothing but the inputs and each other. */
static void find_quantities(const struct manifest *m, struct names *names) {
    const struct json *all = za_json_get(&m->root, "quantities");
    int64_t value;
    for (size_t i = 0; all && i < all->count; ++i) {
        const char *formula = za_json_text(za_json_get(&all->items[i], "expression"));
        const char *name = all->items[i].name;
        if (formula && name && za_formula(formula, names, &value)) za_name_set(names, name, value);
    }
}

static bool find(const char *formula, const struct names *names, uint32_t *number) {
    int64_t value;
    if (!formula || !za_formula(formula, names, &value) || value < 0 || value > UINT32_MAX) return false;
    *number = (uint32_t)value;
    return true;
}

static bool is_known(const struct shape *shape, const char *family) {
    for (uint32_t i = 0; i < shape->constant_count; ++i)
        if (strcmp(shape->constants[i].family, family) == 0) return true;
    return false;
}

/* The specialization constants of every family of kernels. */
static bool add_constants(const struct manifest *m, const struct names *names, struct shape *shape) {
    const struct json *kernels = za_json_get(&m->root, "kernels");
    for (size_t i = 0; kernels && i < kernels->count; ++i) {
        const struct json *constants = za_json_get(&kernels->items[i], "specialization_constants");
        const char *family = za_json_text(za_json_get(&kernels->items[i], "family"));
        if (!constants || !family) return false;
        for (size_t j = 0, n = is_known(shape, family) ? 0 : constants->count; j < n; ++j) {
            struct constant *one = &shape->constants[shape->constant_count];
            *one = (struct constant){.family = family, .name = za_json_text(za_json_get(&constants->items[j], "name"))};
            if (!one->name || !find(za_json_text(za_json_get(&constants->items[j], "value")), names, &one->value) ||
                ++shape->constant_count == MAX_CONSTANTS)
                return false;
        }
    }
    return true;
}

bool za_derive(const struct manifest *m, const struct za_options *o, bool cpu, struct shape *shape) {
    struct names names = {0};
    int64_t k_page_words, v_page_words; /* a page may be larger than any buffer; no cache is made of it then */
    bool good = set_inputs(m, o, cpu, &names);
    find_quantities(m, &names);
    for (size_t i = 0; good && i < sizeof SIZES / sizeof *SIZES; ++i)
        good = find(SIZES[i].name, &names, (uint32_t *)(void *)((char *)shape + SIZES[i].at));
    good = good && add_constants(m, &names, shape) && za_formula("k_page_words", &names, &k_page_words) &&
           za_formula("v_page_words", &names, &v_page_words) && k_page_words > 0 && v_page_words >= 0 &&
           (v_page_words || o->latent) && shape->page_tiles && shape->head_chunks;
    if (!good)
        return za_fail_as(ZA_MANIFEST, "%s/manifest.json: its formulas make no sense to this library; export it again",
                          m->directory);
    uint64_t rows = (uint64_t)o->page_size * o->kv_heads;
    shape->k_page_bytes = o->k_stride ? rows * o->k_stride : 4 * (uint64_t)k_page_words;
    shape->v_page_bytes = o->latent ? 0 : o->k_stride ? rows * o->v_stride : 4 * (uint64_t)v_page_words;
    return true;
}
