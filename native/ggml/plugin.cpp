// The back end as ggml sees it: a registry of ZINC0 and, where its library is there, of ZINC_CPU, the processor, which
// llama.cpp gives what is to stay there. Without a GPU both are the processor.
// What operations.cpp has no entry for stays with llama.cpp's CPU back end, and stderr says so.
#include <cstdlib>
#include <cstring>
#include <exception>

#include "interface.h"
#include "orders.h"
#include "places.h"
#include "recording.h"
#include "say.h"
#include "schedule.h"

namespace zinc {

static Device *device_of(ggml_backend_dev_t device) { return static_cast<Device *>(device->context); }

// --- the backend: what runs a graph ----------------------------------------------------------------------------------

static ggml_backend_device listed[2];  // ZINC0, and ZINC_CPU
static bool is_listed;                 // ZINC_CPU

static const char *device_name(ggml_backend_dev_t device) { return device == &listed[0] ? "ZINC0" : "ZINC_CPU"; }
static const char *backend_name(ggml_backend_t backend) { return device_name(backend->device); }

static void backend_free(ggml_backend_t backend) {
    delete static_cast<Plan *>(backend->context);
    delete backend;
}

// The scheduler copies what another device has made: here as anywhere, by tensor_copy.
static bool cpy_tensor_async(ggml_backend_t, ggml_backend_t, const ggml_tensor *source, ggml_tensor *) {
    note_input(source);
    if (!share_weights(root_of(source))) say("%s: %s", source->name, za_error());
    return false;
}

static void take_over(const Device *device, const ggml_tensor *op) {
    if (!device->is_host) return;
    take_over(op);
    for (const ggml_tensor *source : op->src)
        if (source) take_over(source);
}

static void take_operands_over(const Device *device, ggml_cgraph *graph) {
    for (int i = 0; i < ggml_graph_n_nodes(graph); ++i) take_over(device, ggml_graph_node(graph, i));
}

static ggml_status graph_compute(ggml_backend_t backend, ggml_cgraph *graph) try {
    Device *device = device_of(backend->device);
    take_operands_over(device, graph);
    std::lock_guard<Turns> turn(device->turns);
    if (!device->spoilt.empty()) {
        say("a call before this graph failed, and its bytes are not what they should be");
        device->spoilt.erase(nullptr);
        return GGML_STATUS_FAILED;
    }
    const bool done = Recording(device, static_cast<Plan *>(backend->context), graph).run();
    if (done) note_graph(graph);
    return done ? GGML_STATUS_SUCCESS : GGML_STATUS_FAILED;
} catch (const std::exception &error) {  // nothing passes through ggml's C frames
    say("%s", error.what());
    return GGML_STATUS_ALLOC_FAILED;
}

static ggml_backend_t init_backend(ggml_backend_dev_t device, const char *) {
    static ggml_guid guid = {0x7a, 0x69, 0x6e, 0x63, 0x5f, 0x61, 0x74, 0x74, 0x6e, 0, 0, 0, 0, 0, 0, 1};
    ggml_backend_i functions{};
    functions.get_name = backend_name;
    functions.free = backend_free;
    functions.cpy_tensor_async = cpy_tensor_async;
    functions.graph_compute = graph_compute;
    functions.graph_optimize = schedule;
    return new ggml_backend{&guid, functions, device, new Plan};
}

// --- the device ------------------------------------------------------------------------------------------------------

static const char *device_description(ggml_backend_dev_t device) { return device_of(device)->name.c_str(); }
static void device_memory(ggml_backend_dev_t device, size_t *free, size_t *total) {
    *free = device_of(device)->store->free();
    *total = device_of(device)->store->total();
}
// A GPU, whatever Vulkan calls it: only a GPU device is given the KV cache.
static enum ggml_backend_dev_type device_type(ggml_backend_dev_t device) {
    return device == &listed[0] ? GGML_BACKEND_DEVICE_TYPE_GPU : GGML_BACKEND_DEVICE_TYPE_ACCEL;
}

// No device_id: llama.cpp leaves one of two devices out that have the same.
static void device_props(ggml_backend_dev_t device, ggml_backend_dev_props *props) {
    std::memset(props, 0, sizeof *props);
    props->name = device_name(device);
    props->description = device_description(device);
    props->type = device_type(device);
    device_memory(device, &props->memory_free, &props->memory_total);
    props->caps.mmap_support = true;
}

static ggml_backend_buffer_type_t device_buffer_type(ggml_backend_dev_t device) {
    return buffer_type(device_of(device));
}
// What llama.cpp keeps on the CPU, and what the CPU makes for ZINC0, is where the processor finds it.
static ggml_backend_buffer_type_t host_buffer_type(ggml_backend_dev_t device) {
    return device == &listed[0] && processor ? buffer_type(processor) : nullptr;
}

// Said once of each kind, where the operation's weights are not elsewhere anyway.
static void say_left(const ggml_tensor *op, const char *reason) {
    for (int i = 0; i < GGML_MAX_SRC; ++i)
        if (op->src[i] && is_elsewhere(root_of(op->src[i]))) return;
    const ggml_tensor *first = op->src[0] ? op->src[0] : op;
    say_once(std::string(ggml_op_desc(op)) + " of type " + ggml_type_name(first->type) + " runs on the CPU (" + reason +
             "); logits may depend on the batch");
}

static bool supports_op(ggml_backend_dev_t device, const ggml_tensor *op) {
    if (is_view(op)) return true;
    take_over(device_of(device), op);
    note_operation(op);
    if (op->op == GGML_OP_MUL_MAT && is_cache(root_of(op->src[0])) && root_of(op->src[0]) != op->src[0])
        say_once("flash attention is off, so that results depend on where keys lie; expected -fa on");
    const char *reason = refused_by(*device_of(device), op);
    if (reason && *reason) say_left(op, reason);
    for (const ggml_tensor *source : op->src)
        if (reason && source && device_of(device)->is_host && !share_weights(root_of(source)))
            say("%s: %s", source->name, za_error());
    return !reason;
}

static bool supports_buft(ggml_backend_dev_t device, ggml_backend_buffer_type_t type) {
    Device *own = device_of(device);
    return type == buffer_type(own) || (own->is_host && type == ggml_backend_cpu_buffer_type());
}

// --- the registry ----------------------------------------------------------------------------------------------------

static const char *registry_name(ggml_backend_reg_t) { return "ZINC"; }
static size_t device_count(ggml_backend_reg_t) { return is_listed ? 2 : 1; }
static ggml_backend_dev_t get_device(ggml_backend_reg_t, size_t number) { return &listed[number]; }

// How many dispatches, barriers and workgroups were recorded until now.
static void counts(uint64_t found[3]) {
    Device *device = device_of(&listed[0]);
    std::lock_guard<Turns> turn(device->turns);
    device->recorder->counts(found);
}
static void set_threads(ggml_backend_t backend, int number) {
    Device *device = device_of(backend->device);
    std::lock_guard<Turns> turn(device->turns);
    if (device->is_host) device->set_threads(number);
}
static void *proc_address(ggml_backend_reg_t, const char *name) {
    if (!std::strcmp(name, "ggml_backend_set_n_threads")) return reinterpret_cast<void *>(set_threads);
    return std::strcmp(name, "zinc_attn_counts") ? nullptr : reinterpret_cast<void *>(counts);
}

static ggml_backend_reg registry = {0, {registry_name, device_count, get_device, proc_address}};

static void list(ggml_backend_device *device, Device *of) {
    device->iface.get_name = device_name;
    device->iface.get_description = device_description;
    device->iface.get_memory = device_memory;
    device->iface.get_type = device_type;
    device->iface.get_props = device_props;
    device->iface.init_backend = init_backend;
    device->iface.get_buffer_type = device_buffer_type;
    device->iface.get_host_buffer_type = host_buffer_type;
    device->iface.supports_op = supports_op;
    device->iface.supports_buft = supports_buft;
    device->reg = &registry;
    device->context = of;
    of->listed = device;
}

// A device that ggml has already, and so asks before ZINC_CPU, and that reads the host's memory where it is, as BLAS: it
// would take weights in the products' layout for ggml's blocks. NULL: none. ggml's own CPU code is asked last.
static ggml_backend_dev_t reader_before(Device *own) {
    for (size_t i = 0; i < ggml_backend_dev_count(); ++i) {
        ggml_backend_dev_t found = ggml_backend_dev_get(i);
        const bool is_last = found->iface.get_type(found) == GGML_BACKEND_DEVICE_TYPE_CPU;
        if (!is_last && found->iface.supports_buft(found, buffer_type(own))) return found;
    }
    return nullptr;
}

// ZINC_ATTN_DEVICE names ZINC0's device; without it that is a GPU, or else the processor, or else a Vulkan device on the
// CPU. With ZINC_ATTN_CPU=0 the processor is no device.
static bool open_devices() {
    const char *chosen = std::getenv("ZINC_ATTN_DEVICE"), *cpu = std::getenv("ZINC_ATTN_CPU");
    const bool is_cpu = chosen && !std::strcmp(chosen, "cpu");
    const bool without = cpu && !std::strcmp(cpu, "0"), given = std::getenv("ZINC_ATTN_CPU_LIBRARY");
    Device *own = without ? nullptr : Device::open("cpu", false);
    if (!own && given && !without) say("no ZINC_CPU: %s", za_error());
    Device *first = is_cpu ? own : Device::open(chosen, own && !chosen);
    if (!first && !chosen) first = own;
    if (!first) return say("no device: %s", is_cpu && without ? "ZINC_ATTN_CPU is 0" : za_error()), false;
    list(&listed[0], first);
    if (own) list(&listed[1], own);
    ggml_backend_dev_t reader = own ? reader_before(own) : nullptr;
    if (reader) say("ZINC_CPU is left out, since %s reads its memory, too", reader->iface.get_name(reader));
    is_listed = own && !reader;
    if (is_listed || first == own) processor = own;
    say("ZINC0 is %s, with %s attention; it takes a model with --device ZINC0 -ngl 99 -fa on%s", first->name.c_str(),
        ARITHMETICS[first->arithmetic],
        is_listed ? "; what -ngl or -ot leave out is on ZINC_CPU, the processor" : "");
    return true;
}

}  // namespace zinc

extern "C" __attribute__((visibility("default"))) ggml_backend_reg_t ggml_backend_init(void) {
    static std::mutex mutex;
    std::lock_guard<std::mutex> lock(mutex);
    if (!zinc::listed[0].context && !(zinc::bind(__builtin_return_address(0)) && zinc::open_devices())) return nullptr;
    zinc::registry.api_version = zinc::api_version();
    return &zinc::registry;
}
