// The lists of native/ggml for operations that differ in one field, without a device, for test_llama.py.  Prints a line
// for each field that the key of a plan does not hold, and for lists that are another operation's; then "done".
#include <cstdio>
#include <cstring>
#include <string>

#include "memory.h"
#include "plan.h"
#include "set_rows.h"

namespace zinc {

const ggml_tensor *root_of(const ggml_tensor *tensor) { return tensor->view_src ? tensor->view_src : tensor; }
za_dtype storage_type(ggml_type type) { return type == GGML_TYPE_F16 ? ZA_F16 : ZA_AS_K; }

}  // namespace zinc

using namespace zinc;

// Calls fn(name) with each field of a tensor changed in turn.
template <typename Function>
static void with_changes(const char *tensor, ggml_tensor *t, Function fn) {
    auto changed = [&](const char *field, int i, auto *value) {
        const auto kept = *value;
        std::memset(value, 1, sizeof *value);
        fn((std::string(tensor) + "." + field + " " + std::to_string(i)).c_str());
        *value = kept;
    };
    changed("type", 0, &t->type);
    for (int i = 0; i < GGML_MAX_DIMS; ++i) changed("ne", i, &t->ne[i]);
    for (int i = 0; i < GGML_MAX_DIMS; ++i) changed("nb", i, &t->nb[i]);
    if (t->view_src) changed("view_offs", 0, &t->view_offs);
    for (size_t i = 0; t->op == GGML_OP_FLASH_ATTN_EXT && i < sizeof t->op_params / sizeof *t->op_params; ++i)
        changed("op_params", int(i), &t->op_params[i]);
}

int main() {
    ggml_context *context = ggml_init({size_t(1) << 24, nullptr, false});
    auto cache = [&] { return ggml_new_tensor_3d(context, GGML_TYPE_F16, 64, 2, 32); };
    ggml_tensor *k_root = cache(), *v_root = cache();
    auto view = [&](ggml_tensor *root) {
        return ggml_permute(context, ggml_view_3d(context, root, 64, 2, 8, root->nb[1], root->nb[2], 0), 0, 2, 1, 3);
    };
    ggml_tensor *q = ggml_new_tensor_3d(context, GGML_TYPE_F32, 64, 2, 4), *k = view(k_root), *v = view(v_root);
    ggml_tensor *mask = ggml_new_tensor_2d(context, GGML_TYPE_F16, 8, 4);
    ggml_tensor *sinks = ggml_new_tensor_1d(context, GGML_TYPE_F32, 4);
    ggml_tensor *op = ggml_flash_attn_ext(context, q, k, v, mask, 0.125f, 0, 0);
    ggml_flash_attn_ext_add_sinks(op, sinks);

    const std::vector<uint64_t> key = key_of(op);
    auto compare = [&](const char *field) {
        if (key_of(op) == key) std::printf("not in the key: %s\n", field);
    };
    struct { const char *name; ggml_tensor *tensor; } tensors[] = {
        {"out", op},     {"q", q},         {"k", k},           {"v", v},
        {"mask", mask},  {"sinks", sinks}, {"k_root", k_root}, {"v_root", v_root}};
    for (auto &each : tensors) with_changes(each.name, each.tensor, compare);
    for (int i = 3; i < 5; ++i) {  // mask and sinks may be missing
        ggml_tensor *kept = op->src[i];
        op->src[i] = nullptr;
        compare(i == 3 ? "a mask" : "sinks");
        op->src[i] = kept;
    }

    // Two rows of eight keys, whose mask has room for four rows, or for sixteen keys: of the same bytes.
    Plan plan;
    Operation o;
    std::vector<uint32_t> counts;
    uint16_t *words = static_cast<uint16_t *>(mask->data);
    for (int i = 0; i < 32; ++i) words[i] = i < 9 || i >= 16 ? 0 : 0xFC00;
    for (int cells : {8, 16, 8}) {
        mask->ne[0] = cells, mask->ne[1] = 32 / cells, mask->nb[1] = size_t(2 * cells);
        if (!read_operation(op, &o) || !plan.make(op, o, nullptr)) std::printf("not taken\n");
        for (const RowKeys &row : plan.lists().rows) counts.push_back(uint32_t(row.count));
    }
    if (counts != std::vector<uint32_t>{8, 1, 8, 8, 8, 1}) std::printf("lists of another mask\n");

    WriteOrder order(32);
    auto first = [&](const WriteOrder *given) { return plan.make(op, o, given) ? plan.lists().pages[0] : 99; };
    bool moves = first(&order) == 0 && (order.write(0), first(&order)) == 2 && first(nullptr) == 0;
    if (!moves) std::printf("cells in another order\n");
    words[0] = 0xFC00;
    if (first(nullptr) != 2) std::printf("another mask\n");
    words[0] = 0x7E00;
    if (plan.make(op, o, nullptr)) std::printf("a mask with a NaN\n");
    std::printf("done\n");
}
