#include "memory.h"

#include <algorithm>
#include <cstring>
#include <mutex>
#include <new>

#include "interface.h"
#include "orders.h"
#include "places.h"
#include "plan.h"
#include "say.h"
#include "weights.h"

namespace zinc {

constexpr size_t SHADOW = size_t(64) << 20;  // the most bytes of a shadow

const ggml_tensor *root_of(const ggml_tensor *tensor) {
    while (tensor->view_src) tensor = tensor->view_src;
    return tensor;
}

bool is_cache(const ggml_tensor *root) {
    return buffer_of(root) && root->buffer->usage == GGML_BACKEND_BUFFER_USAGE_ANY;
}

static Buffer *context_of(ggml_backend_buffer_t buffer) { return static_cast<Buffer *>(buffer->context); }

size_t begin_of(const ggml_tensor *tensor) {
    return reinterpret_cast<uintptr_t>(tensor->data) - context_of(root_of(tensor)->buffer)->base;
}

// --- what the host knows of a buffer ---------------------------------------------------------------------------------

// Erases the map's entries that overlap bytes [begin, end).
template <typename Map, typename Size>
static void forget(Map *map, size_t begin, size_t end, Size size) {
    for (auto entry = map->begin(); entry != map->end() && entry->first < end;)
        entry = entry->first + size(entry->second) > begin ? map->erase(entry) : std::next(entry);
}

void note_change(Buffer *buffer, size_t begin, size_t size) {
    forget(&buffer->weights, begin, begin + size, [](const Weights &w) { return w.bytes(); });
    forget(&buffer->shadows, begin, begin + size, [](const std::vector<char> &bytes) { return bytes.size(); });
}

const char *host_bytes(const ggml_tensor *tensor) {
    Buffer *buffer = buffer_of(tensor);
    const size_t begin = begin_of(tensor), size = ggml_nbytes(tensor);
    if (buffer->memory.base) return buffer->memory.base + begin;
    auto shadow = buffer->shadows.upper_bound(begin);
    if (shadow != buffer->shadows.begin()) {
        --shadow;
        const size_t skipped = begin - shadow->first;
        if (skipped + size <= shadow->second.size()) return shadow->second.data() + skipped;
    }
    std::vector<char> bytes(size);
    if (!buffer->device->store->read(buffer->memory, begin, bytes.data(), size)) return nullptr;
    return (buffer->shadows[begin] = std::move(bytes)).data();
}

// Keeps the bytes of a leaf that the host may read again while it records a graph.
static void keep_shadow(Buffer *buffer, const ggml_tensor *tensor, const void *data, size_t offset, size_t size) {
    if (buffer->memory.base || tensor->view_src || offset || size != ggml_nbytes(tensor) || size > SHADOW) return;
    if (tensor->buffer->usage != GGML_BACKEND_BUFFER_USAGE_COMPUTE || tensor->type == GGML_TYPE_F32) return;
    const char *bytes = static_cast<const char *>(data);
    buffer->shadows[begin_of(tensor)].assign(bytes, bytes + size);
}

// Guards Device::held and Buffer::blocks, which threads without the turn read, too. A thread that holds this mutex
// takes no other lock.
static std::mutex held_mutex;

// --- buffers ---------------------------------------------------------------------------------------------------------

// These calls return no status to ggml. So after a failure the next graph fails, or, if weights or a cache did not get
// their bytes, every graph until the buffer is cleared or freed.
static void failed(const char *what, const ggml_tensor *tensor, bool lasting) {
    say("%s %s: %s", what, tensor->name, za_error());
    Buffer *owner = buffer_of(tensor);
    const bool stays = lasting && tensor->buffer->usage != GGML_BACKEND_BUFFER_USAGE_COMPUTE;
    owner->device->spoilt.insert(stays ? owner : nullptr);
}

static void free_buffer(ggml_backend_buffer_t buffer) {
    Buffer *freed = context_of(buffer);
    {
        std::lock_guard<Turns> turn(freed->device->turns);
        note_use(freed);
        freed->device->spoilt.erase(freed);
        {
            std::lock_guard<std::mutex> lock(held_mutex);
            freed->device->held.erase(freed->base);
        }
        freed->device->release(&freed->memory);
    }
    buffer->iface = freed->functions;
    buffer->context = freed->context;
    delete freed;
    if (buffer->iface.free_buffer) buffer->iface.free_buffer(buffer);
}

static void *get_base(ggml_backend_buffer_t buffer) { return reinterpret_cast<void *>(context_of(buffer)->base); }

// Refuses a cache that no kernel can bind, or whose type the arithmetic does not take; llama.cpp then says that it has
// no memory for the cache. Weights and results are not refused: they are bound in pieces, or left to the CPU.
static ggml_status init_tensor(ggml_backend_buffer_t buffer, ggml_tensor *tensor) {
    const Device *device = context_of(buffer)->device;
    const bool attended = !std::strncmp(tensor->name, "cache_k", 7) || !std::strncmp(tensor->name, "cache_v", 7);
    const bool computed = tensor->op != GGML_OP_NONE;  // a graph that rotates K names its result like the cache
    const std::string reason = attended && !computed ? refused_type(*device, tensor) : "";
    if (!reason.empty()) return say("%s", reason.c_str()), GGML_STATUS_ALLOC_FAILED;
    if (std::strncmp(tensor->name, "cache_", 6) || ggml_nbytes(tensor) + device->alignment <= device->most)
        return GGML_STATUS_SUCCESS;
    say("%s: got %zu bytes, expected at most %zu, which a kernel can bind; take a shorter context (-c) or smaller "
        "types (-ctk q8_0 -ctv q8_0)", tensor->name, ggml_nbytes(tensor), device->most - device->alignment);
    return GGML_STATUS_ALLOC_FAILED;
}

static void memset_tensor(ggml_backend_buffer_t buffer, ggml_tensor *tensor, uint8_t value, size_t offset,
                          size_t size) {
    Buffer *target = context_of(buffer);
    std::lock_guard<Turns> turn(target->device->turns);
    const bool ok = lay_weights(root_of(tensor), false);
    note_change(target, begin_of(tensor) + offset, size);
    if (!ok || !target->device->store->fill(target->memory, begin_of(tensor) + offset, value, size))
        failed("memset", tensor, true);
}

// Stores quantized weights of a model in the products' layout.
static bool set_weights(Buffer *target, const ggml_tensor *tensor, const std::vector<char> &pieces) {
    note_change(target, begin_of(tensor), pieces.size());
    target->weights[begin_of(tensor)] = weights_of(tensor);
    return target->device->store->write(target->memory, begin_of(tensor), pieces.data(), pieces.size());
}

static bool set_bytes(Buffer *target, const ggml_tensor *tensor, const void *data, size_t offset, size_t size) {
    if (!lay_weights(root_of(tensor), false)) return false;
    note_change(target, begin_of(tensor) + offset, size);
    keep_shadow(target, tensor, data, offset, size);
    const Buffer *from = target->device->is_host ? holding(data) : nullptr;
    if (from) note_copy(from, reinterpret_cast<uintptr_t>(data) - from->base, tensor, offset, size);
    else note_set(tensor, data, offset, size);
    return target->device->store->write(target->memory, begin_of(tensor) + offset, data, size);
}

static void set_tensor(ggml_backend_buffer_t buffer, ggml_tensor *tensor, const void *data, size_t offset,
                       size_t size) {
    Buffer *target = context_of(buffer);
    const bool whole = !tensor->view_src && offset == 0 && size == ggml_nbytes(tensor) && ggml_is_contiguous(tensor);
    const bool weights = buffer->usage == GGML_BACKEND_BUFFER_USAGE_WEIGHTS && weight_type(tensor->type) >= 0 &&
                         !stay_blocks(tensor);
    std::vector<char> pieces(whole && weights ? size : 0);
    if (!pieces.empty()) convert(weights_of(tensor), static_cast<const char *>(data), pieces.data(), true);
    std::lock_guard<Turns> turn(target->device->turns);
    if (!(whole && weights ? set_weights(target, tensor, pieces) : set_bytes(target, tensor, data, offset, size)))
        failed("set", tensor, true);
}

static bool get_bytes(Buffer *source, const ggml_tensor *tensor, void *data, size_t offset, size_t size) {
    const ggml_tensor *root = root_of(tensor);
    Store *store = source->device->store;
    if (!in_pieces(root)) return store->read(source->memory, begin_of(tensor) + offset, data, size);
    std::vector<char> pieces(ggml_nbytes(root)), blocks(pieces.size());
    if (!store->read(source->memory, begin_of(root), pieces.data(), pieces.size())) return false;
    convert(weights_of(root), pieces.data(), blocks.data(), false);
    std::memcpy(data, blocks.data() + (begin_of(tensor) - begin_of(root)) + offset, size);
    return true;
}

static void get_tensor(ggml_backend_buffer_t buffer, const ggml_tensor *tensor, void *data, size_t offset,
                       size_t size) {
    Buffer *source = context_of(buffer);
    std::lock_guard<Turns> turn(source->device->turns);
    if (!get_bytes(source, tensor, data, offset, size)) {
        std::memset(data, 0xFF, size);  // NaN
        return failed("get", tensor, false);
    }
    note_get(tensor, data, offset, size);
    note_read(tensor, data);
}

static bool cpy_tensor(ggml_backend_buffer_t buffer, const ggml_tensor *source, ggml_tensor *target) {
    Buffer *to = context_of(buffer), *from = buffer_of(source);
    if (!from || from->device != to->device || !ggml_is_contiguous(source) || !ggml_is_contiguous(target))
        return false;
    std::lock_guard<Turns> turn(to->device->turns);
    if (!lay_weights(root_of(source), false) || !lay_weights(root_of(target), false)) return false;
    note_change(to, begin_of(target), ggml_nbytes(source));
    note_copy(from, begin_of(source), target, 0, ggml_nbytes(source));
    return to->device->store->copy(from->memory, begin_of(source), to->memory, begin_of(target), ggml_nbytes(source));
}

static void clear(ggml_backend_buffer_t buffer, uint8_t value) {
    Buffer *target = context_of(buffer);
    std::lock_guard<Turns> turn(target->device->turns);
    note_use(target);
    target->cells.clear();
    note_change(target, 0, target->memory.size);
    target->device->spoilt.erase(target);
    if (target->device->store->fill(target->memory, 0, value, target->memory.size)) return;
    say("clear: %s", za_error());
    target->device->spoilt.insert(target);
}

static ggml_backend_buffer_i buffer_functions() {
    ggml_backend_buffer_i functions{};
    functions.free_buffer = free_buffer;
    functions.get_base = get_base;
    functions.init_tensor = init_tensor;
    functions.memset_tensor = memset_tensor;
    functions.set_tensor = set_tensor;
    functions.get_tensor = get_tensor;
    functions.cpy_tensor = cpy_tensor;
    functions.clear = clear;
    return functions;
}

// --- the buffer type -------------------------------------------------------------------------------------------------

static Device *device_of(ggml_backend_buffer_type_t type) { return reinterpret_cast<BufferType *>(type)->owner; }

static const char *type_name(ggml_backend_buffer_type_t type) {
    return device_of(type)->is_host ? "ZINC_CPU" : "ZINC0";
}

// The calling thread holds the device's turn. In `held` the new buffer replaces a buffer that was freed unseen.
static Buffer *new_buffer(Device *device, const Memory &memory) {
    const uintptr_t base = device->is_host ? reinterpret_cast<uintptr_t>(memory.base) : BASE;
    Buffer *buffer = new Buffer{device, memory, base, {}, {}, {}, {}, {}, nullptr};
    std::lock_guard<std::mutex> lock(held_mutex);
    if (device->is_host) device->held[base] = buffer;
    return buffer;
}

static ggml_backend_buffer_t alloc_buffer(ggml_backend_buffer_type_t type, size_t size) {
    Device *device = device_of(type);
    std::lock_guard<Turns> turn(device->turns);
    Memory memory;
    if (device->store->allocate(size, &memory))
        return ggml_backend_buffer_init(type, buffer_functions(), new_buffer(device, memory), size);
    say("%s", za_error());
    return nullptr;
}

static size_t get_alignment(ggml_backend_buffer_type_t type) { return device_of(type)->alignment; }
static bool type_is_host(ggml_backend_buffer_type_t type) { return device_of(type)->is_host; }

ggml_backend_buffer_type_t buffer_type(Device *device) {
    static BufferType types[2];
    static std::once_flag filled[2];
    BufferType &type = types[device->is_host];
    std::call_once(filled[device->is_host], [&] {
        fill(&type, {type_name, alloc_buffer, get_alignment, type_is_host}, device, device->listed);
    });
    return type.handle();
}

static bool is_own(const ggml_backend_buffer *buffer) { return buffer->iface.get_base == get_base; }

// Replaces ggml's functions of the buffer until it is freed. The new functions change its bytes in the same way.
void take_over(const ggml_tensor *tensor) {
    const ggml_tensor *root = root_of(tensor);
    ggml_backend_buffer_t buffer = root->buffer;
    if (!buffer || is_own(buffer) || !root->data || !buffer->size || buffer->buft != ggml_backend_cpu_buffer_type())
        return;
    std::lock_guard<Turns> turn(processor->turns);
    if (is_own(buffer)) return;  // a thread took it over in an earlier turn
    Memory memory;
    if (!processor->store->import(ggml_backend_buffer_get_base(buffer), buffer->size, &memory))
        return say("%s", za_error());
    Buffer *taken = new_buffer(processor, memory);
    taken->functions = buffer->iface;
    taken->context = buffer->context;
    buffer->context = taken;
    buffer->iface = buffer_functions();
}

Buffer *holding(const void *bytes) {
    if (!processor) return nullptr;
    const uintptr_t address = reinterpret_cast<uintptr_t>(bytes);
    std::lock_guard<std::mutex> lock(held_mutex);
    auto next = processor->held.upper_bound(address);
    if (next == processor->held.begin()) return nullptr;
    Buffer *buffer = (--next)->second;
    return address - buffer->base < buffer->memory.size ? buffer : nullptr;
}

const Device *holder_of(const ggml_tensor *tensor) {
    const ggml_backend_buffer *buffer = root_of(tensor)->buffer;
    if (buffer && buffer->buft && buffer->buft->iface.get_name == type_name) return device_of(buffer->buft);
    return buffer && buffer->buft == ggml_backend_cpu_buffer_type() ? processor : nullptr;
}

bool stay_blocks(const ggml_tensor *root) {
    const Buffer *buffer = buffer_of(root);
    std::lock_guard<std::mutex> lock(held_mutex);
    return buffer && (buffer->functions.get_base || buffer->blocks.count(begin_of(root)));
}

bool share_weights(const ggml_tensor *root) {
    Buffer *buffer = buffer_of(root);
    if (!buffer || !buffer->device->is_host || weight_type(root->type) < 0) return true;
    std::lock_guard<Turns> turn(buffer->device->turns);
    {
        std::lock_guard<std::mutex> lock(held_mutex);
        buffer->blocks.insert(begin_of(root));
    }
    return lay_weights(root, false);
}

bool is_elsewhere(const ggml_tensor *root) { return root->buffer && !holder_of(root); }

Buffer *buffer_of(const ggml_tensor *tensor) {
    const ggml_tensor *root = root_of(tensor);
    return root->buffer && is_own(root->buffer) && root->data ? context_of(root->buffer) : nullptr;
}

}  // namespace zinc
