#include "formula.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_DEPTH = 64 };

/* What is left of the text; `bad` once it makes no sense, then the rest is of no matter. */
struct reader {
    const char *at;
    const struct names *names;
    int depth;
    bool bad;
};

static int64_t read_conditional(struct reader *r);

bool za_name_set(struct names *names, const char *name, int64_t value) {
    if (names->count == MAX_NAMES) return false;
    names->of[names->count].name = name;
    names->of[names->count++].value = value;
    return true;
}

static int64_t bad(struct reader *r) {
    r->bad = true;
    return 0;
}

/* Take a sign or a word if it comes next. A word ends where a name would. */
static bool take(struct reader *r, const char *sign) {
    size_t size = strlen(sign);
    while (*r->at == ' ' || *r->at == '\n') ++r->at;
    if (strncmp(r->at, sign, size) != 0) return false;
    if (isalpha((unsigned char)*sign) && (isalnum((unsigned char)r->at[size]) || r->at[size] == '_')) return false;
    r->at += size;
    return true;
}

static int64_t floor_div(int64_t a, int64_t b) {
    if (b == 0 || (a == INT64_MIN && b == -1)) return 0;
    int64_t quotient = a / b;
    return quotient - (a % b != 0 && (a < 0) != (b < 0));
}

/* `and` and `or` give one of their operands, as in Python; neither has effects, so both sides are read. */
static int64_t apply(const char *sign, int64_t a, int64_t b) {
    switch (*sign) {
    case 'o': return a ? a : b;
    case 'a': return a ? b : a;
    case '=': return a == b;
    case '!': return a != b;
    case '<': return sign[1] ? a <= b : a < b;
    case '>': return sign[1] ? a >= b : a > b;
    case '+': return (int64_t)((uint64_t)a + (uint64_t)b); /* what does not fit wraps */
    case '-': return (int64_t)((uint64_t)a - (uint64_t)b);
    case '*': return (int64_t)((uint64_t)a * (uint64_t)b);
    case '/': return floor_div(a, b);
    default: return apply("-", a, apply("*", floor_div(a, b), b));
    }
}

static int64_t log2_of(int64_t x) {
    int64_t power = 0;
    while (x > 1) {
        x /= 2;
        ++power;
    }
    return power;
}

/* Behind the name and the opening parenthesis of a function. */
static int64_t read_call(struct reader *r, const char *name, size_t size) {
    int64_t a = read_conditional(r), b = take(r, ",") ? read_conditional(r) : a;
    if (!take(r, ")")) return bad(r);
    if (size == 3 && memcmp(name, "max", 3) == 0) return a > b ? a : b;
    if (size == 3 && memcmp(name, "min", 3) == 0) return a < b ? a : b;
    if (size == 8 && memcmp(name, "ceil_div", 8) == 0) return apply("-", 0, floor_div(apply("-", 0, a), b));
    if (size == 4 && memcmp(name, "log2", 4) == 0) return log2_of(a);
    return bad(r);
}

static int64_t read_atom(struct reader *r) {
    if (take(r, "(")) {
        int64_t value = read_conditional(r);
        return take(r, ")") ? value : bad(r);
    }
    if (take(r, "'")) {
        int64_t value = (unsigned char)*r->at;
        while (*r->at && *r->at != '\'') ++r->at;
        return take(r, "'") ? value : bad(r);
    }
    if (isdigit((unsigned char)*r->at)) {
        char *end;
        int64_t value = strtoll(r->at, &end, 10);
        r->at = end;
        return value;
    }
    const char *name = r->at;
    while (isalnum((unsigned char)*r->at) || *r->at == '_') ++r->at;
    size_t size = (size_t)(r->at - name);
    if (size && take(r, "(")) return read_call(r, name, size);
    for (size_t i = 0; i < r->names->count; ++i)
        if (strlen(r->names->of[i].name) == size && memcmp(r->names->of[i].name, name, size) == 0)
            return r->names->of[i].value;
    return bad(r);
}

/* Signs between two values, from those that bind loosest to the tightest; what begins like another comes after it. */
static const struct {
    int level;
    const char *sign;
} SIGNS[] = {{0, "or"}, {1, "and"}, {3, "=="}, {3, "!="}, {3, "<="}, {3, ">="}, {3, "<"},
             {3, ">"},  {4, "+"},   {4, "-"},  {5, "//"}, {5, "*"},  {5, "%"}};
enum { NOT = 2, COMPARISON = 3, ATOM = 6 };

static int64_t read_level(struct reader *r, int level) {
    if (r->bad || r->depth > MAX_DEPTH) return bad(r);
    if (level == NOT && take(r, "not")) return ++r->depth, !read_level(r, NOT);
    if (level == ATOM) return take(r, "-") ? ++r->depth, apply("-", 0, read_level(r, ATOM)) : read_atom(r);
    int64_t value = read_level(r, level + 1);
    for (size_t i = 0; i < sizeof SIGNS / sizeof *SIGNS;) {
        bool next = SIGNS[i].level == level && take(r, SIGNS[i].sign);
        if (next) value = apply(SIGNS[i].sign, value, read_level(r, level + 1));
        if (next && level == COMPARISON) break; /* Python's comparisons chain, and no formula has two */
        i = next ? 0 : i + 1;
    }
    return value;
}

static int64_t read_conditional(struct reader *r) {
    if (r->bad || ++r->depth > MAX_DEPTH) return bad(r);
    int64_t value = read_level(r, 0);
    if (take(r, "if")) {
        int64_t condition = read_level(r, 0), other = take(r, "else") ? read_conditional(r) : bad(r);
        value = condition ? value : other;
    }
    --r->depth;
    return value;
}

bool za_formula(const char *text, const struct names *names, int64_t *value) {
    struct reader reader = {.at = text, .names = names};
    *value = read_conditional(&reader);
    take(&reader, ""); /* blanks at the end */
    return !reader.bad && !*reader.at;
}
