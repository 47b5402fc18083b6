#include "work.h"

#include <math.h>
#include <string.h>

#include "floats.h"
#include "zinc_contract.h"

/* Words of records. */
enum { HEADER_WORDS = sizeof(struct work_header) / 4, ITEM_WORDS = sizeof(struct work_item) / 4 };
enum { ROW_WORDS = sizeof(struct work_row) / 4, APPEND_WORDS = sizeof(struct work_append) / 4 };
enum { HEAD_WORDS = sizeof(struct work_head) / 4 };

/* --- the layout -------------------------------------------------------------------------------------- */

/* The keys [first, limit) that a query row sees. A row before the sequence's first token sees none. */
struct seen {
    uint32_t first, limit;
};

static struct seen keys_of(const struct za_call *call, const struct za_request *r, uint32_t row) {
    uint32_t end = r->tokens + 1 + row > r->q_len ? r->tokens + 1 + row - r->q_len : 0; /* after the row's own key */
    uint32_t first = call->window && end > call->window ? end - call->window : 0;
    return (struct seen){first, r->noncausal ? r->tokens : end};
}

/* Node where split `i` begins. */
static uint32_t node_of(const struct layout *l, uint32_t i) {
    return l->first_node + (uint32_t)((uint64_t)i * l->nodes / l->splits);
}

/* The nodes [begin, end) of split `i` that hold keys which a row sees, from node `from` on. False: there are none. */
static bool item_nodes(const struct layout *l, bool single_pass, struct seen seen, uint32_t from, uint32_t i,
                       uint32_t *begin, uint32_t *end) {
    uint32_t last = za_ceil_div(seen.limit, KEYS_PER_NODE);
    if (single_pass) last = za_max(last, 1); /* a row that sees no key has the empty state */
    *begin = za_max(node_of(l, i), za_max(seen.first / KEYS_PER_NODE, from));
    *end = za_min(node_of(l, i + 1), last);
    return *begin < *end;
}

struct layout za_layout(const struct shape *shape, const struct za_call *call, const struct za_request *request,
                        struct rule rule) {
    struct layout l = {.first_node = keys_of(call, request, 0).first / KEYS_PER_NODE};
    l.nodes = za_ceil_div(request->tokens, KEYS_PER_NODE) - l.first_node;
    uint32_t wanted = rule.whole ? 1 : call->splits ? call->splits : rule.fixed_splits;
    /* A CPU driver's code takes twice as long where a workgroup walks over nodes. */
    if (!wanted && !shape->sizes.cpu) wanted = (uint32_t)za_split_rule(&shape->sizes, l.nodes, request->q_len);
    l.splits = za_max(wanted ? za_min(wanted, l.nodes) : l.nodes, 1);
    return l;
}

/* The rows of a block of `each` rows attend a node together if all of them see every key of it. Return the number of
   such nodes, which are the first nodes of the sequence. */
static uint32_t together(const struct za_call *call, const struct za_request *request, uint32_t each, uint32_t row) {
    if (each < 2 || call->window) return 0;
    uint32_t first = row / each * each;
    return request->q_len - first > 1 ? keys_of(call, request, first).limit / KEYS_PER_NODE : 0;
}

/* Whether a request shares the words of its page table with the request before it. */
static bool same_table(const struct za_call *call, uint32_t i) {
    return i && call->request[i].page_table == call->request[i - 1].page_table;
}

/* How many pages of a shared table the requests from number `i` on use. */
static uint32_t pages_of(const struct shape *shape, const struct za_call *call, uint32_t i) {
    uint32_t tokens = call->request[i].tokens;
    while (++i < call->requests && same_table(call, i)) tokens = za_max(tokens, call->request[i].tokens);
    return za_ceil_div(tokens, shape->page_size);
}

bool za_many(const struct shape *shape, const struct za_request *request) {
    return request->q_len * shape->sizes.group >= MATRIX_VECTORS;
}

