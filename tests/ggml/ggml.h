// As much of ggml's interface as native/ggml uses, so that it is tested where no llama.cpp is built: the names and
// their meaning are ggml's, all else is not.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

enum ggml_type {
    GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_BF16, GGML_TYPE_Q8_0, GGML_TYPE_Q5_1, GGML_TYPE_Q5_0, GGML_TYPE_Q4_1,
    GGML_TYPE_Q4_0, GGML_TYPE_IQ4_NL, GGML_TYPE_I32, GGML_TYPE_I64, GGML_TYPE_COUNT, GGML_TYPE_I16, GGML_TYPE_I8,
    GGML_TYPE_MXFP4, GGML_TYPE_Q2_K, GGML_TYPE_Q3_K, GGML_TYPE_Q4_K, GGML_TYPE_Q5_K, GGML_TYPE_Q6_K, GGML_TYPE_IQ4_XS
};
enum ggml_op {
    GGML_OP_NONE, GGML_OP_VIEW, GGML_OP_RESHAPE, GGML_OP_PERMUTE, GGML_OP_TRANSPOSE, GGML_OP_SET_ROWS,
    GGML_OP_FLASH_ATTN_EXT, GGML_OP_MUL_MAT, GGML_OP_CPY, GGML_OP_CONT, GGML_OP_DUP, GGML_OP_CONCAT, GGML_OP_SET,
    GGML_OP_REPEAT, GGML_OP_PAD, GGML_OP_ROLL, GGML_OP_GET_ROWS, GGML_OP_MUL_MAT_ID, GGML_OP_ADD,
    GGML_OP_GATED_DELTA_NET, GGML_OP_SUB, GGML_OP_MUL, GGML_OP_DIV, GGML_OP_GLU, GGML_OP_ADD_ID, GGML_OP_UNARY,
    GGML_OP_SCALE, GGML_OP_CLAMP, GGML_OP_SQR, GGML_OP_SQRT, GGML_OP_LOG, GGML_OP_SIN, GGML_OP_COS, GGML_OP_LEAKY_RELU,
    GGML_OP_FILL, GGML_OP_RMS_NORM, GGML_OP_NORM, GGML_OP_L2_NORM, GGML_OP_GROUP_NORM, GGML_OP_SUM_ROWS, GGML_OP_MEAN,
    GGML_OP_SUM, GGML_OP_SOFT_MAX, GGML_OP_ROPE, GGML_OP_ROPE_BACK, GGML_OP_ARGSORT, GGML_OP_TOP_K, GGML_OP_SSM_CONV,
    GGML_OP_SSM_SCAN, GGML_OP_COUNT
};
enum ggml_unary_op {
    GGML_UNARY_OP_SILU = 10, GGML_UNARY_OP_XIELU = 17, GGML_UNARY_OP_TRUNC = 21, GGML_UNARY_OP_COUNT
};
enum ggml_glu_op { GGML_GLU_OP_SWIGLU_CLAMP = 6, GGML_GLU_OP_COUNT };
enum ggml_sort_order { GGML_SORT_ORDER_ASC, GGML_SORT_ORDER_DESC };
enum {
    GGML_ROPE_TYPE_NORMAL = 0, GGML_ROPE_TYPE_NEOX = 2, GGML_ROPE_TYPE_MROPE = 8, GGML_ROPE_TYPE_VISION = 24,
    GGML_ROPE_TYPE_IMROPE = 40
};
enum { GGML_PREC_F32 = 10, GGML_PREC_Q8 = 20 };
enum ggml_status { GGML_STATUS_ALLOC_FAILED = -2, GGML_STATUS_FAILED, GGML_STATUS_SUCCESS };
enum ggml_backend_buffer_usage {
    GGML_BACKEND_BUFFER_USAGE_ANY, GGML_BACKEND_BUFFER_USAGE_WEIGHTS, GGML_BACKEND_BUFFER_USAGE_COMPUTE
};
enum { GGML_TENSOR_FLAG_OUTPUT = 2 };
enum ggml_backend_dev_type {
    GGML_BACKEND_DEVICE_TYPE_CPU, GGML_BACKEND_DEVICE_TYPE_GPU, GGML_BACKEND_DEVICE_TYPE_ACCEL
};
enum { GGML_BACKEND_API_VERSION = 2, GGML_MAX_DIMS = 4, GGML_MAX_OP_PARAMS = 64, GGML_MAX_SRC = 10 };

