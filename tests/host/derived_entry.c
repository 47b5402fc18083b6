/* derived_entry MANIFEST PAGE_SIZE, then lines "q_heads kv_heads head_dim v_head_dim latent k v k_stride v_stride" on
   stdin: for each the numbers that the library derives, one name and number a line, then an empty line. */
#include <stdio.h>

#include "manifest.h"

static void print(const struct shape *s, const char *kind) {
    printf("k_dim %u\nv_dim %u\ngroup %u\nhead_chunks %u\ntoken_words %u\npage_tiles %u\nstate_words %u\n", s->k_dim,
           s->v_dim, s->group, s->head_chunks, s->token_words, s->page_tiles, s->state_words);
    printf("k_values %u\nk_scales %u\nv_values %u\nv_scales %u\ncompute_units %u\n", s->k.value_words,
           s->k.scale_words, s->v.value_words, s->v.scale_words, s->compute_units);
    for (uint32_t i = 0; i < s->constant_count; ++i)
        printf("%s.%s.%s %u\n", kind, s->constants[i].family, s->constants[i].name, s->constants[i].value);
}

int main(int argc, char **argv) {
    struct manifest manifest;
    struct za_options options = {.page_size = 1};
    int latent, k, v;
    if (argc != 3 || !za_manifest_open(&manifest, argv[1]) || sscanf(argv[2], "%u", &options.page_size) != 1) return 2;
    while (scanf("%u %u %u %u %d %d %d %u %u", &options.q_heads, &options.kv_heads, &options.head_dim,
                 &options.v_head_dim, &latent, &k, &v, &options.k_stride, &options.v_stride) == 9) {
        options.latent = latent;
        options.dtype = (enum za_dtype)k;
        options.v_dtype = (enum za_dtype)v;
        for (int cpu = 0; cpu < 2; ++cpu) {
            struct shape shape;
            if (!za_manifest_shape(&manifest, &options, cpu, &shape)) return 1;
            print(&shape, cpu ? "cpu" : "gpu");
        }
        printf("\n");
    }
    za_manifest_close(&manifest);
    return 0;
}
