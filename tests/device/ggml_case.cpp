// FLASH_ATTN_EXT of a ggml device over given bytes, for test_llama.py: lines on stdin, a line of each on stdout.
//   DEVICE FILE k_dims v_dims kv_heads group streams cells rows mask sinks max_bias softcap scale k_type v_type
//   layout latent
// FILE has the bytes of q, k, v, mask and sinks, as many of them as the case has; FILE.out gets those of the result.
// layout: heads (cells behind them); cells (heads behind them); written (the same of float16, whose cells are then
// written with what they hold, from cell 3 on every seventh, while another cache is written backwards); or a way of
// cells that no kernel reads: one (root for K and V), short (rows of the root), still (the heads of a cell are at one
// place).  Answers: done, declined, or failed.
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iostream>
#include <sstream>
#include <string>
#include <vector>

#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml.h"

struct Case {
    std::string device, file, k_type, v_type, layout;
    int64_t k_dims, v_dims, kv_heads, group, streams, cells, rows;
    int mask, sinks, latent;
    float max_bias, softcap, scale;
};

static ggml_type type_of(const std::string &name) {
    for (int i = 0; i < GGML_TYPE_COUNT; ++i)
        if (ggml_type_name(ggml_type(i)) && name == ggml_type_name(ggml_type(i))) return ggml_type(i);
    return GGML_TYPE_COUNT;
}

// K or V (dims, cells, kv_heads, streams), a view of a larger root, or of the given one.
static ggml_tensor *cache_tensor(ggml_context *context, const Case &c, ggml_type type, int64_t dims, ggml_tensor *of) {
    const int64_t room = 2 * c.cells;
    if (c.layout == "heads") {
        ggml_tensor *root = ggml_new_tensor_4d(context, type, dims, room, c.kv_heads, c.streams);
        return ggml_view_4d(context, root, dims, c.cells, c.kv_heads, c.streams, root->nb[1], root->nb[2], root->nb[3],
                            0);
    }
    ggml_tensor *root = of ? of : ggml_new_tensor_4d(context, type, dims, c.kv_heads, room, c.streams);
    if (c.layout == "written") {
        root = ggml_new_tensor_2d(context, type, dims * c.kv_heads, room);
        return ggml_view_4d(context, root, dims, c.cells, c.kv_heads, 1, root->nb[1], ggml_row_size(type, dims),
                            root->nb[2], 0);
    }
    size_t offset = of ? root->nb[2] * size_t(c.cells) : 0, head = c.layout == "still" ? 0 : root->nb[1];
    if (c.layout == "short") root = ggml_new_tensor_4d(context, type, dims / 2, 2 * c.kv_heads, room, c.streams);
    if (c.layout == "short") root = ggml_reshape_4d(context, root, dims, c.kv_heads, room, c.streams);
    return ggml_view_4d(context, root, dims, c.cells, c.kv_heads, c.streams, root->nb[2], head, root->nb[3], offset);
}

static const ggml_tensor *root_of(const ggml_tensor *tensor) { return tensor->view_src ? tensor->view_src : tensor; }

// Writes to the cells of a root: the tensor of the rows, and that of the cells' numbers.
struct Writes {
    ggml_tensor *root, *rows, *numbers, *op;
};

static Writes writes_to(ggml_context *context, const Case &c, ggml_tensor *root) {
    Writes w{root, ggml_new_tensor_2d(context, root->type, root->ne[0], c.cells),
             ggml_new_tensor_1d(context, GGML_TYPE_I64, c.cells), nullptr};
    w.op = ggml_set_rows(context, root, w.rows, w.numbers);
    return w;
}

static void fill(const Case &c, const Writes &w, bool backwards) {
    for (int64_t i = 0; i < c.cells; ++i) {
        const int64_t at = backwards ? c.cells - 1 - i : i, cell = (3 + 7 * at) % c.cells;
        static_cast<int64_t *>(w.numbers->data)[i] = cell;
        std::memcpy(static_cast<char *>(w.rows->data) + i * w.rows->nb[1],
                    static_cast<char *>(w.root->data) + cell * w.root->nb[1], w.rows->nb[1]);
    }
}

