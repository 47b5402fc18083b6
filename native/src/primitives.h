/* The questions to a device before its first call: does its driver compute what the kernels rely on? */
#pragma once
#include <stdbool.h>

#include "device.h"

/* False: a float function differs from the contract, so attention would have other bits; za_error says which. */
bool za_primitives_check(struct za_device *device);

/* attend's constant `arithmetic` for arithmetic "fused": FUSED_NATIVE where the driver's fma() rounds once, or else
   FUSED_EMULATED, the same sums by other operations. False: these results differ, too; za_error says which. */
bool za_fused_choose(struct za_device *device, uint32_t *fused);
