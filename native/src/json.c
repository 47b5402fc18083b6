#include "json.h"

#include <stdlib.h>
#include <string.h>

enum { MAX_DEPTH = 64 };

struct parser {
    const char *at;
    int depth;
};

static void skip_space(struct parser *p) { p->at += strspn(p->at, " \t\r\n"); }

static bool take(struct parser *p, char c) {
    skip_space(p);
    if (*p->at != c) return false;
    ++p->at;
    return true;
}

static char *parse_string(struct parser *p) {
    if (!take(p, '"')) return NULL;
    size_t room = 1;
    for (const char *c = p->at; *c && *c != '"'; ++c) {
        ++room;
        if (*c == '\\' && c[1]) ++c, ++room;
    }
    char *text = malloc(room), *out = text; /* an escape is shorter in the text */
    if (!text) return NULL;
    while (out && *p->at && *p->at != '"') {
        unsigned char c = (unsigned char)*p->at++;
        if (c < 0x20) {
            out = NULL;
        } else if (c != '\\') {
            *out++ = (char)c;
        } else {
            static const char from[] = "\"\\/bfnrt", to[] = "\"\\/\b\f\n\r\t";
            const char *found = *p->at ? strchr(from, *p->at) : NULL;
            if (found) {
                ++p->at;
                *out++ = to[found - from];
            } else {
                out = NULL;
            }
        }
    }
    if (!out || *p->at != '"') {
        free(text);
        return NULL;
    }
    ++p->at;
    *out = 0;
    return text;
}

static bool push(struct json *parent, struct json *child) {
    if ((parent->count & (parent->count - 1)) == 0) { /* room doubles at powers of two */
        struct json *grown = realloc(parent->items, (parent->count ? 2 * parent->count : 1) * sizeof *grown);
        if (!grown) return false;
        parent->items = grown;
    }
    parent->items[parent->count++] = *child;
    return true;
}

static bool parse_value(struct parser *p, struct json *out);

static bool parse_items(struct parser *p, struct json *out, char close) {
    if (take(p, close)) return true;
    do {
        struct json child = {0};
        char *name = NULL;
        bool ok = true;
        if (out->type == JSON_OBJECT) {
            name = parse_string(p);
            ok = name && take(p, ':');
        }
        ok = ok && parse_value(p, &child);
        child.name = name;
        if (!ok || !push(out, &child)) {
            za_json_free(&child);
            return false;
        }
    } while (take(p, ','));
    return take(p, close);
}

static bool parse_number(struct parser *p, double *number) {
    if (*p->at != '-' && (*p->at < '0' || *p->at > '9')) return false;
    size_t length = strspn(p->at, "+-.0123456789eE"); /* keeps strtod's other forms out */
    char *end;
    *number = strtod(p->at, &end);
    if (end != p->at + length) return false;
    p->at = end;
    return true;
}

static bool parse_value(struct parser *p, struct json *out) {
    static const char *const words[] = {"null", "false", "true"};
    skip_space(p);
    if (*p->at == '"') {
        out->type = JSON_STRING;
        out->text = parse_string(p);
        return out->text != NULL;
    }
    if (*p->at == '{' || *p->at == '[') {
        bool object = *p->at++ == '{';
        if (++p->depth > MAX_DEPTH) return false;
        out->type = object ? JSON_OBJECT : JSON_ARRAY;
        bool ok = parse_items(p, out, object ? '}' : ']');
        --p->depth;
        return ok;
    }
    for (int i = 0; i < 3; ++i) {
        if (strncmp(p->at, words[i], strlen(words[i])) == 0) {
            p->at += strlen(words[i]);
            out->type = (enum json_type)(JSON_NULL + i);
            return true;
        }
    }
    out->type = JSON_NUMBER;
    return parse_number(p, &out->number);
}

bool za_json_parse(const char *text, struct json *root, size_t *error_at) {
    struct parser p = {text, 0};
    *root = (struct json){0};
    bool ok = parse_value(&p, root);
    skip_space(&p);
    if (ok && *p.at == 0) return true;
    *error_at = (size_t)(p.at - text);
    za_json_free(root);
    return false;
}

void za_json_free(struct json *node) {
    for (size_t i = 0; i < node->count; ++i) za_json_free(&node->items[i]);
    free(node->items);
    free(node->text);
    free(node->name);
    *node = (struct json){0};
}

const struct json *za_json_get(const struct json *object, const char *name) {
    if (!object || object->type != JSON_OBJECT) return NULL;
    for (size_t i = 0; i < object->count; ++i) {
        if (strcmp(object->items[i].name, name) == 0) return &object->items[i];
    }
    return NULL;
}

const char *za_json_text(const struct json *node) { return node && node->type == JSON_STRING ? node->text : NULL; }

bool za_json_u32(const struct json *node, uint32_t *value) {
    if (!node || node->type != JSON_NUMBER || !(node->number >= 0 && node->number <= UINT32_MAX)) return false;
    *value = (uint32_t)node->number;
    return (double)*value == node->number;
}
