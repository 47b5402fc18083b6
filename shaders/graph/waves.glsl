// y = w x for few rows of x, by waves of 32 lanes: a lane owns a row of w.
//
// A workgroup has a group of 32 rows of w and COLUMNS rows of x, and its waves share the superblocks of a row. A lone
// wave adds superblocks as it makes them. Several waves put SUPERBLOCKS sums at a time into shared memory, and then add
// them in ascending order. A wave loads AHEAD superblocks, WAVES apart, before it adds them. If fewer
// are left, it loads past the end and does not add what lies there.

const uint WAVES = gl_WorkGroupSize.x / 32u;
const uint OWN_COLUMNS = (COLUMNS + WAVES - 1u) / WAVES;  // columns whose superblocks a wave adds
shared float sums[WAVES > 1u ? SUPERBLOCKS * COLUMNS * 32u : GLU > 0u ? COLUMNS * 32u : 1u];
uint wave, lane;

// Number, in the workgroup, of the lane's column i. The last columns may not exist.
uint column_of_lane(uint i) {
    return i * WAVES + wave;
}

// The kernel defines these functions: load_superblock loads the superblock `superblock` as the wave's n-th, and
// add_superblock makes its sum for each column.
void load_superblock(uint n);
void add_superblock(uint n, out float sum[COLUMNS]);

void find_wave() {
    bool whole = SUBGROUPS != 0u && gl_SubgroupSize == 32u;
    wave = (whole ? gl_SubgroupID : gl_LocalInvocationID.x / 32u) % WAVES;
    lane = whole ? gl_SubgroupInvocationID : gl_LocalInvocationID.x % 32u;
}

// Superblock s of a round joins a lone wave's sums, or waits in shared memory.
void keep(uint s, float sum[COLUMNS], inout float total[COLUMNS]) {
    [[unroll]] for (uint n = 0u; n < COLUMNS; ++n) {
        if (WAVES == 1u) {
            total[n] = add(total[n], sum[n]);
        } else {
            sums[(s * COLUMNS + n) * 32u + lane] = sum[n];
        }
    }
}

// To total: the sums of all superblocks of the lane's OWN_COLUMNS columns.
void add_superblocks(uint count, out float total[COLUMNS]) {
    float sum[COLUMNS];
    [[unroll]] for (uint n = 0u; n < COLUMNS; ++n) {
        total[n] = 0.0;
    }
    for (uint round = 0u; round < count; round += SUPERBLOCKS) {
        uint end = min(round + SUPERBLOCKS, count);
        for (superblock = round + wave; superblock < end; superblock += WAVES) {
            [[unroll]] for (uint n = 0u; n < AHEAD; ++n, superblock += WAVES) {
                load_superblock(n);
            }
            superblock -= AHEAD * WAVES;
            add_superblock(0u, sum);
            keep(superblock - round, sum, total);
            [[unroll]] for (uint n = 1u; n < AHEAD; ++n) {
                if (superblock + WAVES < end) {
                    superblock += WAVES;
                    add_superblock(n, sum);
                    keep(superblock - round, sum, total);
                }
            }
        }
        if (WAVES > 1u) {
            barrier();
            [[unroll]] for (uint i = 0u; i < OWN_COLUMNS; ++i) {
                uint n = column_of_lane(i);
                for (uint s = 0u; n < COLUMNS && s < end - round; ++s) {
                    total[i] = add(total[i], sums[(s * COLUMNS + n) * 32u + lane]);
                }
            }
            barrier();
        }
    }
}

void store_columns(float total[COLUMNS]) {
    [[unroll]] for (uint i = 0u; i < OWN_COLUMNS; ++i) {
        if (column_of_lane(i) < COLUMNS) {
            store(gl_WorkGroupID.x * 32u + lane, gl_WorkGroupID.y * COLUMNS + column_of_lane(i), total[i]);
        }
    }
}
