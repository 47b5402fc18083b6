#include "schedule.h"

#include <algorithm>
#include <unordered_set>

#include "ggml-impl.h"
#include "places.h"
#include "recording.h"
#include "say.h"

namespace zinc {

constexpr size_t SMALL = size_t(256) << 10;  // the most bytes of a small result
constexpr int KEPT = 128;                    // nodes, at least, that do not reuse a small result's memory

namespace {

class Schedule {
  public:
    explicit Schedule(ggml_cgraph *graph) : graph_(graph), waiting_(graph->nodes, graph->nodes + graph->n_nodes) {
        for (ggml_tensor *node : waiting_) {
            if (node->view_src && !is_view(node)) changed_.insert(root_of(node));
            used_.insert(node->src, node->src + GGML_MAX_SRC);
        }
    }

    // Nodes that write to a part of another tensor keep their order, as do nodes that read such a tensor, and nodes
    // whose results no node of the graph uses.
    std::vector<ggml_tensor *> nodes() {
        for (int i = 0; i < graph_->n_nodes; ++i)
            if (is_fixed(graph_->nodes[i])) put(graph_->nodes[i]);
        return std::move(ordered_);
    }

  private:
    bool is_fixed(const ggml_tensor *node) const {
        auto changed = [this](const ggml_tensor *t) { return t && changed_.count(root_of(t)); };
        return !used_.count(node) || changed(node) || std::any_of(node->src, node->src + GGML_MAX_SRC, changed);
    }

    void put(ggml_tensor *node) {
        if (!waiting_.erase(node)) return;
        for (int i = GGML_MAX_SRC; i-- > 0;)
            if (node->src[i]) put(node->src[i]);
        ordered_.push_back(node);
    }

    ggml_cgraph *graph_;
    std::unordered_set<ggml_tensor *> waiting_;
    std::unordered_set<const ggml_tensor *> changed_, used_;
    std::vector<ggml_tensor *> ordered_;
};

}  // namespace

void schedule(ggml_backend_t backend, ggml_cgraph *graph, ggml_backend_graph_optimize_params *params) try {
    note_sums(graph, &static_cast<Plan *>(backend->context)->terms);
    const std::vector<ggml_tensor *> nodes = Schedule(graph).nodes();
    std::copy(nodes.begin(), nodes.end(), graph->nodes);
    for (int i = 0; i < graph->n_nodes; ++i) {
        ggml_tensor *node = graph->nodes[i], *until = graph->nodes[std::min((i / KEPT + 2) * KEPT, graph->n_nodes) - 1];
        if (!node->view_src && !is_view(node) && ggml_nbytes(node) <= SMALL)
            params->add_alloc_dep(params->user_data, node, until);
    }
} catch (const std::exception &error) {
    // No exception may pass through ggml's C frames. In ggml's order of nodes the bits are the same.
    say("%s", error.what());
}

}  // namespace zinc
