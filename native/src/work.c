#include "work.h"

#include <math.h>
#include <string.h>

#include "floats.h"
#include "storage.h"

static const double LOG2E = 1.4426950408889634;
enum { WORKGROUPS_PER_UNIT = 8, MAX_CPU_STATES = 4096, SINGLE_SPLIT_LEAVES = 2, NODE_LEAVES = 1024, MAX_SPLITS = 128 };
static const uint32_t NO_TOKEN = 0xFFFFFFFF; /* position of an append record for no token */

static uint32_t least(uint32_t a, uint32_t b) { return a < b ? a : b; }
static uint32_t most(uint32_t a, uint32_t b) { return a > b ? a : b; }

/* --- the layout -------------------------------------------------------------------------------------- */

/* The keys [first, limit) that a query row sees. A row before the sequence's first token sees none. */
struct seen {
    uint32_t first, limit;
};

static struct seen keys_of(const struct za_call *call, const struct za_request *r, uint32_t row) {
    uint32_t behind = r->tokens + 1 + row > r->q_len ? r->tokens + 1 + row - r->q_len : 0; /* its own */
    uint32_t first = call->window && behind > call->window ? behind - call->window : 0;
    return (struct seen){first, r->noncausal ? r->tokens : behind};
}

/* The manifest's split_rule.first_that_holds. Any other layout gives the same bits. */
static void split_rule(const struct manifest *m, const struct shape *shape, uint32_t leaves, uint32_t q_len, bool cpu,
                       struct layout *layout) {
    uint32_t nodes = za_ceil_div(leaves, m->node);
    uint64_t sharers = (uint64_t)shape->kv_heads * shape->head_chunks * q_len;
    uint64_t wanted = (uint64_t)shape->compute_units * WORKGROUPS_PER_UNIT;
    uint32_t target = (uint32_t)((wanted + sharers - 1) / sharers);
    layout->leaves_per_state = m->node;
    if (cpu && (uint64_t)leaves * q_len <= MAX_CPU_STATES) {
        layout->splits = most(leaves, 1);
        layout->leaves_per_state = 1;
    } else if (leaves <= SINGLE_SPLIT_LEAVES) {
        layout->splits = 1;
    } else if (!cpu && leaves < NODE_LEAVES) {
        layout->splits = least(least(leaves, target), MAX_SPLITS);
        if (layout->splits > nodes) layout->leaves_per_state = 1;
    } else {
        layout->splits = q_len == 1 && !cpu ? nodes : least(nodes, target);
    }
}

/* Key where split `i` begins: even pieces of the keys that are seen, of whole units where the split rule cuts. */
static uint32_t boundary(const struct layout *l, const struct manifest *m, uint32_t tokens, uint32_t i) {
    if (l->fixed) return l->begin + (uint32_t)((uint64_t)i * (tokens - l->begin) / l->splits);
    uint32_t unit = (uint32_t)((uint64_t)i * l->units / l->splits);
    return most(least((l->first_leaf + unit * l->leaves_per_state) * m->leaf, tokens), l->begin);
}

/* Leaves [begin, end) that split `i` has for a row: the units that start in it and hold keys that the row sees. */
static bool item_leaves(const struct layout *l, const struct manifest *m, uint32_t tokens, bool single_pass,
                        struct seen seen, uint32_t i, uint32_t *begin, uint32_t *end) {
    uint32_t unit_keys = m->leaf * l->leaves_per_state, last = za_ceil_div(seen.limit, m->leaf);
    if (single_pass) last = most(last, 1); /* a row that sees no key has the empty state */
    *begin = i ? za_ceil_div(boundary(l, m, tokens, i), unit_keys) * l->leaves_per_state : l->first_leaf;
    *begin = most(*begin, seen.first / m->leaf);
    *end = least(za_ceil_div(boundary(l, m, tokens, i + 1), unit_keys) * l->leaves_per_state, last);
    return *begin < *end;
}

