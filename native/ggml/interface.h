// The ggml that loads this library. Its functions are found when it asks for the registry, so that one build serves
// several versions of ggml, under whatever name a runtime has it, and also where a process has two.
#pragma once
#include "ggml-backend-impl.h"

namespace zinc {

class Device;

// Whether the ggml of `caller`, an address in the library that loads this one, is served; if not, a line says why.
bool bind(const void *caller);
int api_version();  // of the bound ggml: its GGML_BACKEND_API_VERSION

// What a buffer type tells ggml, in the order of the bound version's struct.
struct TypeFunctions {
    const char *(*get_name)(ggml_backend_buffer_type_t);
    ggml_backend_buffer_t (*alloc_buffer)(ggml_backend_buffer_type_t, size_t);
    size_t (*get_alignment)(ggml_backend_buffer_type_t);
    bool (*is_host)(ggml_backend_buffer_type_t);
};
struct BufferType {
    void *fields[10];  // functions, the device and the context, as the bound version has them
    Device *owner;
    ggml_backend_buffer_type_t handle() { return reinterpret_cast<ggml_backend_buffer_type_t>(this); }
};
void fill(BufferType *type, const TypeFunctions &functions, Device *owner, ggml_backend_dev_t listed);

}  // namespace zinc
