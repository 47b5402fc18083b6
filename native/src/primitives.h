/* The question to a device before its first kernel: does its driver compute the float functions that all of them use? */
#ifndef PRIMITIVES_H
#define PRIMITIVES_H

#include <stdbool.h>

#include "gpu.h"
#include "manifest.h"

/* False, and why (error.h), where a result differs from the manifest's; attention would have other bits there. */
bool za_primitives_check(struct gpu *gpu, const struct manifest *manifest, const struct shape *shape);

#endif
