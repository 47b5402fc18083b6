#include "memory.h"

#include <cstring>
#include <new>
#include <set>

namespace zinc {

// Guarded by the device's mutex.
static SavedOrders saved_orders{size_t(1) << 20};
static std::set<Buffer *> buffers;

const ggml_tensor *root_of(const ggml_tensor *tensor) {
    while (tensor->view_src) tensor = tensor->view_src;
    return tensor;
}

bool is_cache(const ggml_tensor *root) {
    return buffer_of(root) && root->buffer->usage != GGML_BACKEND_BUFFER_USAGE_COMPUTE;
}

// --- what rows were written ------------------------------------------------------------------------------------------

// The cells of a root, made where they are new; NULL for memory that holds no cache.
static Cells *cells_of(const ggml_tensor *root) {
    if (!is_cache(root)) return nullptr;
    Buffer *buffer = buffer_of(root);
    const size_t offset = size_t(static_cast<char *>(root->data) - static_cast<char *>(buffer->memory.base));
    const size_t row_bytes = ggml_row_size(root->type, root->ne[0]), rows = size_t(ggml_nrows(root));
    auto at = buffer->cells.find(offset);
    if (at != buffer->cells.end() && at->second.row_bytes == row_bytes && at->second.rows == rows) return &at->second;
    saved_orders.finish();
    return &(buffer->cells.insert_or_assign(offset, Cells{row_bytes, rows, WriteOrder(rows), false}).first->second);
}

const WriteOrder *order_of_keys(const ggml_tensor *k, const ggml_tensor *v) {
    Cells *values = v == k ? nullptr : cells_of(v), *keys = cells_of(k);
    if (values && !values->values) *values = {values->row_bytes, values->rows, WriteOrder(0), true};
    if (keys && keys->values) *keys = {keys->row_bytes, keys->rows, WriteOrder(keys->rows), false};
    return keys ? &keys->order : nullptr;
}

void note_use() { saved_orders.finish(); }

void note_write(const ggml_tensor *root, uint32_t row) {
    Cells *cells = cells_of(root);
    if (cells && !cells->values) cells->order.write(row);
}

// Whole rows of `cells`, whose memory is at `base`, that bytes [begin, begin + size) hold: fn(row, its bytes, their
// number).
template <typename Function>
static void for_rows(const Cells &cells, const char *base, size_t begin, size_t size, Function fn) {
    const size_t bytes = cells.row_bytes;
    for (size_t row = (begin + bytes - 1) / bytes; row < cells.rows && (row + 1) * bytes <= begin + size; ++row)
        fn(uint32_t(row), base + row * bytes, bytes);
}

// Bytes of a tensor that go into a state.
static void note_saved(const Cells &cells, const char *base, size_t begin, size_t size) {
    if (cells.values) return saved_orders.finish();
    for_rows(cells, base, begin, size, [&](uint32_t row, const char *data, size_t bytes) {
        saved_orders.save(&cells.order, row, data, bytes);
    });
}

static void note_get(const ggml_tensor *tensor, size_t offset, size_t size) {
    const ggml_tensor *root = root_of(tensor);
    const char *base = static_cast<const char *>(root->data), *data = static_cast<const char *>(tensor->data);
    const Cells *cells = ggml_is_contiguous(root) ? cells_of(root) : nullptr;
    if (cells) note_saved(*cells, base, size_t(data - base) + offset, size);
}

// llama.cpp copies a stream of cells from the memory of one tensor to another.
static void note_source(const char *data, size_t size) {
    for (Buffer *buffer : buffers) {
        const char *base = static_cast<const char *>(buffer->memory.base);
        if (data < base || data >= base + buffer->memory.size) continue;
        auto at = buffer->cells.upper_bound(size_t(data - base));
        if (at == buffer->cells.begin()) return;
        --at;
        note_saved(at->second, base + at->first, size_t(data - base) - at->first, size);
    }
}

static void note_set(const ggml_tensor *tensor, const void *source, size_t offset, size_t size) {
    const ggml_tensor *root = root_of(tensor);
    const char *base = static_cast<const char *>(root->data), *data = static_cast<const char *>(tensor->data);
    Cells *cells = ggml_is_contiguous(root) ? cells_of(root) : nullptr;
    if (!cells || cells->values) return saved_orders.finish();
    note_source(static_cast<const char *>(source), size);
    for_rows(*cells, base, size_t(data - base) + offset, size, [&](uint32_t row, const char *bytes, size_t n) {
        saved_orders.restore(&cells->order, row, bytes, n);
    });
}

// --- buffers ---------------------------------------------------------------------------------------------------------

static Buffer *context_of(ggml_backend_buffer_t buffer) { return static_cast<Buffer *>(buffer->context); }

static void free_buffer(ggml_backend_buffer_t buffer) {
    Buffer *own = context_of(buffer);
    {
        std::lock_guard<std::mutex> lock(own->device->mutex);
        saved_orders.finish();
        buffers.erase(own);
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
    note_set(tensor, data, offset, size);
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
    saved_orders.finish();
    own->cells.clear();
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
    if (buffer && device->allocate(size, &buffer->memory)) {
        buffers.insert(buffer);
        return ggml_backend_buffer_init(type, buffer_functions(), buffer, size);
    }
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

static bool is_own(const ggml_backend_buffer *buffer) {
    return buffer->buft && buffer->buft->iface.get_name == type_name;
}

bool is_elsewhere(const ggml_tensor *root) { return root->buffer && !is_own(root->buffer); }

Buffer *buffer_of(const ggml_tensor *tensor) {
    const ggml_tensor *root = root_of(tensor);
    return root->buffer && is_own(root->buffer) && root->data ? context_of(root->buffer) : nullptr;
}

}  // namespace zinc
