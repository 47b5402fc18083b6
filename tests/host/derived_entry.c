/* derived_entry MANIFEST PAGE_SIZE, then lines "q_heads kv_heads head_dim v_head_dim latent k v k_stride v_stride" on
   stdin: for each the entry that the library derives, one name and number a line, then an empty line. */
#include <stdio.h>

#include "derive.h"
#include "error.h"
#include "storage.h"

static void print(const struct json *node, const char *path) {
    char name[256];
    snprintf(name, sizeof name, "%s%s%s", path, *path ? "." : "", node->name ? node->name : "");
    if (node->type == JSON_NUMBER) printf("%s %.0f\n", name, node->number);
    for (size_t i = 0; i < node->count; ++i) print(&node->items[i], node->name ? name : path);
}

int main(int argc, char **argv) {
    struct manifest manifest;
    struct za_options options = {.page_size = 1};
    int latent, k, v;
    if (argc != 3 || !za_manifest_open(&manifest, argv[1]) || sscanf(argv[2], "%u", &options.page_size) != 1) return 2;
    while (scanf("%u %u %u %u %d %d %d %u %u", &options.q_heads, &options.kv_heads, &options.head_dim,
                 &options.v_head_dim, &latent, &k, &v, &options.k_stride, &options.v_stride) == 9) {
        struct json entry;
        options.latent = latent;
        options.dtype = (enum za_dtype)k;
        options.v_dtype = (enum za_dtype)v;
        if (!za_derive_entry(&manifest, &options, &entry)) return 1;
        print(&entry, "");
        printf("\n");
        za_json_free(&entry);
    }
    za_manifest_close(&manifest);
    return 0;
}
