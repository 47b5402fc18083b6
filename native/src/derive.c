#include "derive.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "error.h"
#include "formula.h"
#include "storage.h"

enum { COMPUTE_UNITS = 64, MAX_TEXT = 16384 }; /* the units of an entry are what export takes by default */

struct text {
    char of[MAX_TEXT];
    size_t size;
    bool full;
};

static void add(struct text *text, const char *format, ...) {
    va_list values;
    va_start(values, format);
    int n = vsnprintf(text->of + text->size, MAX_TEXT - text->size, format, values);
    va_end(values);
    if (n < 0 || (size_t)n >= MAX_TEXT - text->size) text->full = true;
    else text->size += (size_t)n;
}

/* Type `dtype` by its place among the manifest's types, which is its number in kernels. */
static int64_t number_of(const struct manifest *m, enum za_dtype dtype) {
    const struct json *types = za_json_get(&m->root, "dtypes");
    for (size_t i = 0; types && i < types->count; ++i)
        if (types->items[i].name && strcmp(types->items[i].name, za_storage[dtype].name) == 0) return (int64_t)i;
    return -1;
}

static bool set_inputs(const struct manifest *m, const struct za_options *o, struct names *names) {
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
        {"masked", 0},                   {"nhd", o->k_stride != 0},
        {"k_stride", o->k_stride},       {"v_stride", o->v_stride}, /* a host may have larger ones than the formulas */
    };
    for (size_t i = 0; i < sizeof given / sizeof *given; ++i)
        if (!za_name_set(names, given[i].name, given[i].value)) return false;
    return number_of(m, o->dtype) >= 0 && number_of(m, o->v_dtype) >= 0;
}

/* Add the values of the manifest's quantities that need nothing but the shape, the kind and each other. */
static void find_quantities(const struct manifest *m, const char *kind, struct names *names) {
    const struct json *all = za_json_get(&m->root, "quantities");
    int64_t value;
    za_name_set(names, "kind", (unsigned char)*kind);
    for (size_t i = 0; all && i < all->count; ++i) {
        const char *formula = za_json_text(za_json_get(&all->items[i], "expression"));
        const char *name = all->items[i].name;
        if (formula && name && za_formula(formula, names, &value)) za_name_set(names, name, value);
    }
}

static bool is_first_of_family(const struct json *kernels, size_t i, const char *family) {
    for (size_t j = 0; j < i; ++j) {
        const char *other = za_json_text(za_json_get(&kernels->items[j], "family"));
        if (other && strcmp(other, family) == 0) return false;
    }
    return true;
}

/* The values of the specialization constants of every family of kernels. */
static bool add_constants(const struct manifest *m, const struct names *names, struct text *text) {
    const struct json *kernels = za_json_get(&m->root, "kernels");
    int64_t value;
    for (size_t i = 0; kernels && i < kernels->count; ++i) {
        const struct json *constants = za_json_get(&kernels->items[i], "specialization_constants");
        const char *family = za_json_text(za_json_get(&kernels->items[i], "family"));
        if (!constants || !family) return false;
        if (!is_first_of_family(kernels, i, family)) continue;
        add(text, "%s\"%s\": {", i ? ", " : "", family); /* the first family is that of kernel 0 */
        for (size_t j = 0; j < constants->count; ++j) {
            const char *name = za_json_text(za_json_get(&constants->items[j], "name"));
            const char *formula = za_json_text(za_json_get(&constants->items[j], "value"));
            if (!name || !formula || !za_formula(formula, names, &value)) return false;
            add(text, "%s\"%s\": %lld", j ? ", " : "", name, (long long)value);
        }
        add(text, "}");
    }
    return true;
}

bool za_derive_entry(const struct manifest *m, const struct za_options *o, struct json *entry) {
    static const char *const kinds[] = {"gpu", "cpu"};
    struct names names = {0};
    struct text *text = calloc(1, sizeof *text);
    if (!text) return za_no_memory();
    bool good = set_inputs(m, o, &names);
    const size_t inputs = names.count;
    if (good) add(text, "{\"kinds\": {");
    for (int i = 0; good && i < 2; ++i) {
        names.count = inputs;
        find_quantities(m, kinds[i], &names);
        add(text, "%s\"%s\": {\"specialization\": {", i ? ", " : "", kinds[i]);
        good = add_constants(m, &names, text);
        add(text, "}}");
    }
    if (good) add(text, "}, \"compute_units\": %d, \"sizes\": {\"\": 0", COMPUTE_UNITS);
    for (size_t i = 0; good && i < names.count; ++i)
        if (names.of[i].value >= 0) add(text, ", \"%s\": %lld", names.of[i].name, (long long)names.of[i].value);
    if (good) add(text, "}, \"page_size\": %u}", o->page_size);
    size_t at;
    good = good && !text->full && za_json_parse(text->of, entry, &at);
    free(text);
    return good || za_fail_as(ZA_MANIFEST,
                              "%s/manifest.json: its formulas make no sense to this library; export it again",
                              m->directory);
}