struct layout za_layout(const struct manifest *m, const struct shape *shape, const struct za_call *call,
                        const struct za_request *request, struct rule rule) {
    struct layout l = {.begin = keys_of(call, request, 0).first, .leaves_per_state = 1};
    l.first_leaf = l.begin / m->leaf;
    uint32_t leaves = za_ceil_div(request->tokens, m->leaf) - l.first_leaf;
    if (call->splits) {
        l.fixed = true;
        l.splits = call->splits;
        if ((request->tokens - l.begin) / l.splits >= m->leaf * m->node) l.leaves_per_state = m->node;
    } else if (rule.fixed_splits) {
        l.leaves_per_state = rule.fixed_per_state;
        l.splits = most(least(rule.fixed_splits, za_ceil_div(leaves, l.leaves_per_state)), 1);
    } else {
        split_rule(m, shape, leaves, request->q_len, rule.cpu, &l);
    }
    l.units = za_ceil_div(leaves, l.leaves_per_state);
    l.first_unit = l.begin / (m->leaf * l.leaves_per_state);
    l.states_per_row = za_ceil_div(request->tokens, m->leaf * l.leaves_per_state) - l.first_unit;
    return l;
}

/* Whether the words of a request's page table are those of the request before it. */
static bool same_table(const struct za_call *call, uint32_t i) {
    return i && call->request[i].page_table == call->request[i - 1].page_table;
}

/* The pages that requests from number `i` on use of a table that they share. */
static uint32_t pages_of(const struct shape *shape, const struct za_call *call, uint32_t i) {
    uint32_t tokens = call->request[i].tokens;
    while (++i < call->requests && same_table(call, i)) tokens = most(tokens, call->request[i].tokens);
    return za_ceil_div(tokens, shape->page_size);
}

