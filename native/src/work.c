#include "work.h"

#include <string.h>

#include "floats.h"
#include "storage.h"

static const double LOG2E = 1.4426950408889634;
enum { WORKGROUPS_PER_UNIT = 8, MAX_CPU_STATES = 4096, SINGLE_SPLIT_LEAVES = 2, NODE_LEAVES = 1024, MAX_SPLITS = 128 };

static uint32_t ceil_div(uint32_t a, uint32_t b) { return a / b + (a % b != 0); }
static uint32_t least(uint32_t a, uint32_t b) { return a < b ? a : b; }
static uint32_t most(uint32_t a, uint32_t b) { return a > b ? a : b; }

/* --- the layout -------------------------------------------------------------------------------------- */

/* The keys [first, limit) that a query row sees. A row before the sequence's first token sees none. */
struct seen {
    uint32_t first, limit;
};

static struct seen keys_of(const struct za_call *call, uint32_t row) {
    uint32_t behind = call->tokens + 1 + row > call->q_len ? call->tokens + 1 + row - call->q_len : 0; /* its own */
    uint32_t first = call->window && behind > call->window ? behind - call->window : 0;
    return (struct seen){first, call->noncausal ? call->tokens : behind};
}

/* The manifest's split_rule.first_that_holds. Any other layout gives the same bits. */
static void split_rule(const struct manifest *m, const struct shape *shape, uint32_t leaves, uint32_t q_len, bool cpu,
                       struct layout *layout) {
    uint32_t nodes = ceil_div(leaves, m->node);
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
static bool item_leaves(const struct layout *l, const struct manifest *m, uint32_t tokens, struct seen seen,
                        uint32_t i, uint32_t *begin, uint32_t *end) {
    uint32_t unit_keys = m->leaf * l->leaves_per_state, last = ceil_div(seen.limit, m->leaf);
    if (l->single_pass) last = most(last, 1); /* a row that sees no key has the empty state */
    *begin = i ? ceil_div(boundary(l, m, tokens, i), unit_keys) * l->leaves_per_state : l->first_leaf;
    *begin = most(*begin, seen.first / m->leaf);
    *end = least(ceil_div(boundary(l, m, tokens, i + 1), unit_keys) * l->leaves_per_state, last);
    return *begin < *end;
}

struct layout za_layout(const struct manifest *m, const struct shape *shape, const struct za_call *call, bool cpu) {
    struct layout l = {.begin = keys_of(call, 0).first, .fixed = call->splits != 0, .leaves_per_state = 1};
    l.first_leaf = l.begin / m->leaf;
    uint32_t leaves = ceil_div(call->tokens, m->leaf) - l.first_leaf, begin, end;
    if (l.fixed) {
        l.splits = call->splits;
        if ((call->tokens - l.begin) / l.splits >= m->leaf * m->node) l.leaves_per_state = m->node;
    } else {
        split_rule(m, shape, leaves, call->q_len, cpu, &l);
    }
    l.units = ceil_div(leaves, l.leaves_per_state);
    l.first_unit = l.begin / (m->leaf * l.leaves_per_state);
    l.states_per_row = ceil_div(call->tokens, m->leaf * l.leaves_per_state) - l.first_unit;
    l.single_pass = l.states_per_row == 1;
    for (uint32_t row = 0; row < call->q_len; ++row) {
        for (uint32_t i = 0; i < l.splits; ++i) {
            if (!item_leaves(&l, m, call->tokens, keys_of(call, row), i, &begin, &end)) continue;
            ++l.items;
            l.loop = l.loop || end - begin > 1;
        }
    }
    return l;
}

/* --- the words --------------------------------------------------------------------------------------- */

/* Words where the parts of a call's work buffer begin. */
struct parts {
    uint64_t rows, appends, pages, sinks, alibi, scales, mask, end;
};

static struct parts parts_of(const struct manifest *m, const struct shape *shape, const struct za_call *call,
                             const struct layout *layout) {
    struct parts at;
    at.rows = m->work.header_words + (uint64_t)layout->items * m->work.item_words;
    at.appends = at.rows + (uint64_t)call->q_len * m->work.row_words;
    at.pages = at.appends + (uint64_t)call->new_rows * m->work.append_words;
    at.sinks = at.pages + ceil_div(call->tokens, shape->page_size);
    at.alibi = at.sinks + (call->sinks && call->q_len ? shape->q_heads : 0);
    at.scales = at.alibi + (call->alibi && call->q_len ? shape->q_heads : 0);
    at.mask = at.scales + (call->q_len ? shape->scale_words : 0);
    at.end = at.mask + (uint64_t)call->q_len * call->mask_keys;
    return at;
}

uint64_t za_work_words(const struct manifest *m, const struct shape *shape, const struct za_call *call,
                       const struct layout *layout) {
    return parts_of(m, shape, call, layout).end;
}

static void write_float(uint32_t *word, double value) {
    float rounded = (float)value;
    memcpy(word, &rounded, sizeof rounded);
}

static void write_header(const struct manifest *m, const struct shape *shape, const struct za_call *call,
                         const struct layout *layout, uint32_t first_page, const struct parts *parts, uint32_t *work) {
    const struct work_layout *at = &m->work;
    uint32_t shift = 0;
    while (shape->page_tiles >> shift > 1) ++shift;
    work[at->header.q_heads] = shape->q_heads;
    work[at->header.kv_heads] = work[at->header.row_kv_heads] = shape->kv_heads;
    work[at->header.group] = shape->group;
    work[at->header.page_shift] = shift;
    work[at->header.page_tiles] = shape->page_tiles;
    work[at->header.first_page] = first_page;
    work[at->header.rows] = call->q_len;
    work[at->header.row_table] = (uint32_t)parts->rows;
    work[at->header.append_table] = (uint32_t)parts->appends;
    work[at->header.state_stride] = call->q_len * layout->states_per_row;
    work[at->header.single_pass] = layout->single_pass;
    /* the product in double, rounded once */
    write_float(&work[at->header.score_scale], call->softcap != 0 ? call->scale : call->scale * LOG2E);
    if (call->softcap != 0) {
        write_float(&work[at->header.softcap], call->softcap);
        write_float(&work[at->header.softcap_inverse], 1.0 / (double)(float)call->softcap);
    }
    if (parts->alibi > parts->sinks) work[at->header.sink_table] = (uint32_t)parts->sinks;
    if (parts->scales > parts->alibi) work[at->header.alibi_table] = (uint32_t)parts->alibi;
    if (parts->mask > parts->scales) work[at->header.scale_table] = (uint32_t)parts->scales;
}

/* Item and row records of every query row. Rows of a split are neighbors: a GPU's caches hold its keys for all. */
static void write_rows(const struct manifest *m, const struct za_call *call, const struct layout *l,
                       const struct parts *parts, uint32_t *work) {
    const struct work_layout *at = &m->work;
    uint32_t unit_keys = m->leaf * l->leaves_per_state, begin, end;
    uint32_t *item = work + at->header_words, *record = work + parts->rows;
    for (uint32_t i = 0; i < l->splits; ++i) {
        for (uint32_t row = 0; row < call->q_len; ++row) {
            struct seen seen = keys_of(call, row);
            if (!item_leaves(l, m, call->tokens, seen, i, &begin, &end)) continue;
            item[at->item.row] = row;
            item[at->item.first] = seen.first;
            item[at->item.limit] = seen.limit;
            item[at->item.leaf_begin] = begin;
            item[at->item.leaf_end] = end;
            item[at->item.rows] = 1;
            item[at->item.page_table] = (uint32_t)parts->pages;
            item[at->item.leaves_per_state] = l->leaves_per_state;
            item += at->item_words;
        }
    }
    for (uint32_t row = 0; row < call->q_len; ++row, record += at->row_words) {
        struct seen seen = keys_of(call, row);
        uint32_t unit = seen.first / unit_keys, units = ceil_div(seen.limit, unit_keys);
        record[at->row.state] = row * l->states_per_row + unit - l->first_unit;
        record[at->row.count] = units > unit ? units - unit : 0;
        record[at->row.unit] = unit;
        record[at->row.leaves_per_state] = l->leaves_per_state;
        record[at->row.position] = call->tokens + row - call->q_len; /* an int32 */
        if (!call->mask_keys) continue;
        record[at->row.mask] = (uint32_t)(parts->mask + (uint64_t)row * call->mask_keys);
        record[at->row.mask_begin] = call->tokens - call->mask_keys;
        record[at->row.mask_end] = call->tokens;
    }
}

/* What the heads and the rows have: sinks, slopes, scales, masks. */
static void write_tables(const struct manifest *m, const struct za_call *call, const struct parts *parts,
                         const float *scales, uint32_t *work) {
    for (uint64_t i = parts->sinks; i < parts->alibi; ++i) {
        float sink = za_flushed(m->min_input, call->sinks[i - parts->sinks]) * (float)LOG2E; /* in float */
        memcpy(&work[i], &sink, sizeof sink);
    }
    for (uint64_t i = parts->alibi; i < parts->scales; ++i) /* in double, rounded once */
        write_float(&work[i], (double)call->alibi[i - parts->alibi] * LOG2E);
    for (uint64_t i = parts->scales; i < parts->mask; ++i)
        write_float(&work[i], (double)scales[i - parts->scales] * za_storage_limits.fp8_unit);
    if (parts->end > parts->mask) memcpy(&work[parts->mask], call->mask, 4 * (size_t)(parts->end - parts->mask));
}

void za_work_write(const struct manifest *m, const struct shape *shape, const struct za_call *call,
                   const struct layout *layout, uint32_t first_page, const float *scales, uint32_t *work) {
    const struct work_layout *at = &m->work;
    struct parts parts = parts_of(m, shape, call, layout);
    memset(work, 0, 4 * (size_t)parts.end);
    write_header(m, shape, call, layout, first_page, &parts, work);
    write_rows(m, call, layout, &parts, work);
    for (uint32_t i = 0; i < call->new_rows; ++i) {
        uint32_t *record = work + parts.appends + (size_t)i * at->append_words;
        record[at->append.position] = call->tokens - call->new_rows + i;
        record[at->append.page_table] = (uint32_t)parts.pages;
    }
    for (uint64_t i = parts.pages; i < parts.sinks; ++i) work[i] = call->page_table[i - parts.pages];
    write_tables(m, call, &parts, scales, work);
}

uint64_t za_copy_words(const struct manifest *m, uint32_t pairs) {
    return m->work.header_words + (uint64_t)pairs * m->work.copy_words;
}

void za_copy_write(const struct manifest *m, uint32_t source, uint32_t target, uint32_t step, uint32_t pairs,
                   uint32_t *work) {
    memset(work, 0, 4 * (size_t)za_copy_words(m, pairs));
    work[m->work.header.append_table] = m->work.header_words;
    for (uint32_t i = 0; i < pairs; ++i) {
        uint32_t *record = work + m->work.header_words + (size_t)i * m->work.copy_words;
        record[m->work.copy.source] = source + i * step;
        record[m->work.copy.target] = target + i * step;
    }
}
