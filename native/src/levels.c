#include "levels.h"

#include <stdlib.h>

#include "error.h"

/* Bytes that a command reads or writes; most: the highest level of this one and all before it. */
struct range {
    const struct kernel *kernel;
    struct za_place place;
    uint32_t level, most;
};

/* Raise the command's level above that of the ranges that meet the place. */
static void wait_for(struct za_command *command, const struct za_place *place, const struct ranges *ranges) {
    for (uint32_t i = ranges->before; i-- > 0 && ranges->all[i].most >= command->level;) {
        const struct range *r = &ranges->all[i];
        if (r->place.buffer != place->buffer || r->level < command->level) continue;
        const uint64_t begin = za_max(r->place.offset, place->offset);
        const uint64_t end = za_min(r->place.offset + r->place.size, place->offset + place->size);
        if (begin >= end) continue;
        command->level = r->level + 1;
        command->behind = r->kernel;
        command->met = (struct za_place){place->buffer, begin, end - begin};
    }
}

static bool note(const struct za_command *command, const struct za_place *place, struct ranges *ranges) {
    if (ranges->count == ranges->room) {
        const uint32_t room = 2 * ranges->room + 16;
        struct range *grown = realloc(ranges->all, room * sizeof *grown);
        if (!grown) return za_no_memory();
        *ranges = (struct ranges){grown, ranges->count, room, ranges->before};
    }
    const uint32_t before = ranges->count ? ranges->all[ranges->count - 1].most : 0;
    const uint32_t most = command->level > before ? command->level : before;
    ranges->all[ranges->count++] = (struct range){command->kernel, *place, command->level, most};
    return true;
}

bool za_level(struct levels *levels, struct za_command *command, uint32_t least) {
    const struct kernel *kernel = command->kernel;
    bool ok = true;
    command->level = command->beside ? levels->last : least;
    command->behind = NULL;
    if (!command->beside) levels->read.before = levels->read.count, levels->written.before = levels->written.count;
    /* The higher the level, the fewer ranges are looked at: activations come first, then parameters, then results. */
    for (uint32_t i = kernel->bindings; i-- > 0;)
        if (!(kernel->written >> i & 1)) wait_for(command, &command->place[i], &levels->written);
    for (uint32_t i = 0; i < kernel->bindings; ++i) {
        if (!(kernel->written >> i & 1)) continue;
        wait_for(command, &command->place[i], &levels->written);
        wait_for(command, &command->place[i], &levels->read);
    }
    for (uint32_t i = 0; i < kernel->bindings && ok; ++i)
        ok = note(command, &command->place[i], kernel->written >> i & 1 ? &levels->written : &levels->read);
    levels->last = command->level;
    return ok;
}

void za_levels_clear(struct levels *levels) {
    levels->last = levels->read.count = levels->read.before = levels->written.count = levels->written.before = 0;
}

void za_levels_free(struct levels *levels) {
    free(levels->read.all);
    free(levels->written.all);
    *levels = (struct levels){0};
}
