/* The numbers of a shape, its types, and how K and V lie. */
#pragma once
#include <stdbool.h>
#include <stdint.h>

#include "rows.h"
#include "zinc_attn.h"
#include "zinc_contract.h"

/* The numbers that most of the library uses, and all sizes of the contract. k_dim and v_dim are head_dim and v_head_dim
   on the device, where rows are padded with zeros. */
struct shape {
    uint32_t q_heads, kv_heads, head_dim, v_head_dim, k_dim, v_dim, page_size;
    bool latent;
    uint32_t scale_words; /* scales of heads in a work buffer: 2 * kv_heads where a type has them, else 0 */
    uint64_t k_page_bytes, v_page_bytes; /* of rows: where tokens come first; v: 0 where the shape is latent */
    struct row_part k, v;                /* of a row; v has no dimensions where the shape is latent */
    struct sizes sizes;
};

/* False: the options make no shape, and za_error says why. cpu: the kind of device. */
bool za_shape(const struct za_options *options, bool cpu, struct registers registers, struct shape *shape);

/* How many query heads of a row a workgroup of pass 1 serves in a call of `items` items, and how many query rows it
   serves if rows share keys; 1: rows share none. shared_bytes: of the device's workgroups. kernels/tuning.py has the
   same rules. */
uint32_t za_heads_together(const struct sizes *s, uint64_t items, uint32_t shared_bytes);
uint32_t za_rows_together(const struct sizes *s, uint32_t shared_bytes);

/* How many query vectors a workgroup with matrix units serves, of a request's `vectors`: as many as the device's limits
   allow. 0: it has room for none. mat_m: vectors of a product. kernels/matrix.py has the same choice. */
uint32_t za_units_vectors(const struct sizes *s, const VkPhysicalDeviceLimits *limits, uint32_t mat_m,
                          uint64_t vectors);

/* Bytes of a call's buffers, by rows and new rows. */
uint64_t za_q_bytes(const struct shape *shape, uint64_t rows);       /* as the kernels take it */
uint64_t za_out_bytes(const struct shape *shape, uint64_t rows);     /* out, then lse, as they write them */
uint64_t za_rows_bytes(const struct shape *shape, uint64_t new_rows);

/* How many invocations a wave has, in a workgroup that serves `served` query vectors. */
uint32_t za_lanes(const struct sizes *s, uint64_t served);
