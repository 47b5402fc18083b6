/* The reason and the kind of the last failure in this thread. */
#pragma once
#include <stdbool.h>

#include "zinc_attn.h"

/* Keep the line for za_error; always false. */
#if defined(__GNUC__)
__attribute__((format(printf, 2, 3)))
#endif
bool za_fail_as(enum za_code code, const char *format, ...);
#define za_fail(...) za_fail_as(ZA_INVALID, __VA_ARGS__)
bool za_no_memory(void); /* of the host */

/* For a result of Vulkan: whether it is VK_SUCCESS (else za_error is set), its kind of failure, and its name. */
bool za_check(VkResult result, const char *what);
enum za_code za_code_of(VkResult result);
const char *za_result_name(VkResult result);

/* Whether an argument is not NULL. If it is NULL, za_error names it. */
bool za_not_null(const char *name, const void *argument);
