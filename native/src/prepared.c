/* Calls that are recorded into the host's command buffers, and whose words change from step to step. */
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "error.h"
#include "record.h"

enum { MAX_SLOTS = 64 };

struct za_prepared {
    struct za_attn *attn;
    struct za_room room;
    struct laid laid; /* the layout of the room */
    struct buffer work, states;   /* work: (slots, words of a slot); states: shared, as submissions run in order */
    struct buffer filled, result; /* if the host's places need them */
    VkDeviceSize slot_bytes;
    struct sets sets[MAX_SLOTS]; /* of each slot's recordings */
    uint64_t recorded;           /* slots that have recordings, a bit for each */
    uint32_t pages[MAX_SLOTS];   /* pages of the smallest cache in a slot's recordings */
    struct layer layer;          /* steps and scales, which all recorded layers share */
    float *scales;               /* (2, kv_heads): the memory of layer.scales */
};

/* --- the room ---------------------------------------------------------------------------------------- */

static bool check_room(const struct za_attn *attn, struct za_room *room) {
    const struct shape *shape = &attn->shape;
    const uint32_t most = MAX_CONTEXT;
    if (!room->slots || room->slots > MAX_SLOTS)
        return za_fail("room.slots: got %u, expected 1 to %d", room->slots, MAX_SLOTS);
    if (!room->requests || room->requests > most || !room->tokens || room->tokens > most || room->rows > most ||
        room->new_rows > most || room->mask_keys > room->tokens || (room->mask_slopes && !room->mask_keys))
        return za_fail("room: got %u requests of %u tokens, %u rows, %u new rows and masks of %u keys%s, expected 1 to "
                       "%u requests and tokens, at most %u rows, and masks of at most the tokens, with mask_slopes of "
                       "1 at least", room->requests, room->tokens, room->rows, room->new_rows, room->mask_keys,
                       room->mask_slopes ? " with mask_slopes" : "", most, most);
    uint64_t pages = (uint64_t)za_ceil_div(room->tokens, shape->page_size) * room->requests;
    if (!room->pages && pages > UINT32_MAX) return za_fail("room.pages: got 0, expected a number for so many requests");
    if (!room->pages) room->pages = (uint32_t)pages;
    return true;
}

/* Lay out the room by its longest request. No row of a step has more splits or states than a row of this request. */
static bool lay_out(struct za_prepared *p) {
    struct za_attn *attn = p->attn;
    const struct za_room *room = &p->room;
    uint32_t most = attn->device->properties.limits.maxComputeWorkGroupCount[1];
    uint32_t each = za_ceil_div(room->rows, room->requests);
    const struct za_request longest = {.tokens = room->tokens, .q_len = each ? each : 1};
    const struct za_call call = {.requests = 1, .request = &longest};
    struct layout l = za_layout(&attn->shape, &call, &longest, p->laid.rule);
    p->laid.rule.fixed_splits = l.splits;
    if (room->rows && (uint64_t)l.splits * room->rows > most)
        p->laid.rule.fixed_splits = most / room->rows ? most / room->rows : 1;
    p->laid.counts = (struct counts){
        .items = (uint64_t)room->rows * p->laid.rule.fixed_splits,
        .rows = room->rows,
        .new_rows = room->new_rows,
        .pages = room->pages,
        .masks = (uint64_t)room->rows * room->mask_keys,
        .states = (uint64_t)room->rows * l.nodes,
        .walks = p->laid.rule.fixed_splits < l.nodes,
        .lse = true,
    };
    for (int i = 0; i < BIASES; ++i)
        p->laid.counts.biases |= (uint32_t)*(const bool *)((const char *)room + za_biases[i].room) << i;
    za_lay_counts(attn, room->softcap, &p->laid);
    return za_check_counts(attn->device, &p->laid.counts, &p->laid.parts);
}

static const struct za_call NO_REQUESTS;

static uint32_t *words_of(const struct za_prepared *p, uint32_t slot) {
    return (uint32_t *)(void *)((char *)p->work.mapped + slot * p->slot_bytes);
}