/* Query rows of an item; by matrix units of a request with many rows: as many as a workgroup serves. */
static uint32_t rows_of_item(const struct shape *shape, const struct za_call *call, const struct za_request *request,
                             struct rule rule) {
    const bool even = !request->noncausal || !call->window; /* see block_of */
    return rule.units && even && za_many(shape, request) ? (uint32_t)za_max(rule.units / shape->sizes.group, 1) : 1;
}

bool za_walks(const struct shape *shape, const struct za_call *call, struct rule rule) {
    const uint64_t group = shape->sizes.group;
    uint64_t workgroups = 0;
    bool several = false; /* some row sees several nodes */
    for (uint32_t i = 0; i < call->requests; ++i) {
        const struct za_request *request = &call->request[i];
        const uint64_t each = rows_of_item(shape, call, request, rule);
        if (!request->q_len) continue;
        const uint32_t nodes = za_layout(shape, call, request, rule).nodes;
        if (request->q_len == 1 || !nodes || !za_many(shape, request)) return false;
        workgroups += za_ceil_div(request->q_len, each) * za_ceil_div(each * group, rule.units);
        several = several || nodes > 1;
    }
    const uint64_t enough = za_units_walks(&shape->sizes, rule.units) * shape->sizes.compute_units;
    return several && workgroups * shape->kv_heads >= enough;
}

/* The rows of an item, from `row` of a request on. From row to row `first` and `limit` grow by `step`, 0 or 1, up to
   `last`; numbers below 0 are 0. Noncausal rows with a window have an item each, because only their `first` grows.
   some: the keys that some row sees. */
struct block {
    uint32_t rows, step;
    struct seen last, some;
};

static struct block block_of(const struct za_call *call, const struct za_request *request, uint32_t each,
                             uint32_t row) {
    const uint32_t rows = za_min(each, request->q_len - row);
    const struct seen first = keys_of(call, request, row), last = keys_of(call, request, row + rows - 1);
    const uint32_t before = rows > 1 ? keys_of(call, request, row + rows - 2).limit : last.limit;
    return (struct block){rows, last.limit - before, last, {first.first, last.limit}};
}

static void count_items(const struct shape *shape, const struct za_call *call, const struct za_request *request,
                        struct rule rule, struct counts *counts) {
    const struct layout l = za_layout(shape, call, request, rule);
    const uint32_t each = rows_of_item(shape, call, request, rule);
    const bool units = rule.units && za_many(shape, request);
    uint64_t items = 0, keys = 0;
    uint32_t begin, end;
    for (uint32_t row = 0; row < request->q_len; ++row) {
        struct seen seen = keys_of(call, request, row);
        uint32_t from = together(call, request, counts->rows_each, row);
        keys += za_max(seen.limit, seen.first) - seen.first;
        if (row % each) continue;
        seen = block_of(call, request, each, row).some;
        for (uint32_t i = 0; i < l.splits; ++i) {
            if (!item_nodes(&l, counts->single_pass, seen, from, i, &begin, &end)) continue;
            ++items;
            counts->walks = counts->walks || (!units && end - begin > 1);
        }
    }
    *(units ? &counts->shared : &counts->items) += items;
    counts->keys += units ? keys / MATRIX_GAIN : keys;
}

/* Count shared items and the rows of each, if sharing is faster. */
static void count_shared(const struct shape *shape, const struct za_call *call, struct rule rule,
                         struct counts *counts) {
    uint64_t items = 0, saved = 0;
    uint32_t rows = 0, each = rule.rows_each;
    for (uint32_t i = 0; each > 1 && i < call->requests; ++i) {
        const struct za_request *request = &call->request[i];
        for (uint32_t row = 0; row < request->q_len; row += each) {
            uint32_t nodes = together(call, request, each, row);
            items += nodes;
            saved += (uint64_t)nodes * (za_min(each, request->q_len - row) - 1);
        }
        rows = za_max(rows, request->q_len);
    }
    if (items > rule.most_shared || !za_sharing_rule(&shape->sizes, rows, items, saved, rule.fused)) return;
    counts->shared = items;
    counts->rows_each = each;
}

