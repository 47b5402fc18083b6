#include "device.h"

#include <cstdlib>
#include <cstring>

#include "say.h"

namespace zinc {

const char *const ARITHMETICS[] = {"canonical", "fused", "integer"};
Device *processor;

constexpr long MOST_SPLITS = MAX_CONTEXT / KEYS_PER_NODE;

static bool read_splits(uint32_t *splits) {
    const char *text = std::getenv("ZINC_ATTN_SPLITS");
    char *end = nullptr;
    const long number = text ? std::strtol(text, &end, 10) : 0;
    *splits = uint32_t(number);
    if (!text || (*text && !*end && number >= 1 && number <= MOST_SPLITS)) return true;
    return za_fail_as(ZA_INVALID, "ZINC_ATTN_SPLITS: got '%s', expected 1 to %ld", text, MOST_SPLITS);
}

static bool read_arithmetic(za_arithmetic *arithmetic) {
    const char *text = std::getenv("ZINC_ATTN_ARITHMETIC");
    for (int i = ZA_CANONICAL; text && i <= ZA_INTEGER; ++i)
        if (!std::strcmp(text, ARITHMETICS[i])) return *arithmetic = za_arithmetic(i), true;
    return !text || za_fail_as(ZA_INVALID, "ZINC_ATTN_ARITHMETIC: got '%s', expected canonical, fused or integer",
                                text);
}

Device *Device::open(const char *name, bool gpu) {
    Device *self = new Device;
    self->device_ = za_device_open(name);
    const bool fits = self->device_ && !(gpu && za_device_info(self->device_).cpu);
    if (self->device_ && !fits)
        za_fail_as(ZA_UNSUPPORTED, "%s is no GPU", za_device_info(self->device_).name);
    // Opening a plain shape checks that the driver computes the kernels' bits.
    const Kind plain{1, 1, 64, 64, false, {ZA_Q8_0, 68}, {ZA_Q8_0, 68}};
    const bool configured = fits && read_splits(&self->splits) && read_arithmetic(&self->arithmetic);
    if (configured && !self->device_->dots) {
        za_fail_as(ZA_UNSUPPORTED, "%s has no integer dot product, which products of quantized weights need: Vulkan "
                   "1.3 or VK_KHR_shader_integer_dot_product", za_device_info(self->device_).name);
    } else if (configured && self->attn(plain, true).attn) {
        const struct za_device_info info = za_device_info(self->device_);
        self->name = info.name;
        self->alignment = size_t(info.alignment > 32 ? info.alignment : 32);
        self->most = info.most;
        self->on_cpu = info.cpu;
        self->is_host = self->device_->processor;
        self->wave32 = info.wave32;
        self->lanes = za_device_registers(self->device_).lanes;
        if (za_graph_kernels[GRAPH_MUL_MAT_UNITS].code_bytes > 4) self->units = self->device_->units;
        self->store = new Store(self->device_);
        self->recorder = new Recorder(self->device_);
        return self;
    }
    za_device_close(self->device_);
    delete self;
    return nullptr;
}

void Device::set_threads(int number) {
    const struct za_host host = za_device_host(device_);
    const auto set = reinterpret_cast<void (*)(unsigned)>(host.get_proc(host.instance, "zinc_cpu_set_threads"));
    if (set && number > 0) set(unsigned(number));
}

void Device::release(Memory *memory) {
    for (auto entry = caches_.begin(); entry != caches_.end();) {
        const Layer &layer = entry->first.second;
        const bool inside = layer.k.buffer == memory->buffer.handle || layer.v.buffer == memory->buffer.handle;
        if (inside) za_cache_free(entry->second);
        entry = inside ? caches_.erase(entry) : std::next(entry);
    }
    store->release(memory);
    recorder->forget();
}

bool Device::known_attn(const Kind &kind, Opened *opened) {
    std::lock_guard<std::mutex> lock(attns_mutex_);
    auto entry = attns_.find(kind);
    if (entry != attns_.end()) *opened = entry->second;
    return entry != attns_.end();
}

Opened Device::attn(const Kind &kind, bool has_turn) {
    Opened opened{};
    if (known_attn(kind, &opened)) return opened;
    std::unique_lock<Turns> turn(turns, std::defer_lock);
    if (!has_turn) turn.lock();
    if (known_attn(kind, &opened)) return opened;  // a thread opened the kind in an earlier turn
    za_options options{};
    options.q_heads = kind.q_heads;
    options.kv_heads = kind.kv_heads;
    options.head_dim = kind.head_dim;
    options.v_head_dim = kind.v_head_dim;
    options.latent = kind.latent;
    options.page_size = 1;
    options.arithmetic = arithmetic;
    options.dtype = kind.k.type;
    options.v_dtype = kind.v.type;
    options.k_stride = kind.k.row;
    options.v_stride = kind.latent ? 0 : kind.v.row;
    opened.attn = za_open(device_, &options);
    if (!opened.attn) opened.reason = za_error();
    const bool is_final = opened.attn || za_error_code() == ZA_INVALID || za_error_code() == ZA_UNSUPPORTED;
    if (!is_final) return opened;
    std::lock_guard<std::mutex> lock(attns_mutex_);
    return attns_[kind] = opened;
}

za_cache *Device::cache(const Kind &kind, const Layer &layer) {
    auto entry = caches_.find({kind, layer});
    if (entry != caches_.end()) return entry->second;
    za_attn *opened = attn(kind, true).attn;
    za_cache_places places{};
    places.layers = 1;
    places.pages = layer.rows;
    places.k = layer.k;
    places.v = layer.v;
    places.token_rows = 1;
    places.head_rows = layer.head_rows;
    za_cache *cache = opened ? za_cache_from(opened, &places) : nullptr;
    if (cache) caches_[{kind, layer}] = cache;
    return cache;
}

}  // namespace zinc
