/* The questions to a device before its first call: does its driver compute what the kernels rely on? */
#ifndef PRIMITIVES_H
#define PRIMITIVES_H

#include <stdbool.h>

#include "device.h"
#include "manifest.h"

/* False, and why (error.h), where a float function's result differs from the manifest's; attention would have other
   bits there. */
bool za_primitives_check(struct za_device *device, const struct manifest *manifest, const struct shape *shape);

/* attend's constant `fused` for arithmetic "fused": 1 where the driver's fma() rounds once, else 2, the same sums by
   other operations. False, and why, where their results differ from the manifest's, too. */
bool za_fused_choose(struct za_device *device, const struct manifest *manifest, const struct shape *shape,
                     uint32_t *fused);

#endif
