// The back end as ggml sees it: a registry of one or two devices. ZINC0 is a GPU, or the processor if there is no GPU.
// ZINC_CPU is the processor, if its library is there; llama.cpp gives it the parts of a model that stay on the CPU.
// supports_op refuses an operation that is in no table of operations.cpp, or for which the table's `refused` has a
// reason. ggml then runs it in another back end, as a rule its CPU code, and a line on stderr has the reason.
//
// A decode step of a dense model, from graph_compute to the dispatch, in the order in which to read the functions:
//
//   schedule (schedule.cpp) has put each node right after its first operand, if it can, so that fusions find neighbors.
//     Then ggml gave the nodes memory.
//   graph_compute (here) takes the device's turn and runs a Recording of the graph.
//   Recording::run (recording.cpp) begins a list of commands (Recorder::begin), records node after node, submits the
//     commands and waits for them (Recorder::finish). Views compute nothing and are skipped.
//   Recording::record looks the operation up in the table of operations.cpp, converts weights that do not lie in the
//     products' layout yet (lay_operands), and calls the operation's function `record`:
//
//     RMS_NORM, MUL    record_norm_of (rows.cpp). `follower` (fusions.cpp) takes the MUL into the same dispatch.
//                      If a product reads the result, int8_copy (fusions.cpp) reserves memory for it as int8, and the
//                      kernel writes both. A product with float weights can make the norm itself (rms_of).
//     MUL_MAT          record_product (products.cpp), for q, k and v. Recording::quantized finds the int8 rows.
//                      choose_kernel takes the vector kernel, because a step has one row of x, and vector_constants
//                      (tiles.cpp) has its constants. multiply_parts cuts a product that one binding does not hold,
//                      and multiply dispatches a part. `addend` (fusions.cpp) takes the ADD of a bias or a residual.
//     ROPE             record_rope (rows.cpp). table_of makes the table of rotations once for all layers.
//     SET_ROWS         record_set_rows (moves.cpp). note_rows notes the order in which cells are written (orders.cpp),
//                      then a kernel encodes the new rows of K and V in the cache.
//     FLASH_ATTN_EXT   attend (attention.cpp). read_operation (plan.cpp) reads the sizes. Device::attn and
//                      Device::cache (device.cpp) find the C library's objects. Plan::calls (calls.cpp) lists the keys
//                      that the mask shows, in the order of writes (lists.cpp), and writes the call's words, once for
//                      all layers. za_laid_commands (src/laid.c) makes the commands: pass 1, and the merge of its
//                      states.
//     MUL_MAT, ADD     the output's projection, then RMS_NORM, MUL as above
//     MUL_MAT, MUL_MAT, GLU
//                      On a GPU glu_of (fusions.cpp) finds the three, and record_gated (products.cpp) makes them one
//                      dispatch, whose result is int8. Else they are two products and glu (elementwise.cpp).
//     MUL_MAT, ADD     the last product of the layer, and the residual
//
//   Recording::dispatch calls Recorder::dispatch (graph/recorder.cpp), which counts the workgroups, finds or compiles
//     the pipeline, copies the parameters to memory that the kernel reads, and makes a za_command.
//   Recorder::command gives the command a level (za_level, src/levels.c): one more than the highest level of the
//     commands on which it depends. It collects 512 commands, and the first time only 48: all but the last levels of
//     these are submitted at once, so that the device works while the host records.
//   Recorder::record_waiting records the collected commands by level, with a barrier between two levels: set_of binds
//     the places, and za_dispatch_with (src/objects.c) calls vkCmdDispatch.
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

// ggml's scheduler asks before it copies another device's result. It then copies by tensor_copy, as from any device.
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

