/* A small JSON reader: a text becomes a tree. Names that an object repeats are kept, za_json_get finds the first; an
   escape \u, which no manifest has, is refused. */
#ifndef JSON_H
#define JSON_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum json_type { JSON_NULL, JSON_FALSE, JSON_TRUE, JSON_NUMBER, JSON_STRING, JSON_ARRAY, JSON_OBJECT };

struct json {
    enum json_type type;
    char *name; /* within an object */
    double number;
    char *text; /* of a string, UTF-8 */
    size_t count;
    struct json *items; /* of an array or an object */
};

/* Parse `text`, which ends with a 0. On failure `root` is empty, and `*error_at` is where the text makes no sense. */
bool za_json_parse(const char *text, struct json *root, size_t *error_at);
void za_json_free(struct json *node);

/* All of these take NULL for a node that is not there, and give NULL or false for one of another type. */
const struct json *za_json_get(const struct json *object, const char *name);
const char *za_json_text(const struct json *node);
bool za_json_u32(const struct json *node, uint32_t *value);

#endif
