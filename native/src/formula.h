/* The manifest's formulas: Python integer expressions of names, whole numbers, + - * // %, comparisons, `and`, `or`,
   `not`, conditionals, max, min, ceil_div(a, b), which is the quotient rounded up, and log2 of a power of two. */
#ifndef FORMULA_H
#define FORMULA_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { MAX_NAMES = 128 };

/* Names and their values, of which the first one with a name counts; the texts stay the caller's. A quoted text, as in
   kind == 'cpu', is the code of its first letter, and so is the value of such a name. */
struct names {
    size_t count;
    struct {
        const char *name;
        int64_t value;
    } of[MAX_NAMES];
};

bool za_name_set(struct names *names, const char *name, int64_t value); /* false where there are too many */

/* False for a text that is no formula of these names. A quotient by 0, as in a branch that is not taken, is 0. */
bool za_formula(const char *text, const struct names *names, int64_t *value);

#endif