static ggml_status graph_compute(ggml_backend_t backend, ggml_cgraph *graph) try {
    Device *device = device_of(backend->device);
    for (int i = 0; i < ggml_graph_n_nodes(graph); ++i) take_over(device, ggml_graph_node(graph, i));
    std::lock_guard<Turns> turn(device->turns);
    if (!device->spoilt.empty()) {
        say("the graph is not computed, because an earlier call failed and a buffer has wrong bytes");
        device->spoilt.erase(nullptr);
        return GGML_STATUS_FAILED;
    }
    const bool done = Recording(device, static_cast<Plan *>(backend->context), graph).run();
    if (done) note_graph(graph);
    return done ? GGML_STATUS_SUCCESS : GGML_STATUS_FAILED;
} catch (const std::exception &error) {  // no exception may pass through ggml's C frames
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
// ZINC0 is a GPU for ggml, whatever kind of device it is: llama.cpp puts the KV cache on GPUs only.
static enum ggml_backend_dev_type device_type(ggml_backend_dev_t device) {
    return device == &listed[0] ? GGML_BACKEND_DEVICE_TYPE_GPU : GGML_BACKEND_DEVICE_TYPE_ACCEL;
}

// The props have no device_id: llama.cpp leaves out one of two devices with the same id.
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
// Tensors that llama.cpp keeps on the CPU, and results of the CPU for ZINC0, lie in buffers that the processor reads.
static ggml_backend_buffer_type_t host_buffer_type(ggml_backend_dev_t device) {
    return device == &listed[0] && processor ? buffer_type(processor) : nullptr;
}

// Says once per kind of operation that it runs on the CPU. Says nothing if another device has the operation's weights.
static void say_runs_on_cpu(const ggml_tensor *op, const char *reason) {
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
    if (reason && *reason) say_runs_on_cpu(op, reason);
    for (const ggml_tensor *source : op->src)
        if (reason && source && device_of(device)->is_host && !share_weights(root_of(source)))
            say("%s: %s", source->name, za_error());
    return !reason;
}

static bool supports_buft(ggml_backend_dev_t device, ggml_backend_buffer_type_t type) {
    Device *asked = device_of(device);
    return type == buffer_type(asked) || (asked->is_host && type == ggml_backend_cpu_buffer_type());
}

// --- the registry ----------------------------------------------------------------------------------------------------

static const char *registry_name(ggml_backend_reg_t) { return "ZINC"; }
static size_t device_count(ggml_backend_reg_t) { return is_listed ? 2 : 1; }
static ggml_backend_dev_t get_device(ggml_backend_reg_t, size_t number) { return &listed[number]; }

// The numbers of dispatches, barriers and workgroups that were recorded until now.
static void counts(uint64_t totals[3]) {
    Device *device = device_of(&listed[0]);
    std::lock_guard<Turns> turn(device->turns);
    device->recorder->counts(totals);
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

static void list(ggml_backend_device *device, Device *opened) {
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
    device->context = opened;
    opened->listed = device;
}

// A device, such as BLAS, that ggml asks before ZINC_CPU and that reads the host's memory in place. Such a device would
// take weights in the products' layout for ggml's blocks. NULL: there is none. ggml asks its own CPU code last.
static ggml_backend_dev_t reader_before(Device *host) {
    for (size_t i = 0; i < ggml_backend_dev_count(); ++i) {
        ggml_backend_dev_t candidate = ggml_backend_dev_get(i);
        const bool is_last = candidate->iface.get_type(candidate) == GGML_BACKEND_DEVICE_TYPE_CPU;
        if (!is_last && candidate->iface.supports_buft(candidate, buffer_type(host))) return candidate;
    }
    return nullptr;
}

// ZINC_ATTN_DEVICE names the device of ZINC0. Without it ZINC0 is a GPU, or else the processor, or else a Vulkan device
// on the CPU. With ZINC_ATTN_CPU=0 the processor is no device.
static bool open_devices() {
    const char *chosen = std::getenv("ZINC_ATTN_DEVICE"), *cpu = std::getenv("ZINC_ATTN_CPU");
    const bool is_cpu = chosen && !std::strcmp(chosen, "cpu");
    const bool without = cpu && !std::strcmp(cpu, "0"), has_library = std::getenv("ZINC_ATTN_CPU_LIBRARY");
    Device *host = without ? nullptr : Device::open("cpu", false);
    if (!host && has_library && !without) say("no ZINC_CPU: %s", za_error());
    Device *first = is_cpu ? host : Device::open(chosen, host && !chosen);
    if (!first && !chosen) first = host;
    if (!first) return say("no device: %s", is_cpu && without ? "ZINC_ATTN_CPU is 0" : za_error()), false;
    list(&listed[0], first);
    if (host) list(&listed[1], host);
    ggml_backend_dev_t reader = host ? reader_before(host) : nullptr;
    if (reader) say("ZINC_CPU is left out, since %s reads its memory, too", reader->iface.get_name(reader));
    is_listed = host && !reader;
    if (is_listed || first == host) processor = host;
    say("ZINC0 is %s, with %s attention; it takes a model with --device ZINC0 -ngl 99 -fa on%s", first->name.c_str(),
        ARITHMETICS[first->arithmetic],
        is_listed ? "; what -ngl or -ot leave out is on ZINC_CPU, the processor" : "");
    return true;
}

}  // namespace zinc

extern "C" __attribute__((visibility("default"))) ggml_backend_reg_t ggml_backend_init(void) {
    static std::mutex mutex;
    std::lock_guard<std::mutex> lock(mutex);
    if (!zinc::bind(__builtin_return_address(0))) return nullptr;
    if (!zinc::listed[0].context && !zinc::open_devices()) return nullptr;
    zinc::registry.api_version = zinc::api_version();
    return &zinc::registry;
}
