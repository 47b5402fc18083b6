#include "memory.h"

#include <algorithm>
#include <cstring>
#include <new>

namespace zinc {

static RowMemory remembered;  // of the last K of each cache; guarded by the device's mutex

const ggml_tensor *root_of(const ggml_tensor *tensor) {
    while (tensor->view_src) tensor = tensor->view_src;
    return tensor;
}

// --- what rows were written ------------------------------------------------------------------------------------------

static size_t offset_of(const Buffer &buffer, const ggml_tensor *root) {
    return size_t(static_cast<char *>(root->data) - static_cast<char *>(buffer.memory.base));
}

// The cells of a root, made where they are new, and the root's offset; NULL for memory that holds no cache.
static Cells *cells_of(const ggml_tensor *root, size_t *offset) {
    Buffer *buffer = buffer_of(root);
    if (!buffer || root->buffer->usage == GGML_BACKEND_BUFFER_USAGE_COMPUTE) return nullptr;
    *offset = offset_of(*buffer, root);
    const size_t rows = size_t(ggml_nrows(root));
    auto at = buffer->cells.find(rows);
    if (at == buffer->cells.end()) at = buffer->cells.emplace(rows, Cells{WriteOrder(rows)}).first;
    return &at->second;
}

WriteOrder *order_of_keys(const ggml_tensor *root) {
    size_t offset;
    Cells *cells = cells_of(root, &offset);
    if (!cells) return nullptr;
    cells->keys = cells->keys == NO_TENSOR ? offset : std::max(cells->keys, offset);
    return &cells->order;
}

static void note_row(Cells *cells, size_t offset, uint32_t row) {
    if (cells->writer == NO_TENSOR) cells->writer = offset;
    if (offset == cells->writer) cells->order.write(row);
}

void note_write(const ggml_tensor *root, uint32_t row) {
    size_t offset, bytes = ggml_row_size(root->type, root->ne[0]);
    Cells *cells = cells_of(root, &offset);
    if (!cells) return;
    note_row(cells, offset, row);
    if (offset != cells->keys) return;
    remembered.keep(static_cast<const char *>(root->data) + row * bytes, bytes, cells->order.stamp(row));
}

// Rows of a root that bytes [offset, offset + size) of a view of it hold: fn(row, its bytes, their number).
template <typename Function>
static void for_rows(const ggml_tensor *tensor, size_t offset, size_t size, Function fn) {
    const ggml_tensor *root = root_of(tensor);
    size_t begin = size_t(static_cast<char *>(tensor->data) - static_cast<char *>(root->data)) + offset;
    size_t bytes = ggml_row_size(root->type, root->ne[0]), rows = size_t(ggml_nrows(root));
    for (size_t row = (begin + bytes - 1) / bytes; row < rows && (row + 1) * bytes <= begin + size; ++row)
        fn(uint32_t(row), static_cast<const char *>(root->data) + row * bytes, bytes);
}

// Rows that come from a file or another cache have the time at which they were written first, if it is known.
static void note_set(const ggml_tensor *tensor, size_t offset, size_t size) {
    size_t of_root;
    const ggml_tensor *root = root_of(tensor);
    Cells *cells = ggml_is_contiguous(root) && tensor->buffer ? cells_of(root, &of_root) : nullptr;
    if (!cells) return;
    for_rows(tensor, offset, size, [&](uint32_t row, const char *data, size_t bytes) {
        note_row(cells, of_root, row);
        uint64_t stamp = of_root == cells->keys ? remembered.find(data, bytes) : 0;
        if (stamp) cells->order.restore(row, stamp);
    });
}

// A saved row may have been rotated since it was written, so its bytes are kept again.
static void note_get(const ggml_tensor *tensor, size_t offset, size_t size) {
    size_t of_root;
    Cells *cells = tensor->buffer ? cells_of(root_of(tensor), &of_root) : nullptr;
    if (!cells || of_root != cells->keys) return;
    for_rows(tensor, offset, size, [&](uint32_t row, const char *data, size_t bytes) {
        if (cells->order.stamp(row)) remembered.keep(data, bytes, cells->order.stamp(row));
    });
}

// --- buffers ---------------------------------------------------------------------------------------------------------

static Buffer *context_of(ggml_backend_buffer_t buffer) { return static_cast<Buffer *>(buffer->context); }

static void free_buffer(ggml_backend_buffer_t buffer) {
    Buffer *own = context_of(buffer);
    {
        std::lock_guard<std::mutex> lock(own->device->mutex);
        own->device->release(&own->memory);
    }
    delete own;
}

static void *get_base(ggml_backend_buffer_t buffer) { return context_of(buffer)->memory.base; }

static void memset_tensor(ggml_backend_buffer_t, ggml_tensor *tensor, uint8_t value, size_t offset, size_t size) {
    std::memset(static_cast<char *>(tensor->data) + offset, value, size);
}

static void set_tensor(ggml_backend_buffer_t buffer, ggml_tensor *tensor, const void *data, size_t offset,
                       size_t size) {
    std::memcpy(static_cast<char *>(tensor->data) + offset, data, size);
    std::lock_guard<std::mutex> lock(context_of(buffer)->device->mutex);
    note_set(tensor, offset, size);
}

static void get_tensor(ggml_backend_buffer_t buffer, const ggml_tensor *tensor, void *data, size_t offset,
                       size_t size) {
    std::memcpy(data, static_cast<const char *>(tensor->data) + offset, size);
    std::lock_guard<std::mutex> lock(context_of(buffer)->device->mutex);
    note_get(tensor, offset, size);
}

static void clear(ggml_backend_buffer_t buffer, uint8_t value) {
    Buffer *own = context_of(buffer);
    std::memset(own->memory.base, value, own->memory.size);
    std::lock_guard<std::mutex> lock(own->device->mutex);
    for (auto &[rows, cells] : own->cells) cells.order = WriteOrder(rows);
}

static ggml_backend_buffer_i buffer_functions() {
    ggml_backend_buffer_i functions{};
    functions.free_buffer = free_buffer;
    functions.get_base = get_base;
    functions.memset_tensor = memset_tensor;
    functions.set_tensor = set_tensor;
    functions.get_tensor = get_tensor;
    functions.clear = clear;
    return functions;
}

// --- the buffer type -------------------------------------------------------------------------------------------------

static Device *device_of(ggml_backend_buffer_type_t type) { return static_cast<Device *>(type->context); }

static const char *type_name(ggml_backend_buffer_type_t) { return "ZINC0"; }

static ggml_backend_buffer_t alloc_buffer(ggml_backend_buffer_type_t type, size_t size) {
    Device *device = device_of(type);
    Buffer *buffer = new (std::nothrow) Buffer{device, {}, {}};
    std::unique_lock<std::mutex> lock(device->mutex);
    if (buffer && device->allocate(size, &buffer->memory))
        return ggml_backend_buffer_init(type, buffer_functions(), buffer, size);
    delete buffer;
    return nullptr;
}

static size_t get_alignment(ggml_backend_buffer_type_t type) { return device_of(type)->alignment; }
static bool is_host(ggml_backend_buffer_type_t) { return true; }

ggml_backend_buffer_type_t buffer_type(ggml_backend_dev_t device) {
    static ggml_backend_buffer_type type{};
    type.iface.get_name = type_name;
    type.iface.alloc_buffer = alloc_buffer;
    type.iface.get_alignment = get_alignment;
    type.iface.is_host = is_host;
    type.device = device;
    type.context = device->context;
    return &type;
}

Buffer *buffer_of(const ggml_tensor *tensor) {
    const ggml_tensor *root = root_of(tensor);
    bool own = root->buffer && root->buffer->buft && root->buffer->buft->iface.get_name == type_name;
    return own && root->data ? context_of(root->buffer) : nullptr;
}

}  // namespace zinc
