/* The numbers of a shape, by the manifest's own formulas. */
#ifndef DERIVE_H
#define DERIVE_H

#include <stdbool.h>

#include "manifest.h"

/* What follows from the options, with their page size, on a kind of device. False, and why (error.h), where the
   manifest's formulas make no sense. */
bool za_derive(const struct manifest *manifest, const struct za_options *options, bool cpu, struct shape *shape);

#endif
