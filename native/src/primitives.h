/* The questions to a device before its first call: does its driver compute what the kernels rely on? */
#pragma once
#include <stdbool.h>

#include "device.h"

/* False, and why (error.h), where a float function's result is another one than the contract's; attention would have
   other bits there. */
bool za_primitives_check(struct za_device *device);

/* attend's constant `arithmetic` for arithmetic "fused": FUSED_NATIVE where the driver's fma() rounds once, or else
   FUSED_EMULATED, the same sums by other operations. False, and why, where these results are others, too. */
bool za_fused_choose(struct za_device *device, uint32_t *fused);
