#include "interface.h"

#include <dlfcn.h>
#include <link.h>

#include <cstddef>
#include <cstdio>
#include <cstring>

#include "say.h"

// Each function of ggml that this library calls is a jump to the address that `bind` found.
#define FUNCTIONS(X)                                                                                                   \
    X(ggml_version) X(ggml_tensor_overhead) X(ggml_op_name) X(ggml_op_desc) X(ggml_type_name) X(ggml_type_size)        \
    X(ggml_blck_size) X(ggml_row_size) X(ggml_is_quantized) X(ggml_nbytes) X(ggml_nelements) X(ggml_nrows)             \
    X(ggml_is_empty) X(ggml_is_contiguous) X(ggml_are_same_shape) X(ggml_are_same_stride) X(ggml_get_unary_op)         \
    X(ggml_get_glu_op) X(ggml_unary_op_name) X(ggml_glu_op_name) X(ggml_graph_node) X(ggml_graph_n_nodes)              \
    X(ggml_backend_buffer_init) X(ggml_backend_buffer_get_base) X(ggml_backend_cpu_buffer_type)                        \
    X(ggml_backend_dev_get) X(ggml_backend_dev_count)

#if defined(__x86_64__)
#define JUMP(name) "jmp *zinc_" #name "(%rip)\n"
#elif defined(__aarch64__)
#define JUMP(name) "adrp x16, zinc_" #name "\nldr x16, [x16, #:lo12:zinc_" #name "]\nbr x16\n"
#else
#error "interface.cpp: no jump is written for this processor; x86-64 and AArch64 have one"
#endif
extern "C" {
#define X(name)                                                                                                        \
    __attribute__((visibility("hidden"), used)) void *zinc_##name = nullptr;                                           \
    asm(".pushsection .text\n.globl " #name "\n.hidden " #name "\n.type " #name ", %function\n" #name ":\n"            \
        JUMP(name) ".popsection\n");
FUNCTIONS(X)
#undef X
}