struct counts za_totals(const struct shape *shape, const struct za_call *call) {
    struct counts counts = {.single_pass = true};
    for (uint32_t i = 0; i < call->requests; ++i) {
        const struct za_request *request = &call->request[i];
        if (!same_table(call, i)) counts.pages += pages_of(shape, call, i);
        counts.new_rows += request->new_rows;
        counts.rows += request->q_len;
        counts.masks += (uint64_t)request->q_len * request->mask_keys;
    }
    return counts;
}

struct counts za_counts(const struct shape *shape, const struct za_call *call, struct rule rule) {
    struct counts counts = za_totals(shape, call);
    for (uint32_t i = 0; i < call->requests; ++i) {
        const struct za_request *request = &call->request[i];
        if (!request->q_len) continue;
        struct layout layout = za_layout(shape, call, request, rule);
        counts.states += (uint64_t)request->q_len * layout.nodes;
        counts.single_pass = counts.single_pass && layout.nodes == 1;
    }
    counts.single_pass = (counts.single_pass || rule.whole) && counts.rows && !rule.fixed_splits;
    for (int i = 0; counts.rows && i < BIASES; ++i) counts.biases |= (uint32_t)(za_slopes(call, i) != NULL) << i;
    if (!counts.single_pass && !counts.masks && !rule.units) count_shared(shape, call, rule, &counts);
    for (uint32_t i = 0; i < call->requests; ++i) {
        if (call->request[i].q_len) count_items(shape, call, &call->request[i], rule, &counts);
    }
    return counts;
}

struct parts za_parts(const struct shape *shape, const struct counts *counts) {
    struct parts parts = {.base = 0};
    if (counts->shared) /* kernels bind the rest at this offset: every device takes a multiple of 256 bytes */
        parts.base = (HEADER_WORDS + counts->shared * ITEM_WORDS + 63) / 64 * 64;
    parts.rows = HEADER_WORDS + counts->items * ITEM_WORDS;
    parts.appends = parts.rows + counts->rows * ROW_WORDS;
    parts.pages = parts.appends + counts->new_rows * APPEND_WORDS;
    parts.heads = parts.pages + counts->pages;
    parts.mask = parts.heads + (counts->rows ? shape->q_heads * HEAD_WORDS : 0);
    parts.end = parts.mask + counts->masks;
    return parts;
}

/* --- the words --------------------------------------------------------------------------------------- */

/* Where the next records and table words of a call go. */
struct cursor {
    struct work_item *item, *shared;
    struct work_row *row_record;
    struct work_append *append;
    uint32_t page, mask; /* words */
    uint32_t row, state;
};

static void write_float(uint32_t *word, double value) {
    float rounded = (float)value;
    memcpy(word, &rounded, sizeof rounded);
}

const float *za_slopes(const struct za_call *call, int bias) {
    const float *slopes;
    memcpy(&slopes, (const char *)call + za_biases[bias].call, sizeof slopes);
    return slopes;
}

double za_scale(const struct shape *shape, const struct za_call *call) {
    return call->scale != 0 ? call->scale : 1 / sqrt(shape->head_dim);
}

static void write_header(const struct shape *shape, const struct za_call *call, const struct counts *room,
                         const struct layer *layer, const struct parts *parts, struct work_header *header) {
    uint32_t shift = 0;
    while (shape->sizes.page_tiles >> shift > 1) ++shift;
    *header = (struct work_header){
        .q_heads = shape->q_heads,
        .kv_heads = shape->kv_heads,
        .row_kv_heads = shape->kv_heads,
        .group = shape->sizes.group,
        .page_shift = shift,
        .page_tiles = shape->sizes.page_tiles,
        .first_page = layer->first_page,
        .token_rows = layer->steps.token,
        .head_rows = layer->steps.head,
        .rows = room->lse ? (uint32_t)room->rows : 0,
        .row_table = (uint32_t)parts->rows,
        .append_table = (uint32_t)parts->appends,
        .state_stride = (uint32_t)room->states,
        .single_pass = room->single_pass,
        .head_table = (uint32_t)parts->heads,
    };
    /* the product in double, rounded once */
    write_float(&header->score_scale, za_scale(shape, call) * (call->softcap != 0 ? 1 : LOG2E));
    if (call->softcap == 0) return;
    write_float(&header->softcap, call->softcap);
    write_float(&header->softcap_inverse, 1.0 / (double)(float)call->softcap);
}

