// The order of a graph's nodes, before ggml gives them memory.
#pragma once
#include "ggml-backend-impl.h"

namespace zinc {

// ggml's graph_optimize. A node comes after its operands, and its first operand comes last of them, because a node may
// be recorded together with its first operand. Memory of a small result is not reused by the next nodes: a node that
// reuses it would have to wait for the readers of the result.
void schedule(ggml_backend_t, ggml_cgraph *graph, ggml_backend_graph_optimize_params *params);

}  // namespace zinc
