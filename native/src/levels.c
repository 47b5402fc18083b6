#include "levels.h"

#include <stdlib.h>
#include <string.h>

#include "error.h"

/* Bytes that a command reads or writes. most: the highest level of this range and all ranges before it in the list.
   turn: of the command. An independent command has the turn of the command before it, any other command the next. */
struct range {
    VkDeviceSize begin, end;
    const struct kernel *kernel;
    uint32_t level, most, turn;
};

struct accesses { /* of a buffer */
    VkBuffer buffer;
    struct ranges {
        struct range *all; /* (count), with room for more */
        uint32_t count, room;
    } reads, writes;
};

/* An array of `count` elements of `bytes` bytes, with room for another element, or NULL. New elements are zeros. */
static void *grown(void *all, uint32_t count, uint32_t *room, size_t bytes) {
    if (count < *room) return all;
    const uint32_t more = 2 * *room + 16;
    char *larger = realloc(all, more * bytes);
    if (!larger) return za_no_memory(), NULL;
    memset(larger + *room * bytes, 0, (more - *room) * bytes);
    *room = more;
    return larger;
}

static struct accesses *accesses_of(struct levels *levels, VkBuffer buffer) {
    for (uint32_t i = 0; i < levels->count; ++i)
        if (levels->all[i].buffer == buffer) return &levels->all[i];
    struct accesses *all = grown(levels->all, levels->count, &levels->room, sizeof *all);
    if (!all) return NULL;
    levels->all = all;
    all[levels->count].buffer = buffer;
    return &all[levels->count++];
}

/* Raise the command's level above the levels of the ranges of other turns that overlap the place. */
static void wait_for(struct za_command *command, const struct za_place *place, const struct ranges *ranges,
                     uint32_t turn) {
    const VkDeviceSize begin = place->offset, end = begin + place->size;
    for (uint32_t i = ranges->count; i-- > 0 && ranges->all[i].most >= command->level;) {
        const struct range *r = &ranges->all[i];
        if (r->end <= begin || end <= r->begin || r->level < command->level || r->turn == turn) continue;
        const VkDeviceSize first = za_max(r->begin, begin);
        command->level = r->level + 1;
        command->awaited = r->kernel;
        command->met = (struct za_place){place->buffer, first, za_min(r->end, end) - first};
    }
}

static bool note(const struct za_command *command, const struct za_place *place, struct ranges *ranges, uint32_t turn) {
    struct range *all = grown(ranges->all, ranges->count, &ranges->room, sizeof *all);
    if (!all) return false;
    ranges->all = all;
    const uint32_t before = ranges->count ? all[ranges->count - 1].most : 0;
    const uint32_t most = command->level > before ? command->level : before;
    all[ranges->count++] = (struct range){place->offset, place->offset + place->size, command->kernel,
                                          command->level, most, turn};
    return true;
}

bool za_level(struct levels *levels, struct za_command *command, uint32_t least) {
    const struct kernel *kernel = command->kernel;
    command->level = command->independent ? levels->last : least;
    command->awaited = NULL;
    if (!command->independent) ++levels->turn;
    /* The higher the level is already, the fewer ranges are searched. So operands come before results, the first
       operand, which often was made last, before the others. */
    for (uint32_t is_write = 0; is_write < 2; ++is_write)
        for (uint32_t i = 0; i < kernel->bindings; ++i) {
            if ((kernel->written >> i & 1) != is_write) continue;
            const struct accesses *accesses = accesses_of(levels, command->place[i].buffer);
            if (!accesses) return false;
            wait_for(command, &command->place[i], &accesses->writes, levels->turn);
            if (is_write) wait_for(command, &command->place[i], &accesses->reads, levels->turn);
        }
    for (uint32_t i = 0; i < kernel->bindings; ++i) {
        struct accesses *accesses = accesses_of(levels, command->place[i].buffer);
        if (!note(command, &command->place[i], kernel->written >> i & 1 ? &accesses->writes : &accesses->reads,
                  levels->turn))
            return false;
    }
    levels->last = command->level;
    return true;
}

void za_levels_clear(struct levels *levels) {
    for (uint32_t i = 0; i < levels->count; ++i) levels->all[i].reads.count = levels->all[i].writes.count = 0;
    levels->count = levels->last = 0;
}

void za_levels_free(struct levels *levels) {
    for (uint32_t i = 0; i < levels->room; ++i) {
        free(levels->all[i].reads.all);
        free(levels->all[i].writes.all);
    }
    free(levels->all);
    *levels = (struct levels){0};
}