/* Item records of a request, to *item. Rows of a split are neighbors, because a GPU's caches hold the split's keys. By
   matrix units (each > 1) the last rows, whose items are the longest, come first. */
static void write_items(const struct za_call *call, const struct za_request *request, const struct layout *l,
                        const struct counts *room, uint32_t each, uint32_t page_table, uint32_t first_row,
                        struct work_item **item) {
    const uint32_t blocks = (uint32_t)za_ceil_div(request->q_len, each);
    uint32_t begin, end;
    for (uint32_t i = 0; i < l->splits; ++i) {
        for (uint32_t j = 0; j < blocks; ++j) {
            const uint32_t row = (each > 1 ? blocks - 1 - j : j) * each;
            const struct block block = block_of(call, request, each, row);
            uint32_t from = together(call, request, room->rows_each, row);
            if (!item_nodes(l, room->single_pass, block.some, from, i, &begin, &end)) continue;
            *(*item)++ = (struct work_item){
                .row = first_row + row,
                .limit = block.last.limit,
                .node_begin = begin,
                .node_end = end,
                .rows = block.rows,
                .page_table = page_table,
                .first = block.last.first,
                .row_step = block.step,
            };
        }
    }
}

/* Item records of the nodes that rows of a request attend together. Items of the same node are neighbors. */
static void write_shared(const struct za_call *call, const struct za_request *request, uint32_t each,
                         uint32_t page_table, struct cursor *to) {
    const uint32_t nodes = request->tokens / KEYS_PER_NODE;
    for (uint32_t node = 0; each && node < nodes; ++node) {
        for (uint32_t row = 0; row < request->q_len; row += each) {
            if (together(call, request, each, row) <= node) continue;
            *to->shared++ = (struct work_item){
                .row = to->row + row,
                .limit = (node + 1) * KEYS_PER_NODE,
                .node_begin = node,
                .node_end = node + 1,
                .rows = za_min(each, request->q_len - row),
                .page_table = page_table,
            };
        }
    }
}

/* Row records of a request, and its mask, whose words lie `offset` words farther from the header that is bound. */
static void write_rows(const struct za_call *call, const struct za_request *request, const struct layout *l,
                       uint32_t offset, struct cursor *to, uint32_t *work) {
    const uint32_t keys = request->mask_keys;
    for (uint32_t row = 0; row < request->q_len; ++row) {
        struct seen seen = keys_of(call, request, row);
        uint32_t node = seen.first / KEYS_PER_NODE, end = za_ceil_div(seen.limit, KEYS_PER_NODE);
        *to->row_record++ = (struct work_row){
            .state = to->state + row * l->nodes + node - l->first_node,
            .count = end > node ? end - node : 0,
            .node = node,
            .position = request->tokens + row - request->q_len, /* an int32 */
            .mask = keys ? offset + to->mask + row * keys : 0,
            .mask_begin = keys ? request->tokens - keys : 0,
            .mask_end = keys ? request->tokens : 0,
        };
    }
    if (request->q_len && keys) memcpy(&work[to->mask], request->mask, 4 * (size_t)request->q_len * keys);
    to->mask += request->q_len * keys;
    to->row += request->q_len;
    to->state += request->q_len * l->nodes;
}

