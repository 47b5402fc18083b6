#include "places.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <set>

#include "recording.h"
#include "say.h"

namespace zinc {

static bool is_weights(const ggml_tensor *root) {
    return root->buffer && root->buffer->usage == GGML_BACKEND_BUFFER_USAGE_WEIGHTS;
}

static void say_shared(const ggml_tensor *tensor, const char *what) {
    if (said_once()) return;
    say_once("another device has a part of the model (" + std::string(tensor->name) + what + "); logits may depend on "
             "the batch: expected " + (processor ? "--device ZINC0, and operations that it or ZINC_CPU serves"
                                                 : "-ngl 99 and no -ot, or libzinc_cpu.so beside libggml-zinc.so"));
}

static char computed_here;  // the `extra` of nodes that the back end computed points to this byte

static bool is_made_here(const ggml_tensor *t) {
    while (is_view(t) && t->op != GGML_OP_NONE) t = t->src[0];
    return t->op == GGML_OP_NONE || t->extra == &computed_here;
}

// Whether a tensor is rows of weights, or a multiple of such rows.
static bool is_looked_up(const ggml_tensor *t) {
    while (t->op == GGML_OP_SCALE || (is_view(t) && t->op != GGML_OP_NONE)) t = t->src[0];
    return t->op == GGML_OP_NONE || (t->op == GGML_OP_GET_ROWS && is_weights(root_of(t->src[0])));
}

// Weights without bytes are no weights of a model yet: llama.cpp asks with them while it chooses a device.
void note_operation(const ggml_tensor *op) {
    for (int i = 0; i < GGML_MAX_SRC && op->op != GGML_OP_GET_ROWS; ++i) {
        const ggml_tensor *root = op->src[i] ? root_of(op->src[i]) : op;
        if (is_weights(root) && is_elsewhere(root) && root->data) say_shared(root, " is there");
    }
}

void note_input(const ggml_tensor *source) {
    if (!is_made_here(source) && !is_looked_up(source)) say_shared(source, " is made there");
}

void note_read(const ggml_tensor *tensor, const void *to) {
    if (holding(to)) return;
    const bool computed = root_of(tensor)->op != GGML_OP_NONE && !(tensor->flags & GGML_TENSOR_FLAG_OUTPUT);
    if (computed && tensor->buffer->usage == GGML_BACKEND_BUFFER_USAGE_COMPUTE)
        say_shared(tensor, " goes there");
}

void note_graph(ggml_cgraph *graph) {
    static std::atomic<bool> said{false};
    static std::atomic<int> operations{0}, attention{0};  // of all parts of a model's graph
    bool weights = false, output = false;
    int new_operations = 0, new_attention = 0;
    for (int i = 0; i < ggml_graph_n_nodes(graph); ++i) {
        ggml_tensor *node = ggml_graph_node(graph, i);
        if (node->extra == &computed_here) continue;  // the graph is computed again, and nothing new can be said
        new_operations += !is_view(node);
        new_attention += node->op == GGML_OP_FLASH_ATTN_EXT;
        output |= bool(node->flags & GGML_TENSOR_FLAG_OUTPUT);
        for (const ggml_tensor *source : node->src)
            if (source && source != node) {  // ggml_cast makes its result an operand of itself
                weights |= is_weights(root_of(source));
                note_input(source);
            }
        node->extra = &computed_here;
    }
    operations += new_operations;
    attention += new_attention;
    if (weights && output && !said_once() && !said.exchange(true))
        say("the model is here whole but for the look-up of tokens (%d operations, %d of attention): the promise "
            "holds", operations.load(), attention.load());
}

// Whether a node may sum over tokens. Products with weights or with a cache do not.
static bool may_mix(const ggml_tensor *node) {
    auto kept = [](const ggml_tensor *t) { return is_weights(root_of(t)) || is_cache(root_of(t)); };
    if (node->op == GGML_OP_SUM_ROWS || node->op == GGML_OP_MEAN || node->op == GGML_OP_SUM) return true;
    return node->op == GGML_OP_MUL_MAT && !kept(node->src[0]) && !kept(node->src[1]);
}

// The name of the sum, or of its first operand, or "". Names that ggml gave to nameless tensors do not count: they have
// other numbers in each graph.
static std::string label(const ggml_tensor *sum) {
    for (const ggml_tensor *t : {sum, static_cast<const ggml_tensor *>(sum->src[0])})
        if (t->name[0] && std::strncmp(t->name, "node_", 5) && std::strncmp(t->name, "leaf_", 5)) return t->name;
    return "";
}

void note_sums(const ggml_cgraph *graph, std::map<std::string, int64_t> *terms) {
    std::set<std::string> seen;
    for (int i = 0; i < graph->n_nodes; ++i) {
        const ggml_tensor *node = graph->nodes[i];
        const std::string name = may_mix(node) ? label(node) : "";
        if (name.empty() || !seen.insert(name).second) continue;
        const auto [before, added] = terms->emplace(name, node->src[0]->ne[0]);
        if (added || before->second == node->src[0]->ne[0]) continue;
        say_once("the model has sums over the tokens of a batch (" + name + "); logits depend on "
                 "the batch");
        return;
    }
}

}  // namespace zinc
