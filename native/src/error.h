/* The reason and the kind of the last failure in this thread. */
#ifndef ERROR_H
#define ERROR_H

#include <stdbool.h>

#include "zinc_attn.h"

#if defined(__GNUC__)
#define ZA_PRINTF(at) __attribute__((format(printf, at, at + 1)))
#else
#define ZA_PRINTF(at)
#endif

/* Keep the line for za_error; always false. za_fail: ZA_INVALID. */
bool za_fail(const char *format, ...) ZA_PRINTF(1);
bool za_fail_as(enum za_code code, const char *format, ...) ZA_PRINTF(2);
bool za_no_memory(void); /* of the host */

/* Whether an argument is there; where it is NULL, za_error names it. */
bool za_given(const char *name, const void *argument);

#endif
