#include "error.h"

#include <stdarg.h>
#include <stdio.h>

static _Thread_local char reason[1024];
static _Thread_local enum za_code kind;

bool za_fail_as(enum za_code code, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    kind = code;
    vsnprintf(reason, sizeof reason, format, arguments);
    va_end(arguments);
    return false;
}

bool za_given(const char *name, const void *argument) {
    return argument || za_fail("%s: got NULL, expected one", name);
}

bool za_no_memory(void) { return za_fail_as(ZA_MEMORY, "out of host memory"); }

const char *za_error(void) { return reason; }

enum za_code za_error_code(void) { return kind; }

uint32_t za_abi(void) { return ZA_ABI; }