static void write_words(const struct za_prepared *p, uint32_t slot, const struct za_call *call) {
    za_work_write(&p->attn->shape, call, p->laid.rule, &p->laid.counts, &p->layer, words_of(p, slot));
}

static bool make(struct za_prepared *p) {
    struct za_attn *attn = p->attn;
    struct za_device *device = attn->device;
    uint64_t unit = device->properties.limits.minStorageBufferOffsetAlignment;
    if (!check_room(attn, &p->room) || !lay_out(p)) return false;
    p->slot_bytes = (p->laid.work_bytes + unit - 1) / unit * unit;
    const uint64_t bytes = p->laid.states_bytes;
    if (!(p->scales = calloc(attn->shape.scale_words + 1, sizeof *p->scales))) return za_no_memory();
    if (!za_buffer_make(device, p->room.slots * p->slot_bytes, true, "work", &p->work) ||
        !za_buffer_make(device, bytes ? bytes : 256, false, "states", &p->states) ||
        !za_laid_pipelines(attn, &p->laid))
        return false;
    for (uint32_t slot = 0; slot < p->room.slots; ++slot) write_words(p, slot, &NO_REQUESTS);
    return true;
}

struct za_prepared *za_prepare(struct za_attn *attn, const struct za_room *room) {
    if (!za_not_null("attn", attn) || !za_not_null("room", room) || !za_enter(attn->device)) return NULL;
    struct za_prepared *p = calloc(1, sizeof *p);
    if (p) p->attn = attn, p->room = *room, ++attn->prepared;
    if (za_leave(attn->device, p ? make(p) : za_no_memory())) return p;
    za_prepared_free(p);
    return NULL;
}

void za_prepared_free(struct za_prepared *p) {
    if (!p) return;
    struct za_device *device = p->attn->device;
    --p->attn->prepared;
    struct buffer *const buffers[] = {&p->work, &p->states, &p->filled, &p->result};
    for (int i = 0; i < 4; ++i) za_buffer_free(device, buffers[i]);
    for (int i = 0; i < MAX_SLOTS; ++i) za_sets_free(device, &p->sets[i]);
    free(p->scales);
    free(p);
}

/* --- recordings -------------------------------------------------------------------------------------- */

static bool check_slot(const struct za_prepared *p, uint32_t slot) {
    return slot < p->room.slots || za_fail("slot: got %u, expected one below %u", slot, p->room.slots);
}

/* The layer's part of K (or V), which begins at the layer's page 0. */
static bool part_of(const struct za_cache *cache, bool of_v, uint32_t layer, struct za_place *of_layer) {
    VkDeviceSize unit = cache->attn->device->properties.limits.minStorageBufferOffsetAlignment;
    struct za_place place = of_v ? cache->v : cache->k;
    place.offset += (VkDeviceSize)layer * cache->stride * za_page_step(cache, of_v);
    place.size = za_pages_bytes(cache, of_v, cache->pages);
    *of_layer = place;
    return place.offset % unit == 0 ||
           za_fail("%s: got layer %u at offset %llu, expected a multiple of %llu; make a cache of one layer at each "
                   "layer's place", of_v ? "v" : "k", layer, (unsigned long long)place.offset,
                   (unsigned long long)unit);
}

/* All layers of a prepared call have the same words, the scales of heads among them. */
static bool check_layer(const struct za_prepared *p, struct layer layer, uint32_t number) {
    size_t bytes = 4 * (size_t)p->attn->shape.scale_words;
    if (p->recorded && layer.scales && memcmp(p->scales, layer.scales, bytes) != 0)
        return za_fail("layer: got %u, whose heads have other scales than those of a layer that was recorded before, "
                       "expected equal ones; prepare a call for each", number);
    if (p->recorded && memcmp(&p->layer.steps, &layer.steps, sizeof layer.steps) != 0)
        return za_fail("cache: got token_rows %u and head_rows %u, expected %u and %u, as in a cache that was recorded "
                       "before; prepare a call for each", layer.steps.token, layer.steps.head, p->layer.steps.token,
                       p->layer.steps.head);
    return true;
}

