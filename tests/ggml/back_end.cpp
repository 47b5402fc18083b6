// Functions through which Python calls the back end of native/ggml, for tests/device/test_ggml.py.
#include <utility>

#include "../../native/ggml/interface.h"
#include "../../native/ggml/operations.h"
#include "../../native/ggml/plan.h"
extern "C" ggml_backend_reg_t ggml_backend_init(void);

static const struct {
    const char *name;
    int64_t values;  // of a block
    size_t bytes;
} TYPES[] = {{"f32", 1, 4},    {"f16", 1, 2},      {"bf16", 1, 2},   {"q8_0", 32, 34},
             {"q5_1", 32, 24}, {"q5_0", 32, 22},   {"q4_1", 32, 20}, {"q4_0", 32, 18},
             {"iq4_nl", 32, 18}, {"i32", 1, 4},    {"i64", 1, 8}};

size_t ggml_type_size(ggml_type type) { return TYPES[type].bytes; }
int64_t ggml_blck_size(ggml_type type) { return TYPES[type].values; }
size_t ggml_row_size(ggml_type type, int64_t n) { return size_t(n / TYPES[type].values) * TYPES[type].bytes; }
const char *ggml_type_name(ggml_type type) { return TYPES[type].name; }

// --- the bound ggml: the functions here; interface.cpp has its own test ----------------------------------------------

bool zinc::bind(const void *) { return true; }
int zinc::api_version() { return GGML_BACKEND_API_VERSION; }
void zinc::fill(BufferType *type, const TypeFunctions &functions, Device *owner, ggml_backend_dev_t listed) {
    auto *fields = reinterpret_cast<ggml_backend_buffer_type *>(type);
    fields->iface.get_name = functions.get_name;
    fields->iface.alloc_buffer = functions.alloc_buffer;
    fields->iface.get_alignment = functions.get_alignment;
    fields->iface.is_host = functions.is_host;
    fields->device = listed;
    type->owner = owner;
}

// --- ggml's own buffers ----------------------------------------------------------------------------------------------

ggml_backend_buffer_type_t ggml_backend_cpu_buffer_type() {
    static ggml_backend_buffer_type type{};
    return &type;
}

// --- the devices that ggml has before --------------------------------------------------------------------------------

static ggml_backend_device before[2];  // the CPU, and another device that reads its memory
static size_t devices_before = 1;

size_t ggml_backend_dev_count() { return devices_before; }
ggml_backend_dev_t ggml_backend_dev_get(size_t number) {
    before[0].iface.get_type = [](ggml_backend_dev_t) { return GGML_BACKEND_DEVICE_TYPE_CPU; };
    before[1].iface.get_type = [](ggml_backend_dev_t) { return GGML_BACKEND_DEVICE_TYPE_ACCEL; };
    before[1].iface.get_name = [](ggml_backend_dev_t) { return "BLAS"; };
    for (ggml_backend_device &device : before)
        device.iface.supports_buft = [](ggml_backend_dev_t, ggml_backend_buffer_type_t type) {
            return type->iface.is_host && type->iface.is_host(type);
        };
    return &before[number];
}

// --- for Python ------------------------------------------------------------------------------------------------------

static thread_local ggml_backend_dev_t device;
static thread_local ggml_backend_t backend;
static thread_local std::vector<ggml_backend_buffer_t> buffers;

