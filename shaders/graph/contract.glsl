// Generated from zinc_attn/graph/ by scripts/build_shaders.py.

struct Tensor {
    uint offset;  // of element 0 in its binding; these numbers count elements of the tensor's type
    uint n[4];  // elements of each dimension, ggml's ne
    uint s[4];  // steps from an element to the next of each dimension, ggml's nb
};

struct BinaryParams {
    Tensor a;
    Tensor b;
    Tensor y;
};
const uint BINARY_BIND_PARAMS = 0u;
const uint BINARY_BIND_A = 1u;
const uint BINARY_BIND_B = 2u;
const uint BINARY_BIND_Y = 3u;
const uint BINARY_SPEC_OP = 0u;

const uint BINARY_OP_ADD = 0u;
const uint BINARY_OP_SUB = 1u;
const uint BINARY_OP_MUL = 2u;
const uint BINARY_OP_DIV = 3u;
