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

struct MoveParams {
    Tensor x;
    Tensor ids;
    Tensor y;
    uint id_words;  // of an index, and ids' numbers count indices: 1 (i32), 2 (i64)
    uint shift[4];
};
const uint MOVE_BIND_PARAMS = 0u;
const uint MOVE_BIND_X = 1u;
const uint MOVE_BIND_IDS = 2u;
const uint MOVE_BIND_Y = 3u;
const uint MOVE_SPEC_OP = 0u;
const uint MOVE_SPEC_SOURCE = 1u;
const uint MOVE_SPEC_TARGET = 2u;

struct ToBlocksParams {
    Tensor x;
    Tensor ids;
    Tensor y;
    uint id_words;  // of an index, and ids' numbers count indices: 1 (i32), 2 (i64)
};
const uint TO_BLOCKS_BIND_PARAMS = 0u;
const uint TO_BLOCKS_BIND_X = 1u;
const uint TO_BLOCKS_BIND_IDS = 2u;
const uint TO_BLOCKS_BIND_Y = 3u;
const uint TO_BLOCKS_SPEC_OP = 0u;
const uint TO_BLOCKS_SPEC_SOURCE = 1u;
const uint TO_BLOCKS_SPEC_TARGET = 2u;

struct SortParams {
    Tensor x;
    Tensor ids;
    Tensor y;
    uint count;  // candidates of a row; of exchange and merge: indices of a row of y
    uint keep;  // of a piece
    uint distance;
    uint mirror;
};
const uint SORT_BIND_PARAMS = 0u;
const uint SORT_BIND_X = 1u;
const uint SORT_BIND_IDS = 2u;
const uint SORT_BIND_Y = 3u;
const uint SORT_SPEC_OP = 0u;
const uint SORT_SPEC_DESCENDING = 1u;
const uint SORT_SPEC_COLUMNS = 2u;

struct GetWeightsParams {
    Tensor ids;
    Tensor y;
    uint offset;  // byte of the first matrix
    uint steps[2];  // bytes from a matrix to the next of dimensions 2 and 3
    uint rows;  // of a matrix
    uint first;  // row that ids call 0
};
const uint GET_WEIGHTS_BIND_PARAMS = 0u;
const uint GET_WEIGHTS_BIND_W = 1u;
const uint GET_WEIGHTS_BIND_IDS = 2u;
const uint GET_WEIGHTS_BIND_Y = 3u;
const uint GET_WEIGHTS_SPEC_TYPE = 0u;

const uint SORT_PIECE = 2048u;

const uint BINARY_OP_ADD = 0u;
const uint BINARY_OP_SUB = 1u;
const uint BINARY_OP_MUL = 2u;
const uint BINARY_OP_DIV = 3u;

const uint MOVE_TYPE_F32 = 0u;
const uint MOVE_TYPE_F16 = 1u;
const uint MOVE_TYPE_BF16 = 2u;
const uint MOVE_TYPE_I32 = 3u;
const uint MOVE_TYPE_I16 = 4u;
const uint MOVE_TYPE_I8 = 5u;
const uint MOVE_TYPE_Q8_0 = 6u;
const uint MOVE_TYPE_Q4_0 = 7u;
const uint MOVE_TYPE_Q4_1 = 8u;
const uint MOVE_TYPE_Q5_0 = 9u;
const uint MOVE_TYPE_Q5_1 = 10u;
const uint MOVE_TYPE_IQ4_NL = 11u;

const uint MOVE_OP_LINEAR = 0u;
const uint MOVE_OP_WRAP = 1u;
const uint MOVE_OP_PAD = 2u;
const uint MOVE_OP_GET_ROWS = 3u;
const uint MOVE_OP_SET_ROWS = 4u;

const uint SORT_OP_SORT = 0u;
const uint SORT_OP_SORT_IDS = 1u;
const uint SORT_OP_EXCHANGE = 2u;
const uint SORT_OP_MERGE = 3u;