extern "C" {
// How many devices the registry has if ggml has another device that reads the host's memory.
size_t devices_after_another() {
    devices_before = 2;
    ggml_backend_reg_t registry = ggml_backend_init();
    return registry ? registry->iface.get_device_count(registry) : 0;
}
bool open_back_end() {
    ggml_backend_reg_t registry = ggml_backend_init();
    device = registry ? registry->iface.get_device(registry, 0) : nullptr;
    backend = device ? device->iface.init_backend(device, nullptr) : nullptr;
    return backend;
}

// Dispatches, barriers and workgroups until now.
void counts(uint64_t totals[3]) {
    void *address = device->reg->iface.get_proc_address(device->reg, "zinc_attn_counts");
    reinterpret_cast<void (*)(uint64_t *)>(address)(totals);
}

ggml_backend_buffer_t make_buffer(size_t bytes, int usage) {
    ggml_backend_buffer_type_t type = device->iface.get_buffer_type(device);
    ggml_backend_buffer_t buffer = type->iface.alloc_buffer(type, bytes);
    buffer->usage = ggml_backend_buffer_usage(usage);
    buffers.push_back(buffer);
    return buffer;
}
// A buffer of ggml's, filled with bytes that are not 0. Its free sets *freed if ggml's functions are back.
ggml_backend_buffer_t make_host_buffer(size_t bytes, bool *freed) {
    static bool *told;
    static void *memory;
    told = freed;
    memory = std::memset(std::aligned_alloc(64, (bytes + 63) / 64 * 64), 0x11, bytes);
    ggml_backend_buffer_i functions{};
    functions.get_base = [](ggml_backend_buffer_t) { return memory; };
    functions.free_buffer = [](ggml_backend_buffer_t buffer) { *told = buffer->context == memory; };
    return ggml_backend_buffer_init(ggml_backend_cpu_buffer_type(), functions, memory, bytes);
}
void free_buffer(ggml_backend_buffer_t buffer) { buffer->iface.free_buffer(buffer); }
size_t free_bytes() {
    size_t free, total;
    device->iface.get_memory(device, &free, &total);
    return free;
}
void close_back_end() {
    for (ggml_backend_buffer_t buffer : buffers) buffer->iface.free_buffer(buffer);
    buffers.clear();
    backend->iface.free(backend);
}
// Makes a tensor a weight, here or on another device.
void make_weight(ggml_tensor *tensor, bool here) {
    tensor->buffer = new ggml_backend_buffer(*tensor->buffer);
    tensor->buffer->usage = GGML_BACKEND_BUFFER_USAGE_WEIGHTS;
    static ggml_backend_buffer_type elsewhere{};
    if (!here) tensor->buffer->iface = {}, tensor->buffer->buft = &elsewhere;
}
void hand_over(const ggml_tensor *tensor) { backend->iface.cpy_tensor_async(backend, backend, tensor, nullptr); }
// Sets the most bytes of a binding, and returns the former number.
size_t set_most(size_t bytes) { return std::exchange(static_cast<zinc::Device *>(device->context)->most, bytes); }
void clear_buffer(ggml_backend_buffer_t buffer) { buffer->iface.clear(buffer, 0); }

// A contiguous tensor at an offset of the buffer.
ggml_tensor *make_tensor(int type, const int64_t *ne, ggml_backend_buffer_t buffer, size_t offset) {
    ggml_tensor *tensor = new ggml_tensor{};
    tensor->type = ggml_type(type);
    std::copy_n(ne, 4, tensor->ne);
    tensor->nb[0] = ggml_type_size(tensor->type);
    tensor->nb[1] = ggml_row_size(tensor->type, ne[0]);
    for (int i = 2; i < 4; ++i) tensor->nb[i] = tensor->nb[i - 1] * size_t(ne[i - 1]);
    tensor->buffer = buffer;
    tensor->data = static_cast<char *>(buffer->iface.get_base(buffer)) + offset;
    return tensor;
}
ggml_tensor *make_view(ggml_tensor *source, const int64_t *ne, const size_t *nb, size_t offset) {
    ggml_tensor *view = new ggml_tensor(*source);
    std::copy_n(ne, 4, view->ne);
    std::copy_n(nb, 4, view->nb);
    view->view_src = source->view_src ? source->view_src : source;
    view->view_offs += offset;
    view->data = static_cast<char *>(view->data) + offset;
    return view;
}
// Whether the tensor may be a layer's keys.
bool takes_cache(ggml_tensor *tensor, const char *name, bool computed) {
    std::strcpy(tensor->name, name);
    if (computed) tensor->op = GGML_OP_CPY;
    return tensor->buffer->iface.init_tensor(tensor->buffer, tensor) == GGML_STATUS_SUCCESS;
}
void set_bytes(ggml_tensor *tensor, const void *data, size_t offset, size_t size) {
    tensor->buffer->iface.set_tensor(tensor->buffer, tensor, data, offset, size);
}
void get_bytes(const ggml_tensor *tensor, void *data, size_t offset, size_t size) {
    tensor->buffer->iface.get_tensor(tensor->buffer, tensor, data, offset, size);
}
const void *bytes_of(const ggml_tensor *tensor) { return tensor->data; }
// Copies bytes within a tensor whose memory the host addresses.
void copy_bytes(ggml_tensor *tensor, size_t from, size_t to, size_t size) {
    set_bytes(tensor, static_cast<const char *>(tensor->data) + from, to, size);
}

// Makes `out` the operation's result, and returns whether the device takes the operation.
bool describe(int op, ggml_tensor *out, ggml_tensor *const *src, const void *params, int flags) {
    out->op = ggml_op(op);
    out->flags = flags;
    std::copy_n(src, GGML_MAX_SRC, out->src);
    std::memcpy(out->op_params, params, sizeof out->op_params);
    return device->iface.supports_op(device, out);
}
// Optimizes a graph of a single operation, whose result has this name.
void prepare(int op, ggml_tensor *out, ggml_tensor *const *src, const char *name) {
    ggml_backend_graph_optimize_params ignored{[](void *, ggml_tensor *, ggml_tensor *) {}, nullptr};
    const float none[16] = {};
    describe(op, out, src, none, 0);
    std::strcpy(out->name, name);
    ggml_cgraph graph = {1, &out};
    backend->iface.graph_optimize(backend, &graph, &ignored);
}
bool compute_graph(ggml_tensor **nodes, int n) {
    ggml_cgraph graph = {n, nodes};
    return backend->iface.graph_compute(backend, &graph) == GGML_STATUS_SUCCESS;
}
// How many fields of an operation and of its tensors the key of its plan does not hold.
int fields_not_in_key(ggml_tensor *op) {
    const std::vector<uint64_t> key = zinc::key_of(op);
    int missing = 0;
    auto change = [&](auto *field) {
        const auto kept = *field;
        std::memset(field, 1, sizeof *field);
        missing += zinc::key_of(op) == key;
        *field = kept;
    };
    std::vector<ggml_tensor *> tensors = {op, op->src[1]->view_src, op->src[2]->view_src};
    tensors.insert(tensors.end(), op->src, op->src + 5);
    for (ggml_tensor *t : tensors) {
        change(&t->type);
        for (int i = 0; i < GGML_MAX_DIMS; ++i) change(&t->ne[i]), change(&t->nb[i]);
        if (t->view_src) change(&t->view_offs);
    }
    for (int32_t &parameter : op->op_params) change(&parameter);
    for (int i : {3, 4}) {  // mask and sinks may be missing
        ggml_tensor *kept = op->src[i];
        op->src[i] = nullptr;
        missing += zinc::key_of(op) == key;
        op->src[i] = kept;
    }
    return missing;
}
}