static void take_layer(struct za_prepared *p, uint32_t slot, struct layer layer, uint32_t pages) {
    if (layer.scales) memcpy(p->scales, layer.scales, 4 * (size_t)p->attn->shape.scale_words);
    p->layer.steps = layer.steps;
    p->layer.scales = layer.scales ? p->scales : NULL;
    if (!(p->recorded >> slot & 1) || pages < p->pages[slot]) p->pages[slot] = pages;
    p->recorded |= UINT64_C(1) << slot;
}

static bool need(struct za_device *device, bool wanted, uint64_t bytes, const char *name, struct buffer *buffer) {
    return !wanted || buffer->handle || za_buffer_make(device, bytes, false, name, buffer);
}

static bool record(struct za_prepared *p, uint32_t slot, VkCommandBuffer commands, struct za_cache *cache,
                   uint32_t layer, const struct za_places *places) {
    struct za_attn *attn = p->attn;
    uint64_t rows = p->laid.counts.rows, new_rows = p->laid.counts.new_rows;
    bool filled, result;
    if (!check_slot(p, slot)) return false;
    if (!commands) return za_fail("commands: got NULL, expected a command buffer");
    if (cache->attn != attn) return za_fail("cache: got one of another za_attn, expected one of the prepared call's");
    if (layer >= cache->layers) return za_fail("layer: got %u, expected one below %u", layer, cache->layers);
    if (!za_check_places(cache, places, rows, new_rows, &filled, &result)) return false;
    struct bindings b = za_bound(attn, places, rows, new_rows);
    const struct layer layer_words = za_layer_of(cache, layer);
    if (!part_of(cache, false, layer, &b.k) || !part_of(cache, true, layer, &b.v) ||
        !need(attn->device, filled && rows, b.q.size, "q", &p->filled) ||
        !need(attn->device, result && rows, b.out.size, "out", &p->result) || !check_layer(p, layer_words, layer))
        return false;
    if (filled) b.q = za_whole(&p->filled);
    if (result) b.out = za_whole(&p->result);
    b.work = (struct za_place){p->work.handle, slot * p->slot_bytes, p->laid.work_bytes};
    b.states = za_whole(&p->states);
    if (!za_record_call(attn, commands, &p->sets[slot], &p->laid, &b, places)) return false;
    take_layer(p, slot, layer_words, cache->pages);
    return true;
}

bool za_record(struct za_prepared *prepared, uint32_t slot, VkCommandBuffer commands, struct za_cache *cache,
               uint32_t layer, const struct za_places *places) {
    return za_not_null("prepared", prepared) && za_not_null("cache", cache) && za_not_null("places", places) &&
           za_within(prepared->attn->device, record(prepared, slot, commands, cache, layer, places));
}

static bool reset(struct za_prepared *p, uint32_t slot) {
    if (!check_slot(p, slot) || !za_sets_reset(p->attn->device, &p->sets[slot])) return false;
    write_words(p, slot, &NO_REQUESTS);
    p->recorded &= ~(UINT64_C(1) << slot);
    return true;
}

bool za_reset(struct za_prepared *prepared, uint32_t slot) {
    return za_not_null("prepared", prepared) && za_within(prepared->attn->device, reset(prepared, slot));
}

/* --- steps ------------------------------------------------------------------------------------------- */

static bool step(struct za_prepared *p, uint32_t slot, const struct za_call *call) {
    if (!check_slot(p, slot)) return false;
    if (!(p->recorded >> slot & 1))
        return za_fail("slot: got %u, but no layer is recorded for it; record first, because a step is checked against "
                       "the recorded caches", slot);
    if (!za_check_call(&p->attn->shape, call, p->pages[slot]) ||
        !za_check_step(&p->room, &p->laid.counts, &p->attn->shape, call))
        return false;
    write_words(p, slot, call);
    return true;
}

bool za_step(struct za_prepared *prepared, uint32_t slot, const struct za_call *call) {
    return za_not_null("prepared", prepared) && za_not_null("call", call) &&
           za_within(prepared->attn->device, step(prepared, slot, call));
}
