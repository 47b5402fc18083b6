// The back end as ggml sees it: a registry of one device, which runs the graphs that llama.cpp gives it.
// What operations.cpp has no entry for stays with llama.cpp's CPU back end, and stderr says so.
#include <cstring>
#include <exception>

#include "orders.h"
#include "places.h"
#include "recording.h"
#include "say.h"
#include "schedule.h"

#ifndef ZINC_GGML_VERSION
#error "ZINC_GGML_VERSION: the ggml version of the headers, as ggml_version() gives it"
#endif

namespace zinc {

static Device *device_of(ggml_backend_dev_t device) { return static_cast<Device *>(device->context); }

// --- the backend: what runs a graph ----------------------------------------------------------------------------------

static const char *backend_name(ggml_backend_t) { return "ZINC0"; }

static void backend_free(ggml_backend_t backend) {
    delete static_cast<Plan *>(backend->context);
    delete backend;
}

// The scheduler copies what another device has made: here as anywhere, by tensor_copy.
static bool cpy_tensor_async(ggml_backend_t, ggml_backend_t, const ggml_tensor *source, ggml_tensor *) {
    note_input(source);
    return false;
}

static ggml_status graph_compute(ggml_backend_t backend, ggml_cgraph *graph) try {
    Device *device = device_of(backend->device);
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

static const char *device_name(ggml_backend_dev_t) { return "ZINC0"; }
static const char *device_description(ggml_backend_dev_t device) { return device_of(device)->name.c_str(); }
static void device_memory(ggml_backend_dev_t device, size_t *free, size_t *total) {
    *free = device_of(device)->store->free();
    *total = device_of(device)->store->total();
}
// A GPU, whatever Vulkan calls it: only a GPU device is given the KV cache.
static enum ggml_backend_dev_type device_type(ggml_backend_dev_t) { return GGML_BACKEND_DEVICE_TYPE_GPU; }

// No device_id: llama.cpp leaves one of two devices out that have the same.
static void device_props(ggml_backend_dev_t device, ggml_backend_dev_props *props) {
    std::memset(props, 0, sizeof *props);
    props->name = device_name(device);
    props->description = device_description(device);
    props->type = device_type(device);
    device_memory(device, &props->memory_free, &props->memory_total);
    props->caps.mmap_support = true;
}

static ggml_backend_buffer_type_t device_buffer_type(ggml_backend_dev_t device) { return buffer_type(device); }

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
    note_operation(op);
    if (op->op == GGML_OP_MUL_MAT && is_cache(root_of(op->src[0])) && root_of(op->src[0]) != op->src[0])
        say_once("flash attention is off, so that results depend on where keys lie; expected -fa on");
    const char *reason = refused_by(*device_of(device), op);
    if (reason && *reason) say_left(op, reason);
    return !reason;
}

static bool supports_buft(ggml_backend_dev_t device, ggml_backend_buffer_type_t type) {
    return type == buffer_type(device);
}

// --- the registry ----------------------------------------------------------------------------------------------------

static ggml_backend_reg_t registry();

static ggml_backend_dev_t the_device() {
    static ggml_backend_device device = [] {
        ggml_backend_device made{};
        made.iface.get_name = device_name;
        made.iface.get_description = device_description;
        made.iface.get_memory = device_memory;
        made.iface.get_type = device_type;
        made.iface.get_props = device_props;
        made.iface.init_backend = init_backend;
        made.iface.get_buffer_type = device_buffer_type;
        made.iface.supports_op = supports_op;
        made.iface.supports_buft = supports_buft;
        made.reg = registry();
        return made;
    }();
    return &device;
}

static const char *registry_name(ggml_backend_reg_t) { return "ZINC"; }
static size_t device_count(ggml_backend_reg_t) { return 1; }
static ggml_backend_dev_t get_device(ggml_backend_reg_t, size_t) { return the_device(); }

// How many dispatches, barriers and workgroups were recorded until now.
static void counts(uint64_t found[3]) {
    Device *device = device_of(the_device());
    std::lock_guard<Turns> turn(device->turns);
    device->recorder->counts(found);
}
static void *proc_address(ggml_backend_reg_t, const char *name) {
    return std::strcmp(name, "zinc_attn_counts") ? nullptr : reinterpret_cast<void *>(counts);
}

static ggml_backend_reg_t registry() {
    static ggml_backend_reg found = {GGML_BACKEND_API_VERSION,
                                     {registry_name, device_count, get_device, proc_address}};
    return &found;
}

}  // namespace zinc

// ggml's own check of a number does not notice structs that change between versions, so only the version fits that the
// headers were of.
extern "C" __attribute__((visibility("default"))) ggml_backend_reg_t ggml_backend_init(void) {
    if (std::strcmp(ggml_version(), ZINC_GGML_VERSION) != 0) {
        zinc::say("built for ggml " ZINC_GGML_VERSION ", got ggml %s; build it for that version", ggml_version());
        return nullptr;
    }
    static std::mutex mutex;
    std::lock_guard<std::mutex> lock(mutex);
    ggml_backend_dev_t device = zinc::the_device();
    if (!device->context) device->context = zinc::Device::open();
    return device->context ? device->reg : nullptr;
}
