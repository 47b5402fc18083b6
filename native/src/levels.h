/* The levels of commands. A command waits for an earlier command if one of the two writes bytes that the other reads or
   writes. Its level is one more than the highest level of the commands for which it waits. Commands of the same level
   may run at the same time, and a barrier separates two levels. Python's twin is `levels` of
   zinc_attn/runtime/vulkan/commands.py. */
#pragma once
#include "objects.h"

/* The reads and writes of commands since the last clear, by buffer. last: the level of the last command. */
struct levels {
    struct accesses *all; /* (count), with room for more */
    uint32_t count, room, last, turn;
};

/* Set the command's level, `least` or higher, and the command that it waits for; note its reads and writes. */
bool za_level(struct levels *levels, struct za_command *command, uint32_t least);
void za_levels_clear(struct levels *levels);
void za_levels_free(struct levels *levels);
