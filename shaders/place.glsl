// Which wave of its workgroup an invocation belongs to, and which lane of it.

// To lane, and in NODE to member and own.
#if NODE
// Subgroups of 32 are the waves, whichever invocations a driver puts into them, and a number that a subgroup has in
// common keeps what follows from it in scalar registers.  The remainders change nothing; they tell a compiler what can
// be.
void find_place() {
    bool waves = gl_SubgroupSize == WAVE;
    member = (waves ? gl_SubgroupID : gl_LocalInvocationID.y) % MEMBERS;
    lane = (waves ? gl_SubgroupInvocationID : gl_LocalInvocationID.x) % WAVE;
    own = member * WAVE_WEIGHTS;
}
#else
// lavapipe, the one driver with smaller waves, makes gl_LocalInvocationID by a division for each use, but its
// subgroups, all of them full, have their numbers at hand.
void find_place() {
    lane = gl_LocalInvocationID.x;
    if (LANES < WAVE && gl_SubgroupSize <= LANES) {
        lane = (gl_SubgroupID * gl_SubgroupSize + gl_SubgroupInvocationID) % LANES;
    }
}
#endif
