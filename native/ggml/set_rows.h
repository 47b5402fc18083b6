// SET_ROWS: new rows of K or V go into their cells.
#ifndef ZINC_GGML_SET_ROWS_H
#define ZINC_GGML_SET_ROWS_H

#include "ggml-backend.h"
#include "zinc_attn.h"

namespace zinc {

za_dtype storage_type(ggml_type type);  // ZA_AS_K: none

bool set_rows_supported(const ggml_tensor *op);
ggml_status set_rows(ggml_tensor *op);  // the reason of a failure is on stderr

}  // namespace zinc
#endif
