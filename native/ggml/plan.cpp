#include "plan.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "memory.h"

namespace zinc {

// --- reading an operation --------------------------------------------------------------------------------------------

constexpr uint64_t MOST_KEYS = uint64_t(1) << 24;  // that a request of the C library may have

static za_dtype storage_type(ggml_type type) {
    switch (type) {
#define X(name) case GGML_TYPE_##name: return ZA_##name;
        X(F32) X(F16) X(BF16) X(Q8_0) X(Q5_1) X(Q5_0) X(Q4_1) X(Q4_0) X(IQ4_NL)
#undef X
        default: return ZA_AS_K;  // none
    }
}

std::string refused_type(const Device &device, const ggml_tensor *kept) {
    if (device.arithmetic != ZA_INTEGER || za_storage[storage_type(kept->type)].halves == 1) return "";
    return std::string(kept->name) + ": got type " + ggml_type_name(kept->type) + " with ZINC_ATTN_ARITHMETIC=integer, "
           "expected q8_0, q5_0, q4_0 or iq4_nl (-ctk q8_0 -ctv q8_0)";
}

static bool read_storage(const ggml_tensor *t, Kept *kept) {
    *kept = {storage_type(t->type), uint32_t(ggml_row_size(t->type, t->ne[0]))};
    return kept->type != ZA_AS_K;
}

static size_t offset_of(const ggml_tensor *t) { return t->view_src ? t->view_offs : 0; }

// False if a stride is no multiple of a row's bytes, or if a row of the root is no whole number of rows.
static bool read_rows(const ggml_tensor *t, const ggml_tensor *root, Rows *rows) {
    size_t bytes = ggml_row_size(t->type, t->ne[0]), offset = offset_of(t);
    if (t->nb[0] != ggml_type_size(t->type) || ggml_row_size(root->type, root->ne[0]) % bytes) return false;
    if (offset % bytes || t->nb[1] % bytes || t->nb[2] % bytes || t->nb[3] % bytes) return false;
    uint64_t head = t->ne[2] > 1 ? t->nb[2] / bytes : 1, stream = t->ne[3] > 1 ? t->nb[3] / bytes : 0;
    *rows = {offset / bytes, t->nb[1] / bytes, head, stream};
    return head > 0;
}

static bool is_latent(const Operation &o) {
    const ggml_tensor *k = o.k, *v = o.v;
    return o.k_root == o.v_root && offset_of(k) == offset_of(v) && k->type == v->type && v->ne[0] <= k->ne[0] &&
           std::equal(k->nb, k->nb + 4, v->nb);
}

static bool numbers_fit(const Operation &o) {
    float scale = std::fabs(o.scale), cap = o.softcap;
    return scale >= 0x1p-126f && scale <= 0x1p126f && (cap == 0 || (cap >= 0x1p-40f && cap <= 0x1p60f)) &&
           o.max_bias >= 0;
}

static bool shapes_fit(const ggml_tensor *op, const Operation &o) {
    const ggml_tensor *q = o.q, *k = o.k, *v = o.v, *mask = o.mask, *sinks = o.sinks;
    if (q->type != GGML_TYPE_F32 || q->nb[0] != sizeof(float) || uint64_t(k->ne[1]) > MOST_KEYS) return false;
    if (op->type != GGML_TYPE_F32 || !ggml_is_contiguous(op) || q->ne[0] != k->ne[0]) return false;
    if (k->ne[2] != v->ne[2] || q->ne[2] % k->ne[2] || k->ne[3] != q->ne[3] || v->ne[3] != q->ne[3]) return false;
    if (mask && (mask->type != GGML_TYPE_F16 || mask->nb[0] != 2 || mask->ne[0] < k->ne[1] || mask->ne[1] < q->ne[1] ||
                 mask->ne[2] != 1 || q->ne[3] % mask->ne[3])) return false;
    return !sinks || (sinks->type == GGML_TYPE_F32 && ggml_is_contiguous(sinks) && sinks->ne[0] == q->ne[2]);
}

static const ggml_tensor *source_in_cache(const ggml_tensor *t) {
    const ggml_tensor *source = t->op == GGML_OP_CPY ? t->src[0] : t;
    return std::equal(t->ne, t->ne + GGML_MAX_DIMS, source->ne) ? source : t;
}

// K and V of a cell are in rows of the same number. The C library takes this number as a page id.
static bool places_fit(Operation *o) {
    Rows v_rows;
    if (!read_rows(o->k, o->k_root, &o->k_rows) || !read_rows(o->cache_k, root_of(o->cache_k), &o->cache_rows))
        return false;
    uint64_t rows = ggml_nbytes(o->k_root) / o->kind.k.row;
    if (!o->kind.latent) {
        if (o->k_root == o->v_root || !read_rows(o->v, o->v_root, &v_rows) || !(v_rows == o->k_rows)) return false;
        rows = std::min<uint64_t>(rows, ggml_nbytes(o->v_root) / o->kind.v.row);
    }
    o->pages = uint32_t(rows - (o->kind.kv_heads - 1) * o->k_rows.head);
    return rows <= UINT32_MAX;
}

bool read_operation(const ggml_tensor *op, Operation *o) {
    const ggml_tensor *q = op->src[0], *k = op->src[1], *v = op->src[2];
    float numbers[3];
    std::memcpy(numbers, op->op_params, sizeof numbers);
    *o = {q, k, v, op->src[3], op->src[4], root_of(k), root_of(v), numbers[0], numbers[1], numbers[2],
          uint32_t(q->ne[1]), uint32_t(k->ne[1]), uint32_t(q->ne[3]), {}, source_in_cache(k), source_in_cache(v), {}, 0,
          {}};
    o->kind = {uint32_t(q->ne[2]), uint32_t(k->ne[2]), uint32_t(k->ne[0]), uint32_t(v->ne[0]), is_latent(*o), {}, {}};
    return read_storage(k, &o->kind.k) && read_storage(v, &o->kind.v) && shapes_fit(op, *o) && numbers_fit(*o) &&
           places_fit(o);
}

std::vector<uint64_t> key_of(const ggml_tensor *op) {
    const ggml_tensor *k = root_of(op->src[1]), *v = root_of(op->src[2]);
    std::vector<uint64_t> key;
    key.reserve(128);
    key.assign(op->op_params, op->op_params + sizeof op->op_params / sizeof *op->op_params);
    for (const ggml_tensor *t : {op, (const ggml_tensor *)op->src[0], (const ggml_tensor *)op->src[1],
                                 (const ggml_tensor *)op->src[2], (const ggml_tensor *)op->src[3],
                                 (const ggml_tensor *)op->src[4], k, v}) {
        key.push_back(t ? uint64_t(t->type) : uint64_t(GGML_TYPE_COUNT));
        if (!t) continue;
        key.insert(key.end(), t->ne, t->ne + GGML_MAX_DIMS);
        key.insert(key.end(), t->nb, t->nb + GGML_MAX_DIMS);
        key.push_back(offset_of(t));
    }
    return key;
}

}  // namespace zinc
