#include "error.h"

#include <stdarg.h>
#include <stdio.h>

#include "zinc_attn.h"

static _Thread_local char reason[1024];

bool za_fail(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(reason, sizeof reason, format, arguments);
    va_end(arguments);
    return false;
}

const char *za_error(void) { return reason; }
