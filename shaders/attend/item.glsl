// The workgroup's work item: which query vectors (row and head) it serves, and which keys they see.

struct Item {
    uint row;         // query row; with ROWS > 1 the first row
    uint last_row;
    uint first;       // the row sees keys [first, limit)
    uint limit;
    uint node_begin;  // nodes [node_begin, node_end)
    uint node_end;
    uint page_table;  // word of the work buffer
    uint key_shift;   // position of a key = its number in the sequence + key_shift
    uint row_step;    // attend_matrix: first and limit are the last row's, and grow by this from row to row
};

struct Leaf {
    uint index;  // keys 64 index ... 64 index + 63
    uint begin;  // the row sees keys [begin, end) of the leaf, none where begin >= end
    uint end;
};

Item read_item() {
    uint record = HEADER_WORDS + gl_WorkGroupID.y * ITEM_WORDS;
    uint row = work[record + ITEM_ROW], last_row = row + work[record + ITEM_ROWS] - 1u;
    return Item(row, last_row, work[record + ITEM_FIRST], work[record + ITEM_LIMIT], work[record + ITEM_NODE_BEGIN],
                work[record + ITEM_NODE_END], work[record + ITEM_PAGE_TABLE], work[record + ITEM_KEY_SHIFT],
                work[record + ITEM_ROW_STEP]);
}

Leaf leaf_of(Item item, uint index) {
    uint first_key = index * KEYS_PER_LEAF;
    return Leaf(index, max(item.first, first_key) - first_key,
                min(max(item.limit, first_key) - first_key, KEYS_PER_LEAF));
}

bool has_keys(Leaf leaf) {
    return leaf.begin < leaf.end;
}

// A workgroup serves VECTORS query vectors: ROW_HEADS query heads of each of its ROWS query rows.
const uint ROW_HEADS = VECTORS / ROWS;

// First query head of the workgroup. The last share of a group begins early enough to be full: its first
// repeated_heads() heads belong to the share before, too, which writes them. With ROWS > 1 a group is one share.
uint first_head() {
    uint group = work[HEADER_GROUP];
    return (work[HEADER_KV_FIRST] + gl_WorkGroupID.z) * group + min(gl_WorkGroupID.x * VECTORS, group - VECTORS);
}

uint repeated_heads() {
    return max(gl_WorkGroupID.x * VECTORS + VECTORS, work[HEADER_GROUP]) - work[HEADER_GROUP];
}

// (query row, query head) of the workgroup's vector h. Vectors after the item's last row repeat that row.
uvec2 vector_of(Item item, uint h) {
    if (ROWS == 1u) {
        return uvec2(item.row, first_head() + h);
    }
    return uvec2(min(item.row + h / ROW_HEADS, item.last_row), first_head() + h % ROW_HEADS);
}

// Whether this workgroup writes the results of vector h, so that every vector is written once.
bool is_mine(Item item, uint h) {
    return ROWS == 1u ? h >= repeated_heads() : item.row + h / ROW_HEADS <= item.last_row;
}

// Number, in the scratch tensor, of the state that query row `row` has for a node.
uint state_of(uint row, uint node) {
    uint record = work[HEADER_ROW_TABLE] + row * ROW_WORDS;
    return work[record + ROW_STATE] + node - work[record + ROW_NODE];
}