static void count_items(const struct manifest *m, const struct za_call *call, const struct za_request *request,
                        const struct layout *l, struct counts *counts) {
    uint32_t begin, end;
    for (uint32_t row = 0; row < request->q_len; ++row) {
        struct seen seen = keys_of(call, request, row);
        for (uint32_t i = 0; i < l->splits; ++i) {
            if (!item_leaves(l, m, request->tokens, counts->single_pass, seen, i, &begin, &end)) continue;
            ++counts->items;
            counts->loop = counts->loop || end - begin > 1;
        }
    }
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

struct counts za_counts(const struct manifest *m, const struct shape *shape, const struct za_call *call,
                        struct rule rule) {
    struct counts counts = za_totals(shape, call);
    for (uint32_t i = 0; i < call->requests; ++i) {
        const struct za_request *request = &call->request[i];
        if (!request->q_len) continue;
        struct layout layout = za_layout(m, shape, call, request, rule);
        counts.states += (uint64_t)request->q_len * layout.states_per_row;
        counts.single_pass = counts.single_pass && layout.states_per_row == 1;
    }
    counts.single_pass = counts.single_pass && counts.rows && !rule.fixed_splits;
    counts.sinks = call->sinks && counts.rows;
    counts.alibi = call->alibi && counts.rows;
    counts.mask_slopes = call->mask_slopes && counts.masks;
    for (uint32_t i = 0; i < call->requests; ++i) {
        if (!call->request[i].q_len) continue;
        struct layout layout = za_layout(m, shape, call, &call->request[i], rule);
        count_items(m, call, &call->request[i], &layout, &counts);
    }
    return counts;
}

struct parts za_parts(const struct manifest *m, const struct shape *shape, const struct counts *counts) {
    struct parts at;
    at.rows = m->work.header_words + counts->items * m->work.item_words;
    at.appends = at.rows + counts->rows * m->work.row_words;
    at.pages = at.appends + counts->new_rows * m->work.append_words;
    at.sinks = at.pages + counts->pages;
    at.alibi = at.sinks + (counts->sinks ? shape->q_heads : 0);
    at.scales = at.alibi + (counts->alibi ? shape->q_heads : 0);
    at.mask_slopes = at.scales + (counts->rows ? shape->scale_words : 0);
    at.mask = at.mask_slopes + (counts->mask_slopes ? shape->q_heads : 0);
    at.end = at.mask + counts->masks;
    return at;
}

/* --- the words --------------------------------------------------------------------------------------- */

/* Where the next records and table words of a call go. */
struct cursor {
    uint32_t *item, *row_record, *append;
    uint32_t page, mask; /* words */
    uint32_t row, state;
};

static void write_float(uint32_t *word, double value) {
    float rounded = (float)value;
    memcpy(word, &rounded, sizeof rounded);
}

double za_scale(const struct shape *shape, const struct za_call *call) {
    return call->scale != 0 ? call->scale : 1 / sqrt(shape->head_dim);
}

static void write_header(const struct manifest *m, const struct shape *shape, const struct za_call *call,
                         const struct counts *room, const struct layer *layer, const struct parts *parts,
                         uint32_t *work) {
    const struct work_layout *at = &m->work;
    uint32_t shift = 0;
    while (shape->page_tiles >> shift > 1) ++shift;
    memset(work, 0, 4 * (size_t)at->header_words);
    work[at->header.q_heads] = shape->q_heads;
    work[at->header.kv_heads] = work[at->header.row_kv_heads] = shape->kv_heads;
    work[at->header.group] = shape->group;
    work[at->header.page_shift] = shift;
    work[at->header.page_tiles] = shape->page_tiles;
    work[at->header.first_page] = layer->first_page;
    work[at->header.token_rows] = layer->steps.token;
    work[at->header.head_rows] = layer->steps.head;
    work[at->header.rows] = (uint32_t)room->rows;
    work[at->header.row_table] = (uint32_t)parts->rows;
    work[at->header.append_table] = (uint32_t)parts->appends;
    work[at->header.state_stride] = (uint32_t)room->states;
    work[at->header.single_pass] = room->single_pass;
    /* the product in double, rounded once */
    write_float(&work[at->header.score_scale], za_scale(shape, call) * (call->softcap != 0 ? 1 : LOG2E));
    if (call->softcap != 0) {
        write_float(&work[at->header.softcap], call->softcap);
        write_float(&work[at->header.softcap_inverse], 1.0 / (double)(float)call->softcap);
    }
    if (call->sinks && room->sinks) work[at->header.sink_table] = (uint32_t)parts->sinks;
    if (call->alibi && room->alibi) work[at->header.alibi_table] = (uint32_t)parts->alibi;
    if (parts->mask_slopes > parts->scales) work[at->header.scale_table] = (uint32_t)parts->scales;
    if (parts->mask > parts->mask_slopes) work[at->header.mask_slope_table] = (uint32_t)parts->mask_slopes;
}

/* Item records of a request. Rows of a split are neighbors: a GPU's caches hold its keys for all. */
static void write_items(const struct manifest *m, const struct za_call *call, const struct za_request *request,
                        const struct layout *l, bool single_pass, uint32_t page_table, struct cursor *to) {
    const struct work_layout *at = &m->work;
    uint32_t begin, end;
    for (uint32_t i = 0; i < l->splits; ++i) {
        for (uint32_t row = 0; row < request->q_len; ++row) {
            struct seen seen = keys_of(call, request, row);
            if (!item_leaves(l, m, request->tokens, single_pass, seen, i, &begin, &end)) continue;
            memset(to->item, 0, 4 * (size_t)at->item_words);
            to->item[at->item.row] = to->row + row;
            to->item[at->item.first] = seen.first;
            to->item[at->item.limit] = seen.limit;
            to->item[at->item.leaf_begin] = begin;
            to->item[at->item.leaf_end] = end;
            to->item[at->item.rows] = 1;
            to->item[at->item.page_table] = page_table;
            to->item[at->item.leaves_per_state] = l->leaves_per_state;
            to->item += at->item_words;
        }
    }
}

/* Row records of a request, and its mask. */
static void write_rows(const struct manifest *m, const struct za_call *call, const struct za_request *request,
                       const struct layout *l, struct cursor *to, uint32_t *work) {
    const struct work_layout *at = &m->work;
    uint32_t unit_keys = m->leaf * l->leaves_per_state, keys = request->mask_keys;
    for (uint32_t row = 0; row < request->q_len; ++row, to->row_record += at->row_words) {
        struct seen seen = keys_of(call, request, row);
        uint32_t unit = seen.first / unit_keys, units = za_ceil_div(seen.limit, unit_keys), *record = to->row_record;
        memset(record, 0, 4 * (size_t)at->row_words);
        record[at->row.state] = to->state + row * l->states_per_row + unit - l->first_unit;
        record[at->row.count] = units > unit ? units - unit : 0;
        record[at->row.unit] = unit;
        record[at->row.leaves_per_state] = l->leaves_per_state;
        record[at->row.position] = request->tokens + row - request->q_len; /* an int32 */
        if (!keys) continue;
        record[at->row.mask] = to->mask + row * keys;
        record[at->row.mask_begin] = request->tokens - keys;
        record[at->row.mask_end] = request->tokens;
    }
    if (request->q_len && keys) memcpy(&work[to->mask], request->mask, 4 * (size_t)request->q_len * keys);
    to->mask += request->q_len * keys;
    to->row += request->q_len;
    to->state += request->q_len * l->states_per_row;
}

static void write_slopes(const float *slopes, uint64_t begin, uint64_t end, uint32_t *work) {
    for (uint64_t i = begin; slopes && i < end; ++i) /* the product in double, rounded once */
        write_float(&work[i], (double)slopes[i - begin] * LOG2E);
}

/* What the heads have: sinks, slopes, scales. */
static void write_tables(const struct manifest *m, const struct za_call *call, const struct parts *parts,
                         const float *scales, uint32_t *work) {
    for (uint64_t i = parts->sinks; call->sinks && i < parts->alibi; ++i) {
        float sink = za_flushed(m->min_input, call->sinks[i - parts->sinks]) * (float)LOG2E; /* in float */
        memcpy(&work[i], &sink, sizeof sink);
    }
    write_slopes(call->alibi, parts->alibi, parts->scales, work);
    write_slopes(call->mask_slopes, parts->mask_slopes, parts->mask, work);
    for (uint64_t i = parts->scales; scales && i < parts->mask_slopes; ++i)
        write_float(&work[i], (double)scales[i - parts->scales] * za_storage_limits.fp8_unit);
}

/* Records between those of the call and the end of the room: no item has a leaf, no row a state, no token a place. */
static void write_rest(const struct manifest *m, const struct cursor *to, const struct parts *parts, uint32_t *work) {
    const struct work_layout *at = &m->work;
    memset(to->item, 0, 4 * (size_t)(work + parts->rows - to->item));
    memset(to->row_record, 0, 4 * (size_t)(work + parts->appends - to->row_record));
    for (uint32_t *append = to->append; append < work + parts->pages; append += at->append_words)
        append[at->append.position] = NO_TOKEN;
}

void za_work_write(const struct manifest *m, const struct shape *shape, const struct za_call *call, struct rule rule,
                   const struct counts *room, const struct layer *layer, uint32_t *work) {
    const struct work_layout *at = &m->work;
    struct parts parts = za_parts(m, shape, room);
    struct cursor to = {work + at->header_words, work + parts.rows, work + parts.appends, (uint32_t)parts.pages,
                        (uint32_t)parts.mask, 0, 0};
    uint32_t table = 0;
    write_header(m, shape, call, room, layer, &parts, work);
    for (uint32_t i = 0; i < call->requests; ++i) {
        const struct za_request *request = &call->request[i];
        if (!same_table(call, i)) {
            uint32_t pages = pages_of(shape, call, i);
            table = to.page;
            if (pages) memcpy(&work[table], request->page_table, 4 * (size_t)pages);
            to.page += pages;
        }
        if (request->q_len) {
            struct layout layout = za_layout(m, shape, call, request, rule);
            write_items(m, call, request, &layout, room->single_pass, table, &to);
            write_rows(m, call, request, &layout, &to, work);
        }
        for (uint32_t row = 0; row < request->new_rows; ++row, to.append += at->append_words) {
            to.append[at->append.position] = request->tokens - request->new_rows + row;
            to.append[at->append.page_table] = table;
        }
    }
    write_rest(m, &to, &parts, work);
    write_tables(m, call, &parts, layer->scales, work);
}