typedef struct ggml_backend *ggml_backend_t;
typedef struct ggml_backend_device *ggml_backend_dev_t;
typedef struct ggml_backend_reg *ggml_backend_reg_t;
typedef struct ggml_backend_buffer *ggml_backend_buffer_t;
typedef struct ggml_backend_buffer_type *ggml_backend_buffer_type_t;
typedef uint8_t ggml_guid[16];

struct ggml_tensor {
    ggml_type type;
    int64_t ne[4];
    size_t nb[4];
    ggml_op op;
    int32_t op_params[GGML_MAX_OP_PARAMS / 4];
    ggml_tensor *src[GGML_MAX_SRC], *view_src;
    size_t view_offs;
    int32_t flags;
    void *data, *extra;
    ggml_backend_buffer_t buffer;
    char name[16];
};
struct ggml_cgraph {
    int n_nodes;
    ggml_tensor **nodes;
};

struct ggml_backend_buffer_i {
    void (*free_buffer)(ggml_backend_buffer_t), *(*get_base)(ggml_backend_buffer_t);
    ggml_status (*init_tensor)(ggml_backend_buffer_t, ggml_tensor *);
    void (*memset_tensor)(ggml_backend_buffer_t, ggml_tensor *, uint8_t, size_t, size_t);
    void (*set_tensor)(ggml_backend_buffer_t, ggml_tensor *, const void *, size_t, size_t);
    void (*get_tensor)(ggml_backend_buffer_t, const ggml_tensor *, void *, size_t, size_t);
    bool (*cpy_tensor)(ggml_backend_buffer_t, const ggml_tensor *, ggml_tensor *);
    void (*clear)(ggml_backend_buffer_t, uint8_t);
};
struct ggml_backend_buffer {
    ggml_backend_buffer_i iface;
    ggml_backend_buffer_type_t buft;
    void *context;
    size_t size;
    ggml_backend_buffer_usage usage;
};
struct ggml_backend_buffer_type {
    struct {
        const char *(*get_name)(ggml_backend_buffer_type_t);
        ggml_backend_buffer_t (*alloc_buffer)(ggml_backend_buffer_type_t, size_t);
        size_t (*get_alignment)(ggml_backend_buffer_type_t), (*get_max_size)(ggml_backend_buffer_type_t);
        size_t (*get_alloc_size)(ggml_backend_buffer_type_t, const ggml_tensor *);
        bool (*is_host)(ggml_backend_buffer_type_t);
    } iface;
    ggml_backend_dev_t device;
    void *context;
};
struct ggml_backend_graph_optimize_params {
    void (*add_alloc_dep)(void *, ggml_tensor *, ggml_tensor *);
    void *user_data;
};
struct ggml_backend_i {
    const char *(*get_name)(ggml_backend_t);
    void (*free)(ggml_backend_t);
    bool (*cpy_tensor_async)(ggml_backend_t, ggml_backend_t, const ggml_tensor *, ggml_tensor *);
    ggml_status (*graph_compute)(ggml_backend_t, ggml_cgraph *);
    void (*graph_optimize)(ggml_backend_t, ggml_cgraph *, ggml_backend_graph_optimize_params *);
};
struct ggml_backend {
    ggml_guid *guid;
    ggml_backend_i iface;
    ggml_backend_dev_t device;
    void *context;
};
struct ggml_backend_dev_props {
    const char *name, *description;
    size_t memory_free, memory_total;
    ggml_backend_dev_type type;
    struct { bool mmap_support; } caps;
};
struct ggml_backend_device {
    struct {
        const char *(*get_name)(ggml_backend_dev_t), *(*get_description)(ggml_backend_dev_t);
        void (*get_memory)(ggml_backend_dev_t, size_t *, size_t *);
        ggml_backend_dev_type (*get_type)(ggml_backend_dev_t);
        void (*get_props)(ggml_backend_dev_t, ggml_backend_dev_props *);
        ggml_backend_t (*init_backend)(ggml_backend_dev_t, const char *);
        ggml_backend_buffer_type_t (*get_buffer_type)(ggml_backend_dev_t), (*get_host_buffer_type)(ggml_backend_dev_t);
        bool (*supports_op)(ggml_backend_dev_t, const ggml_tensor *);
        bool (*supports_buft)(ggml_backend_dev_t, ggml_backend_buffer_type_t);
    } iface;
    ggml_backend_reg_t reg;
    void *context;
};
struct ggml_backend_reg {
    int api_version;
    struct {
        const char *(*get_name)(ggml_backend_reg_t);
        size_t (*get_device_count)(ggml_backend_reg_t);
        ggml_backend_dev_t (*get_device)(ggml_backend_reg_t, size_t);
        void *(*get_proc_address)(ggml_backend_reg_t, const char *);
    } iface;
    void *context;
};