namespace zinc {

// The versions with the same structs and operations as the headers of this build. scripts/test --llama tests them.
static const int FIRST_MINOR = 25, LAST_MINOR = 27;

// Builds of the same version have different interfaces. `mark` is a function that the interface has and its predecessor
// lacks. `places` are the places of get_name, alloc_buffer, get_alignment, is_host and the device in a buffer type.
struct Interface {
    int api;
    const char *mark;
    int places[5];
};
constexpr Interface INTERFACES[] = {
    {3, "ggml_backend_buft_alloc_buffer_n", {0, 1, 3, 7, 8}},
    {2, "ggml_op_alloc_size_may_expand", {0, 1, 2, 5, 6}},
};
static_assert(GGML_BACKEND_API_VERSION == 2 || GGML_BACKEND_API_VERSION == 3, "take the headers of ggml 0.25 to 0.27");
constexpr bool is_place(int i, size_t offset) {  // in the headers of this build
    return INTERFACES[3 - GGML_BACKEND_API_VERSION].places[i] * sizeof(void *) == offset;
}
static_assert(is_place(0, offsetof(ggml_backend_buffer_type, iface.get_name)) &&
              is_place(1, offsetof(ggml_backend_buffer_type, iface.alloc_buffer)) &&
              is_place(2, offsetof(ggml_backend_buffer_type, iface.get_alignment)) &&
              is_place(3, offsetof(ggml_backend_buffer_type, iface.is_host)) &&
              is_place(4, offsetof(ggml_backend_buffer_type, device)), "the headers have other buffer types");
static const Interface *bound;
static void *served;  // the bound ggml's library

int api_version() { return bound->api; }

void fill(BufferType *type, const TypeFunctions &functions, Device *owner, ggml_backend_dev_t listed) {
    void *const values[] = {reinterpret_cast<void *>(functions.get_name),
                            reinterpret_cast<void *>(functions.alloc_buffer),
                            reinterpret_cast<void *>(functions.get_alignment),
                            reinterpret_cast<void *>(functions.is_host), listed};
    for (int i = 0; i < 5; ++i) type->fields[bound->places[i]] = values[i];
    type->owner = owner;
}

// Operations and types: their numbers in this build, and the names that the bound ggml must have for these numbers.
#define OP(name) {GGML_OP_##name, #name},
static const struct {
    ggml_op op;
    const char *name;
} OPERATIONS[] = {
    OP(NONE) OP(VIEW) OP(RESHAPE) OP(PERMUTE) OP(TRANSPOSE) OP(SET_ROWS) OP(FLASH_ATTN_EXT) OP(MUL_MAT) OP(CPY) OP(CONT)
    OP(DUP) OP(CONCAT) OP(SET) OP(REPEAT) OP(PAD) OP(ROLL) OP(GET_ROWS) OP(MUL_MAT_ID) OP(ADD) OP(GATED_DELTA_NET)
    OP(SUB) OP(MUL) OP(DIV) OP(GLU) OP(ADD_ID) OP(UNARY) OP(SCALE) OP(CLAMP) OP(SQR) OP(SQRT) OP(LOG) OP(SIN) OP(COS)
    OP(LEAKY_RELU) OP(FILL) OP(RMS_NORM) OP(NORM) OP(L2_NORM) OP(GROUP_NORM) OP(SUM_ROWS) OP(MEAN) OP(SUM) OP(SOFT_MAX)
    OP(ROPE) OP(ROPE_BACK) OP(ARGSORT) OP(TOP_K) OP(SSM_CONV) OP(SSM_SCAN)
};
#undef OP
static const struct {
    ggml_type type;
    const char *name;
} TYPES[] = {{GGML_TYPE_F32, "f32"}, {GGML_TYPE_BF16, "bf16"}, {GGML_TYPE_Q6_K, "q6_K"}, {GGML_TYPE_MXFP4, "mxfp4"}};

// The first difference between the bound ggml and the headers of this build. NULL: there is none.
static const char *difference() {
    for (const auto &known : OPERATIONS)
        if (std::strcmp(ggml_op_name(known.op), known.name) != 0) return known.name;
    for (const auto &known : TYPES)
        if (std::strcmp(ggml_type_name(known.type), known.name) != 0) return known.name;
    if (std::strcmp(ggml_unary_op_name(GGML_UNARY_OP_TRUNC), "TRUNC") != 0) return "TRUNC";
    if (std::strcmp(ggml_glu_op_name(GGML_GLU_OP_SWIGLU_CLAMP), "SWIGLU_CLAMP") != 0) return "SWIGLU_CLAMP";
    return ggml_tensor_overhead() == sizeof(ggml_tensor) + sizeof(void *) * 4 ? nullptr : "size of a tensor";
}

// The loaded library or program that has the address. NULL: there is none.
static const link_map *holder(const void *address) {
    Dl_info info;
    void *map = nullptr;
    return dladdr1(address, &info, &map, RTLD_DL_LINKMAP) ? static_cast<link_map *>(map) : nullptr;
}

bool bind(const void *caller) {
    const link_map *map = holder(caller);  // a program's name is empty in it
    void *library = map ? dlopen(*map->l_name ? map->l_name : nullptr, RTLD_LAZY | RTLD_NOLOAD) : nullptr;
    if (served && library != served) say("a second ggml in this process asks; the first one is served");
    if (served) return library == served;
    const char *missing = nullptr;
#define X(name) if (!library || !(zinc_##name = dlsym(library, #name))) missing = #name;
    FUNCTIONS(X)
#undef X
    // The registry's functions are in the library that loads back ends. A program whose inner ggml exports nothing
    // would otherwise get the functions of another library.
    if (!missing && holder(zinc_ggml_backend_dev_count) != map) missing = "its own ggml_backend_dev_count";
    if (missing) return say("got a ggml without %s, expected ggml 0.%d to 0.%d as a shared library that exports its "
                            "functions", missing, FIRST_MINOR, LAST_MINOR), false;
    int major = -1, minor = -1;
    std::sscanf(ggml_version(), "%d.%d", &major, &minor);
    bound = nullptr;
    for (const Interface &interface : INTERFACES)
        if (!bound && dlsym(library, interface.mark)) bound = &interface;
    if (!bound) return say("got ggml %s, whose interface is unknown; take a release", ggml_version()), false;
    if (major != 0 || minor < FIRST_MINOR || minor > LAST_MINOR)
        return say("got ggml %s, expected 0.%d to 0.%d; take a llama.cpp with one of these", ggml_version(),
                   FIRST_MINOR, LAST_MINOR), false;
    const char *other = difference();
    if (other)
        return say("got ggml %s, whose %s is not that of the headers here; take another build", ggml_version(), other),
               false;
    served = library;
    return true;
}

}  // namespace zinc
