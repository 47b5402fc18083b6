/* Reads the manifest of each folder that it is given, and the numbers of shape 1/1/64, without a device. */
#include <stdio.h>

#include "../../native/src/manifest.h"

int main(int argc, char **argv) {
    const struct za_options options = {
        .q_heads = 1, .kv_heads = 1, .head_dim = 64, .v_head_dim = 64, .dtype = ZA_F16, .v_dtype = ZA_F16};
    for (int i = 1; i < argc; ++i) {
        struct manifest manifest;
        struct shape shape = {0};
        bool good = za_manifest_open(&manifest, argv[i]) && za_manifest_shape(&manifest, &options, true, &shape);
        puts(good ? "good" : za_error());
        za_manifest_close(&manifest);
    }
    return 0;
}
