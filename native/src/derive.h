/* The numbers of a shape that the manifest has no entry for, by the manifest's own formulas. */
#ifndef DERIVE_H
#define DERIVE_H

#include <stdbool.h>

#include "manifest.h"

/* `entry` becomes what `zinc-attn export` would have written to "shapes", as far as the library reads it. False, and
   why (error.h), where the manifest's formulas make no sense. */
bool za_derive_entry(const struct manifest *manifest, const struct za_options *options, struct json *entry);

#endif