size_t ggml_type_size(ggml_type type);  // of a block, or of a value
size_t ggml_row_size(ggml_type type, int64_t n);
extern "C" {
const char *ggml_version(), *ggml_type_name(ggml_type), *ggml_op_name(ggml_op), *ggml_unary_op_name(ggml_unary_op);
const char *ggml_glu_op_name(ggml_glu_op);
size_t ggml_tensor_overhead();
}
int64_t ggml_blck_size(ggml_type type);
inline bool ggml_is_quantized(ggml_type type) { return ggml_blck_size(type) > 1; }
inline int64_t ggml_nrows(const ggml_tensor *t) { return t->ne[1] * t->ne[2] * t->ne[3]; }
inline int64_t ggml_nelements(const ggml_tensor *t) { return t->ne[0] * ggml_nrows(t); }
inline size_t ggml_nbytes(const ggml_tensor *t) {
    size_t bytes = ggml_row_size(t->type, t->ne[0]);
    for (int i = 1; i < 4; ++i) bytes += size_t(t->ne[i] - 1) * t->nb[i];
    return bytes;
}
inline bool ggml_is_contiguous(const ggml_tensor *t) {
    return ggml_nbytes(t) == size_t(ggml_nrows(t)) * ggml_row_size(t->type, t->ne[0]) &&
           std::is_sorted(t->nb, t->nb + 4);
}
inline ggml_backend_buffer_t ggml_backend_buffer_init(ggml_backend_buffer_type_t type, ggml_backend_buffer_i iface,
                                                      void *context, size_t size) {
    return new ggml_backend_buffer{iface, type, context, size, GGML_BACKEND_BUFFER_USAGE_ANY};
}
inline void *ggml_backend_buffer_get_base(ggml_backend_buffer_t buffer) { return buffer->iface.get_base(buffer); }
ggml_backend_buffer_type_t ggml_backend_cpu_buffer_type();
size_t ggml_backend_dev_count();
ggml_backend_dev_t ggml_backend_dev_get(size_t);
inline bool ggml_is_empty(const ggml_tensor *t) { return ggml_nelements(t) == 0; }
inline bool ggml_are_same_shape(const ggml_tensor *a, const ggml_tensor *b) {
    return std::equal(a->ne, a->ne + 4, b->ne);
}
inline bool ggml_are_same_stride(const ggml_tensor *a, const ggml_tensor *b) {
    return std::equal(a->nb, a->nb + 4, b->nb);
}
inline ggml_unary_op ggml_get_unary_op(const ggml_tensor *t) { return ggml_unary_op(t->op_params[0]); }
inline ggml_glu_op ggml_get_glu_op(const ggml_tensor *t) { return ggml_glu_op(t->op_params[0]); }
inline const char *ggml_op_desc(const ggml_tensor *t) {
    return t->op == GGML_OP_SET_ROWS ? "SET_ROWS" : "FLASH_ATTN_EXT";
}
inline int ggml_node_get_use_count(const ggml_cgraph *graph, int i) {
    int uses = 0;
    for (int j = 0; j < graph->n_nodes; ++j)
        for (const ggml_tensor *source : graph->nodes[j]->src) uses += source == graph->nodes[i];
    return uses;
}
inline int ggml_graph_n_nodes(const ggml_cgraph *graph) { return graph->n_nodes; }
inline ggml_tensor *ggml_graph_node(const ggml_cgraph *graph, int i) {
    return graph->nodes[i < 0 ? graph->n_nodes + i : i];
}