/* Head records. scales: (2, kv_heads) or NULL. Products are in double and rounded once, except a sink's in float. */
static void write_heads(const struct shape *shape, const struct za_call *call, const float *scales,
                        struct work_head *head) {
    for (uint32_t h = 0; h < shape->q_heads; ++h, ++head) {
        const uint32_t kv_head = h / shape->sizes.group;
        *head = (struct work_head){.sink = HIDDEN};
        if (call->sinks) write_float(&head->sink, za_flushed(call->sinks[h]) * (float)LOG2E);
        for (int i = 0; i < BIASES; ++i) {
            const float *slopes = za_slopes(call, i);
            if (slopes) write_float((uint32_t *)head + za_biases[i].word, (double)slopes[h] * LOG2E);
        }
        write_float(&head->mask, (call->mask_slopes ? (double)call->mask_slopes[h] : 1) * LOG2E);
        if (!scales) continue;
        write_float(&head->k_scale, (double)scales[kv_head] * FP8_UNIT);
        write_float(&head->v_scale, (double)scales[shape->kv_heads + kv_head] * FP8_UNIT);
    }
}

static void *word_at(uint32_t *work, uint64_t word) { return work + word; }

/* Records after the call's, up to the room's end, do nothing: items have no leaf, rows no state, tokens no place. */
static void write_rest(const struct cursor *to, const struct parts *parts, uint32_t *work) {
    memset(to->item, 0, (size_t)((char *)word_at(work, parts->rows) - (char *)to->item));
    memset(to->row_record, 0, (size_t)((char *)word_at(work, parts->appends) - (char *)to->row_record));
    struct work_append *end = word_at(work, parts->pages);
    for (struct work_append *append = to->append; append < end; ++append) append->position = NO_TOKEN;
}

/* The header of the shared items, and of items by matrix units. It has the same tables as the main header, which lie
   `base` words farther from it. */
static void write_shared_header(const struct work_header *header, uint32_t base, struct work_header *shared) {
    *shared = *header;
    shared->row_table += base;
    shared->head_table += base;
}

void za_work_write(const struct shape *shape, const struct za_call *call, struct rule rule, const struct counts *room,
                   const struct layer *layer, uint32_t *whole) {
    const struct parts parts = za_parts(shape, room);
    const uint32_t base = (uint32_t)parts.base;
    uint32_t *work = whole + base, table = 0;
    struct cursor to = {
        .item = word_at(work, HEADER_WORDS),
        .shared = word_at(whole, HEADER_WORDS),
        .row_record = word_at(work, parts.rows),
        .append = word_at(work, parts.appends),
        .page = (uint32_t)parts.pages,
        .mask = (uint32_t)parts.mask,
    };
    write_header(shape, call, room, layer, &parts, word_at(work, 0));
    if (room->shared) write_shared_header(word_at(work, 0), base, word_at(whole, 0));
    for (uint32_t i = 0; i < call->requests; ++i) {
        const struct za_request *request = &call->request[i];
        if (!same_table(call, i)) {
            uint32_t pages = pages_of(shape, call, i);
            table = to.page;
            if (pages) memcpy(&work[table], request->page_table, 4 * (size_t)pages);
            to.page += pages;
        }
        if (request->q_len) {
            struct layout layout = za_layout(shape, call, request, rule);
            const uint32_t offset = rule.units && za_many(shape, request) ? base : 0;
            struct work_item **item = offset ? &to.shared : &to.item;
            const uint32_t each = rows_of_item(shape, call, request, rule);
            write_items(call, request, &layout, room, each, table + offset, to.row, item);
            write_shared(call, request, room->rows_each, table + base, &to);
            write_rows(call, request, &layout, offset, &to, work);
        }
        for (uint32_t row = 0; row < request->new_rows; ++row)
            *to.append++ = (struct work_append){request->tokens - request->new_rows + row, table};
    }
    write_rest(&to, &parts, work);
    if (room->rows) write_heads(shape, call, layer->scales, word_at(work, parts.heads));
}
