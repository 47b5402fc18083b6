// The order of a graph's nodes, before ggml gives them memory.
#ifndef ZINC_GGML_SCHEDULE_H
#define ZINC_GGML_SCHEDULE_H

#include "ggml-backend-impl.h"

namespace zinc {

// ggml's graph_optimize. A node comes behind its operands, the first of them last, so that it follows what it may be
// recorded with. Small results stay where they are for the next nodes, too, as these else wait for whoever reads them.
void schedule(ggml_backend_t, ggml_cgraph *graph, ggml_backend_graph_optimize_params *params);

}  // namespace zinc
#endif
