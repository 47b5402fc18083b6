/* SHA-256 (FIPS 180-4). */
#ifndef SHA256_H
#define SHA256_H

#include <stddef.h>
#include <stdint.h>

struct sha256 {
    uint32_t state[8];
    uint64_t bytes;
    uint8_t block[64];
};

void za_sha256_begin(struct sha256 *hash);
void za_sha256_add(struct sha256 *hash, const void *data, size_t size);
void za_sha256_end(struct sha256 *hash, char hex[65]); /* lower case, with the final 0 */

#endif
