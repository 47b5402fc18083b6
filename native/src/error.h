/* The reason and the kind of the last failure in this thread. */
#ifndef ERROR_H
#define ERROR_H

#include <stdbool.h>

#include "zinc_attn.h"

/* Keep the line for za_error; always false. */
#if defined(__GNUC__)
__attribute__((format(printf, 2, 3)))
#endif
bool za_fail_as(enum za_code code, const char *format, ...);
#define za_fail(...) za_fail_as(ZA_INVALID, __VA_ARGS__)
bool za_no_memory(void); /* of the host */

/* Whether an argument is there; where it is NULL, za_error names it. */
bool za_given(const char *name, const void *argument);

#endif
