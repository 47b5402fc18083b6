/* The reason of the last failure in this thread. */
#ifndef ERROR_H
#define ERROR_H

#include <stdbool.h>

#if defined(__GNUC__)
#define ZA_PRINTF __attribute__((format(printf, 1, 2)))
#else
#define ZA_PRINTF
#endif

bool za_fail(const char *format, ...) ZA_PRINTF; /* keeps the line for za_error; always false */

#endif
