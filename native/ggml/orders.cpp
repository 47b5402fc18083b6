#include "orders.h"

#include <algorithm>
#include <mutex>

namespace zinc {

// Threads that hold the turns of two devices share this struct. An order changes only after note_use of its buffer, so
// an order of another device stays as it is while a thread reads it. A thread that holds the mutex takes no other lock.
// The struct is never destroyed, because buffers may be freed while the process exits.
struct Saved {
    std::mutex mutex;
    SavedOrders orders{size_t(1) << 20};
};
static Saved &saved = *new Saved;

void note_use(const Buffer *buffer) {
    std::lock_guard<std::mutex> lock(saved.mutex);
    saved.orders.finish(buffer);
}

// The cells of a root, which are created on first use. NULL if the root is no cache.
static Cells *cells_of(const ggml_tensor *root) {
    if (!is_cache(root)) return nullptr;
    Buffer *buffer = buffer_of(root);
    const size_t row_bytes = ggml_row_size(root->type, root->ne[0]), rows = size_t(ggml_nrows(root));
    auto entry = buffer->cells.find(begin_of(root));
    Cells *known = entry == buffer->cells.end() ? nullptr : &entry->second;
    if (known && known->row_bytes == row_bytes && known->rows == rows) return known;
    note_use(buffer);
    Cells fresh{row_bytes, rows, WriteOrder(rows), false};
    return &(buffer->cells.insert_or_assign(begin_of(root), std::move(fresh)).first->second);
}

static Cells *contiguous_cells(const ggml_tensor *root) { return ggml_is_contiguous(root) ? cells_of(root) : nullptr; }

const WriteOrder *order_of_keys(const ggml_tensor *k, const ggml_tensor *v) {
    for (const ggml_tensor *root : {k, v}) note_use(buffer_of(root));
    Cells *values = v == k ? nullptr : cells_of(v), *keys = cells_of(k);
    if (values && !values->values) *values = {values->row_bytes, values->rows, WriteOrder(0), true};
    if (keys && keys->values) *keys = {keys->row_bytes, keys->rows, WriteOrder(keys->rows), false};
    return keys ? &keys->order : nullptr;
}

void note_write(const ggml_tensor *root, uint32_t row) {
    note_use(buffer_of(root));
    Cells *cells = cells_of(root);
    if (cells && !cells->values) cells->order.write(row);
}

// Calls fn with each whole row of K among the bytes: (buffer, order of its cells, cell, row, bytes of the row).
template <typename Function>
static void for_rows(const ggml_tensor *tensor, const void *data, size_t offset, size_t size, Function fn) {
    const ggml_tensor *root = root_of(tensor);
    Cells *cells = contiguous_cells(root);
    if (!cells || cells->values) return note_use(buffer_of(root));
    const size_t begin = begin_of(tensor) - begin_of(root) + offset, bytes = cells->row_bytes;
    const auto *from = static_cast<const char *>(data);
    std::lock_guard<std::mutex> lock(saved.mutex);
    for (size_t row = (begin + bytes - 1) / bytes; row < cells->rows && (row + 1) * bytes <= begin + size; ++row)
        fn(buffer_of(root), &cells->order, uint32_t(row), from + (row * bytes - begin), bytes);
}

void note_get(const ggml_tensor *tensor, const void *data, size_t offset, size_t size) {
    if (!contiguous_cells(root_of(tensor))) return;  // logits, say, whose read ends no state
    for_rows(tensor, data, offset, size, [](auto... row) { saved.orders.save(row...); });
}

void note_set(const ggml_tensor *tensor, const void *data, size_t offset, size_t size) {
    for_rows(tensor, data, offset, size, [](auto... row) { saved.orders.restore(row...); });
}

void note_copy(const Buffer *from, size_t begin, const ggml_tensor *target, size_t offset, size_t size) {
    const ggml_tensor *to = root_of(target);
    note_use(from);
    note_use(buffer_of(to));
    Cells *cells = contiguous_cells(to);
    auto entry = from->cells.upper_bound(begin);
    const Cells *known = entry == from->cells.begin() ? nullptr : &(--entry)->second;
    if (!cells || cells->values) return;
    const size_t known_row = known ? (begin - entry->first) / known->row_bytes : 0;
    const bool rows_alike = known && !known->values && known->row_bytes == cells->row_bytes && known_row < known->rows;
    const size_t second = (begin_of(target) - begin_of(to) + offset) / cells->row_bytes;
    const size_t first = rows_alike ? known_row : second, rows = size / cells->row_bytes;
    std::vector<uint32_t> order;
    for (size_t row = first; row < first + rows && row < (rows_alike ? known : cells)->rows; ++row)
        order.push_back(uint32_t(row));
    auto earlier = [&](uint32_t a, uint32_t b) { return known->order.place(a) < known->order.place(b); };
    if (rows_alike) std::sort(order.begin(), order.end(), earlier);
    for (uint32_t row : order) cells->order.write(uint32_t(row - first + second));
}

}  // namespace zinc
