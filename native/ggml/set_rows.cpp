#include "set_rows.h"

#include <cmath>
#include <cstring>
#include <vector>

#include "memory.h"
#include "say.h"

namespace zinc {

constexpr float LEAST = 0x1p-40f, MOST = 0x1p60f, MOST_HALF = 65504.0f;  // magnitudes that kernels take

za_dtype storage_type(ggml_type type) {
    switch (type) {
        case GGML_TYPE_F32: return ZA_F32;
        case GGML_TYPE_F16: return ZA_F16;
        case GGML_TYPE_BF16: return ZA_BF16;
        case GGML_TYPE_Q8_0: return ZA_Q8_0;
        case GGML_TYPE_Q5_1: return ZA_Q5_1;
        case GGML_TYPE_Q5_0: return ZA_Q5_0;
        case GGML_TYPE_Q4_1: return ZA_Q4_1;
        case GGML_TYPE_Q4_0: return ZA_Q4_0;
        case GGML_TYPE_IQ4_NL: return ZA_IQ4_NL;
        default: return ZA_AS_K;
    }
}

bool set_rows_supported(const ggml_tensor *op) {
    const ggml_tensor *rows = op->src[0], *numbers = op->src[1], *root = root_of(op);
    const bool whole = op->ne[0] == root->ne[0];  // a transposed V is written value by value, and is the CPU's
    return whole && storage_type(op->type) != ZA_AS_K && (rows->type == GGML_TYPE_F32 || rows->type == GGML_TYPE_F16) &&
           rows->nb[0] == ggml_type_size(rows->type) &&
           (numbers->type == GGML_TYPE_I64 || numbers->type == GGML_TYPE_I32) && !is_elsewhere(root);
}

// The row as kernels take it: no NaN, nothing beyond the type, and +0 for what counts as 0.  False for the first two.
static bool clean_row(float *row, int64_t n, ggml_type type) {
    float most = type == GGML_TYPE_F32 || type == GGML_TYPE_BF16 ? MOST : MOST_HALF;  // a block's scales are float16
    bool good = true;
    for (int64_t i = 0; i < n; ++i) {
        float magnitude = std::fabs(row[i]);
        good = good && magnitude <= most;
        if (magnitude < LEAST) row[i] = 0;  // also in float16, whose least value is larger
    }
    return good;
}

static void decode_row(ggml_type type, const void *from, int64_t n, float *row) {
    if (type == GGML_TYPE_F32) std::memcpy(row, from, size_t(n) * sizeof(float));
    else ggml_get_type_traits(type)->to_float(from, row, n);
}

static void encode_row(const float *row, int64_t n, ggml_type type, void *to) {
    if (type == GGML_TYPE_F32) std::memcpy(to, row, size_t(n) * sizeof(float));
    else ggml_get_type_traits(type)->from_float_ref(row, to, n);
}

static int64_t number_of(const ggml_tensor *numbers, int64_t i, int64_t j, int64_t k) {
    const char *at = static_cast<const char *>(numbers->data) + size_t(i) * numbers->nb[0] +
                     size_t(j % numbers->ne[1]) * numbers->nb[1] + size_t(k % numbers->ne[2]) * numbers->nb[2];
    if (numbers->type == GGML_TYPE_I32) return *reinterpret_cast<const int32_t *>(at);
    return *reinterpret_cast<const int64_t *>(at);
}

ggml_status set_rows(ggml_tensor *op) {
    const ggml_tensor *rows = op->src[0], *numbers = op->src[1], *root = root_of(op);
    const int64_t n = rows->ne[0], count = rows->ne[1] * rows->ne[2] * rows->ne[3];
    const size_t cell_bytes = ggml_row_size(root->type, root->ne[0]);
    std::vector<float> row(static_cast<size_t>(n));
    for (int64_t at = 0; at < count; ++at) {
        int64_t i = at % rows->ne[1], j = at / rows->ne[1] % rows->ne[2], k = at / rows->ne[1] / rows->ne[2];
        int64_t number = number_of(numbers, i, j, k);
        if (number < 0 || number >= op->ne[1]) {
            say("SET_ROWS of %s: got row %lld, expected one below %lld", op->name, static_cast<long long>(number),
                static_cast<long long>(op->ne[1]));
            return GGML_STATUS_FAILED;
        }
        const char *from = static_cast<const char *>(rows->data) + size_t(i) * rows->nb[1] + size_t(j) * rows->nb[2] +
                           size_t(k) * rows->nb[3];
        decode_row(rows->type, from, n, row.data());
        if (!clean_row(row.data(), n, op->type)) {
            say("SET_ROWS of %s: row %lld has a value that is NaN or beyond %s; use another cache type", op->name,
                static_cast<long long>(number), ggml_type_name(op->type));
            return GGML_STATUS_FAILED;
        }
        size_t offset = size_t(number) * op->nb[1] + size_t(j) * op->nb[2] + size_t(k) * op->nb[3];
        char *to = static_cast<char *>(op->data) + offset;
        encode_row(row.data(), n, op->type, to);
        note_write(root, uint32_t(size_t(to - static_cast<char *>(root->data)) / cell_bytes));
    }
    return GGML_STATUS_SUCCESS;
}

}  // namespace zinc
