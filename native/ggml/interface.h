// The ggml that loads this library. `bind` finds its functions when it asks for the registry. So the same build serves
// several versions of ggml, under any file name. In a process with two ggml it serves the first that asks.
#pragma once
#include "ggml-backend-impl.h"

namespace zinc {

class Device;

// Binds the ggml whose library has the address `caller`, once. False: this ggml is not served, and stderr says why.
bool bind(const void *caller);
int api_version();  // the bound ggml's GGML_BACKEND_API_VERSION

// The functions of a buffer type that all versions of ggml have.
struct TypeFunctions {
    const char *(*get_name)(ggml_backend_buffer_type_t);
    ggml_backend_buffer_t (*alloc_buffer)(ggml_backend_buffer_type_t, size_t);
    size_t (*get_alignment)(ggml_backend_buffer_type_t);
    bool (*is_host)(ggml_backend_buffer_type_t);
};
struct BufferType {
    void *fields[10];  // the struct of the bound version: functions, the device and the context
    Device *owner;
    ggml_backend_buffer_type_t handle() { return reinterpret_cast<ggml_backend_buffer_type_t>(this); }
};
void fill(BufferType *type, const TypeFunctions &functions, Device *owner, ggml_backend_dev_t listed);

}  // namespace zinc
