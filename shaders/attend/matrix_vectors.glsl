// The places of query vectors in the workgroup, of strips in its subgroups, and of keys in shared memory.

struct Vector {
    uint row;   // query row
    uint head;  // query head
    bool real;  // false after the item's last vector
    int first;  // the vector sees keys [first, limit)
    int limit;
};

// Vector `t` of the workgroup. The item has first and limit of its last row, and they grow by row_step from row to row.
Vector vector_at(Item item, uint t) {
    uint group = work[HEADER_GROUP], index = gl_WorkGroupID.x * VECTORS + t;
    uint row = min(item.row + index / group, item.last_row);
    int before = int((item.last_row - row) * item.row_step);
    return Vector(row, (work[HEADER_KV_FIRST] + gl_WorkGroupID.z) * group + index % group,
                  index < (item.last_row - item.row + 1u) * group, int(item.first) - before, int(item.limit) - before);
}

// Whether the subgroup has a strip; below its strip's number, and its own number among the strip's waves. If subgroups
// are smaller than waves, subgroups from STRIPS * STRIP_WAVES on have none. If all have a strip, there is no branch, so
// that compilers do not move loads to their use.
bool has_strip() {
    return WAVES == 1u || gl_SubgroupID < STRIPS * STRIP_WAVES;
}

uint strip() {
    return gl_SubgroupID / STRIP_WAVES;
}

uint wave_of_strip() {
    return gl_SubgroupID % STRIP_WAVES;
}

// Where a key of a leaf lies in kv_rows and s_rows. Keys with the same remainder mod 4 are neighbors, because the
// canonical reduction sums their weights together.
uint row_of(uint key) {
    return key % WEIGHT_PARTIALS * PARTIAL_KEYS + key / WEIGHT_PARTIALS;
}

uint key_of(uint row) {
    return row % PARTIAL_KEYS * WEIGHT_PARTIALS + row / PARTIAL_KEYS;
}