static std::string run(const Case &c) {
    ggml_backend_dev_t device = ggml_backend_dev_by_name(c.device.c_str());
    if (!device) return "no device";
    ggml_context *context = ggml_init({ggml_tensor_overhead() * 32 + ggml_graph_overhead(), nullptr, true});
    int64_t heads = c.kv_heads * c.group;
    ggml_tensor *q_root = ggml_new_tensor_4d(context, GGML_TYPE_F32, c.k_dims, heads, c.rows, c.streams);
    ggml_tensor *q = ggml_permute(context, q_root, 0, 2, 1, 3);
    ggml_tensor *k = cache_tensor(context, c, type_of(c.k_type), c.k_dims, nullptr);
    ggml_tensor *v = c.latent ? ggml_view_4d(context, k, c.v_dims, c.cells, c.kv_heads, c.streams, k->nb[1], k->nb[2],
                                             k->nb[3], 0)
                              : cache_tensor(context, c, type_of(c.v_type), c.v_dims,
                                             c.layout == "one" ? k->view_src : nullptr);
    ggml_tensor *mask = c.mask ? ggml_new_tensor_4d(context, GGML_TYPE_F16, c.cells, c.rows, 1, c.streams) : nullptr;
    ggml_tensor *sinks = c.sinks ? ggml_new_tensor_1d(context, GGML_TYPE_F32, heads) : nullptr;
    ggml_tensor *out = ggml_flash_attn_ext(context, q, k, v, mask, c.scale, c.max_bias, c.softcap);
    if (sinks) ggml_flash_attn_ext_add_sinks(out, sinks);
    std::vector<Writes> writes;
    if (c.layout == "written") {
        ggml_tensor *other = ggml_new_tensor_2d(context, k->type, k->view_src->ne[0], 2 * c.cells);
        for (ggml_tensor *root : {other, k->view_src, v->view_src}) writes.push_back(writes_to(context, c, root));
    }
    std::string answer = "declined";
    if (ggml_backend_dev_supports_op(device, out)) {
        ggml_backend_t backend = ggml_backend_dev_init(device, nullptr);
        ggml_backend_buffer_t buffer = ggml_backend_alloc_ctx_tensors(context, backend);
        std::ifstream in(c.file, std::ios::binary);
        std::vector<const ggml_tensor *> given = {q_root, root_of(k)};
        if (!c.latent) given.push_back(root_of(v));
        if (mask) given.push_back(mask);
        if (sinks) given.push_back(sinks);
        for (const ggml_tensor *tensor : given) {
            std::vector<char> bytes(ggml_nbytes(tensor));
            in.read(bytes.data(), std::streamsize(bytes.size()));
            ggml_backend_tensor_set(const_cast<ggml_tensor *>(tensor), bytes.data(), 0, bytes.size());
        }
        ggml_cgraph *graph = ggml_new_graph(context);
        for (size_t i = 0; i < writes.size(); ++i) fill(c, writes[i], i == 0);
        for (const Writes &w : writes) ggml_build_forward_expand(graph, w.op);
        ggml_build_forward_expand(graph, out);
        answer = in && ggml_backend_graph_compute(backend, graph) == GGML_STATUS_SUCCESS ? "done" : "failed";
        std::vector<char> bytes(ggml_nbytes(out));
        ggml_backend_tensor_get(out, bytes.data(), 0, bytes.size());
        std::ofstream(c.file + ".out", std::ios::binary).write(bytes.data(), std::streamsize(bytes.size()));
        ggml_backend_buffer_free(buffer);
        ggml_backend_free(backend);
    }
    ggml_free(context);
    return answer;
}

int main() {
    ggml_backend_load_all();
    for (std::string line; std::getline(std::cin, line);) {
        std::istringstream in(line);
        Case c;
        in >> c.device >> c.file >> c.k_dims >> c.v_dims >> c.kv_heads >> c.group >> c.streams >> c.cells >> c.rows >>
            c.mask >> c.sinks >> c.max_bias >> c.softcap >> c.scale >> c.k_type >> c.v_type >> c.layout >> c.latent;
        std::printf("%s\n", in ? run(c).c_str() : "no case");
        std::fflush(stdout);
    }
}
