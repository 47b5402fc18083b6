// SET_ROWS: new rows of K or V go into their cells.
#ifndef ZINC_GGML_SET_ROWS_H
#define ZINC_GGML_SET_ROWS_H

#include "ggml-backend.h"

namespace zinc {

bool set_rows_supported(const ggml_tensor *op);
ggml_status set_rows(ggml_tensor *op);  // the reason of a failure is on stderr

}  // namespace zinc
#endif
