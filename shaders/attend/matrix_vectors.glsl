// Who has what: query vectors of the workgroup, strips of subgroups, and rows of keys in shared memory.

struct Vector {
    uint row;   // query row
    uint head;  // query head
    bool real;  // false behind the item's last vector
    int first;  // it sees keys [first, limit)
    int limit;
};

// Vector `t` of the workgroup.  From row to row of an item first and limit grow by its step; it has the last row's.
Vector vector_at(Item item, uint t) {
    uint group = work[HEADER_GROUP], index = gl_WorkGroupID.x * VECTORS + t;
    uint row = min(item.row + index / group, item.last_row);
    int before = int((item.last_row - row) * item.row_step);
    return Vector(row, (work[HEADER_KV_FIRST] + gl_WorkGroupID.z) * group + index % group,
                  index < (item.last_row - item.row + 1u) * group, int(item.first) - before, int(item.limit) - before);
}

// The subgroup's strip, and which of the strip's waves it is.  Of smaller subgroups than waves those from
// STRIPS * STRIP_WAVES on have none.  Where all have one there is no branch, and compilers leave loads where they are
// begun.
bool has_strip() {
    return WAVES == 1u || gl_SubgroupID < STRIPS * STRIP_WAVES;
}

uint strip() {
    return gl_SubgroupID / STRIP_WAVES;
}

uint wave_of_strip() {
    return gl_SubgroupID % STRIP_WAVES;
}

// Where a key of a leaf lies in kv_rows and s_rows: keys that are the same mod 4, whose weights the canonical
// reduction sums together, are neighbors.
uint row_of(uint key) {
    return key % WEIGHT_PARTIALS * PARTIAL_KEYS + key / WEIGHT_PARTIALS;
}

uint key_of(uint row) {
    return row % PARTIAL_KEYS * WEIGHT_PARTIALS + row / PARTIAL_KEYS;
}
