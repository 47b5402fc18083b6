/* Which commands wait for which. A command waits for those before it that write what it reads or writes, or that read
   what it writes. Its level is one more than the highest of theirs: commands of a level run beside each other, and a
   barrier separates two levels. The twin in Python is `levels` of zinc_attn/runtime/vulkan/commands.py. */
#pragma once
#include "objects.h"

/* What commands have read and written, by buffer, since the last clear; last: the level of the last command. */
struct levels {
    struct accesses *all; /* (count), with room for more */
    uint32_t count, room, last, turn;
};

/* Set the command's level, `least` or higher, and what it waits for; note what it reads and writes. */
bool za_level(struct levels *levels, struct za_command *command, uint32_t least);
void za_levels_clear(struct levels *levels);
void za_levels_free(struct levels *levels);
