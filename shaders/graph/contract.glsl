// Generated from zinc_attn/graph/ by scripts/build_shaders.py.

const uint X_BLOCK = 32u;
const uint SUPERBLOCK = 256u;
const uint FLOAT_CHUNK = 8u;
#define QUANTIZED_MIN 8.67361738e-19
#define QUANTIZED_LARGE 1.84467441e+19
#define PRODUCT_MIN 8.8817842e-16
const uvec4 MXFP4 = uvec4(0x03020100u, 0x0C080604u, 0xFDFEFF00u, 0xF4F8FAFCu);
#define EXP_LEAST -80.0
#define EXP_MOST 88.7228317
#define EXPM1_SMALL 0.360000014
#define EXPM1_POLY(y, x) y = 0.0013876179; y = y * x; y = y + 0.00836895127; y = y * x; y = y + 0.041667413; y = y * x; y = y + 0.166665256; y = y * x; y = y + 0.49999997;
const uint INVERSE_ROOT_SEED = 0x5f375a86u;
#define ERF_SMALL 0.899999976
#define ERF_MOST 4.0
#define ERF_POLY(y, x) y = -0.000599441642; y = y * x; y = y + 0.00499402639; y = y * x; y = y + -0.0267673451; y = y * x; y = y + 0.112818435; y = y * x; y = y + -0.376124978; y = y * x; y = y + 0.128379151;
#define ERFC_POLY(y, x) y = 0.000285974209; y = y * x; y = y + -0.00442259898; y = y * x; y = y + 0.0321941562; y = y * x; y = y + -0.15020448; y = y * x; y = y + -0.918962061; y = y * x; y = y + -1.62706757; y = y * x; y = y + -0.000240120848;
#define SIN_POLY(y, x) y = -0.000195180823; y = y * x; y = y + 0.00833218824; y = y * x; y = y + -0.166666552;
#define COS_POLY(y, x) y = 2.4432542e-05; y = y * x; y = y + -0.00138873106; y = y * x; y = y + 0.0416666456;
#define TURN 6.28318548
#define TURN_SMALL 0.5
const uint INVERSE_TURN[8] = {0x00000000u, 0x28BE60DBu, 0x9391054Au, 0x7F09D5F4u, 0x7D4D3770u, 0x36D8A566u, 0x4F10E410u, 0x7F9458EAu};
#define GELU_A 0.0447149985
#define GELU_B 0.797884583
#define GELU_LEAST -10.0
#define GELU_QUICK -1.70200002
#define SQRT_HALF 0.707106769
#define SOFTPLUS_LINEAR 20.0
const uint SUM_LANES = 256u;
const uint STATE_LANES = 8u;
#define STATE_MIN 9.09494702e-13
#define DECAY_MIN 9.53674316e-07
#define FACTOR_MIN 8.67361738e-19
const uint ROPE_WORDS = 4u;

struct Tensor {
    uint offset;  // place of element 0 in the binding; all these numbers count elements of the tensor's type
    uint n[4];  // elements of each dimension, ggml's ne
    uint s[4];  // steps from an element to the next of each dimension, ggml's nb
};

struct BinaryParams {
    Tensor a;
    Tensor b;
    Tensor y;
};

struct UnaryParams {
    Tensor x;
    Tensor other;
    Tensor y;
    float a;  // scale: factor; clamp: minimum; fill: value; leaky_relu: slope below 0; xielu: alpha_n
    float b;  // scale: bias; clamp: maximum; xielu: alpha_p
    float c;  // xielu: beta
    float d;  // xielu: eps
};

struct GluParams {
    Tensor a;
    Tensor b;
    Tensor y;
    float alpha;  // of swiglu_oai
    float limit;  // of swiglu_oai and swiglu_clamp
};

struct AddIdParams {
    Tensor a;
    Tensor b;
    Tensor ids;
    Tensor y;
};

struct FitParams {
    Tensor x;
    Tensor y;
    float least;
};

struct MoveParams {
    Tensor x;
    Tensor ids;
    Tensor y;
    uint id_words;  // words of an index, 1 (i32) or 2 (i64); ids' numbers count indices
    uint shift[4];
};

struct ToBlocksParams {
    Tensor x;
    Tensor ids;
    Tensor y;
    uint id_words;  // words of an index, 1 (i32) or 2 (i64); ids' numbers count indices
};

struct SortParams {
    Tensor x;
    Tensor ids;
    Tensor y;
    uint count;  // candidates of a row; for exchange and merge indices of a row of y
    uint keep;  // indices that a piece keeps
    uint distance;
    uint mirror;
};

struct GetWeightsParams {
    Tensor ids;
    Tensor y;
    uint offset;  // byte of the first matrix
    uint steps[2];  // bytes from a matrix to the next of dimensions 2 and 3
    uint rows;  // rows of a matrix
    uint first;  // row that ids call 0
};

struct QuantizeParams {
    Tensor x;
};

struct MulMatParams {
    uint w_begin;  // where the weights begin in their binding, in units of 16 bytes
    uint w_steps[2];  // from a matrix of weights to the next in dimensions 2 and 3, in units of 16 bytes
    uint repeats[2];  // planes of y that share a matrix of weights, in dimensions 2 and 3
    uint blocks;  // blocks of 32 values of a row of weights
    uint x_slots;  // rows of x of a token; slot s has row s mod x_slots
    uint experts[3];  // number of the first bound expert, bound experts, and all experts
    Tensor ids;
    Tensor y;
    Tensor added;
};

struct MulMatFloatParams {
    uint x_slots;  // rows of x of a token; slot s has row s mod x_slots
    uint experts[3];  // number of the first bound expert, bound experts, and all experts
    Tensor ids;
    Tensor w;
    Tensor x;
    Tensor added;
    Tensor y;
};

struct ByExpertParams {
    Tensor ids;
    uint experts;
    uint columns;  // columns of a tile
    uint tiles;  // tiles of the list: pairs / columns + experts + 1 are enough, and so is a tile a pair
};

struct SsmConvParams {
    Tensor x;
    Tensor late;
    Tensor w;
    Tensor bias;
    Tensor y;
    uint run;  // neighboring tokens of an invocation
    uint size;  // a power of two up to 256
    uint begins[2];  // channels, multiples of size
    uint ends[2];
    uint offsets[2];  // elements where first and second begin
    float scales[2];  // of SCALE
    float eps;
    float factor;  // 1 / size
};

struct DeltaNetParams {
    Tensor q;
    Tensor k;
    Tensor v;
    Tensor gate;
    Tensor beta;
    Tensor state;
    uint ids;
    uint outputs;  // element of the first output
    uint kept;  // element of the first state of slot 0
    uint steps[2];  // steps from a kept state to the next sequence's, and to the next slot's
    uint slots;
    float scale;  // of the outputs
};

struct SsmScanParams {
    Tensor state;
    Tensor x;
    Tensor dt;
    Tensor b;
    Tensor c;
    uint a;
    uint ids;
    uint outputs;  // element of the first output
    uint kept;  // element of the first state of slot 0
    uint steps[2];  // steps from a kept state to the next sequence's, and to the next slot's
    uint slots;
};

struct RouteParams {
    Tensor x;
    Tensor bias;
    Tensor ids;
    Tensor y;
    float least;
    float most;
    float factor;  // of SCALE
    float added;  // number that SCALE adds
};

struct SumExpertsParams {
    Tensor experts;
    Tensor weights;
    uint added[2];  // where plus and more begin
    Tensor y;
};

struct NormSummedParams {
    Tensor experts;
    Tensor weights;
    uint added[2];  // where plus and more begin
    Tensor x;
    Tensor a;
    Tensor b;
    Tensor y;
    float eps;
    float factor;  // 1 / elements of a row, rounded once; not of l2
    float scales[2];  // of the two operations that follow
    uint joined;  // rows of y that form an int8 row: 1, or more where rows are whole blocks
};

struct NormQuantizedParams {
    Tensor x;
    Tensor a;
    Tensor b;
    Tensor y;
    float eps;
    float factor;  // 1 / elements of a row, rounded once; not of l2
    float scales[2];  // of the two operations that follow
    uint joined;  // rows of y that form an int8 row: 1, or more where rows are whole blocks
};

struct SoftMaxParams {
    Tensor x;
    Tensor mask;
    Tensor y;
    uint sinks;  // element of head 0's sink
    float scale;
    float step;  // -max_bias / heads
    float half_step;  // -max_bias / 2 / heads
    uint heads;  // the largest power of two up to x's dimension 2
};

struct SumRowsParams {
    Tensor x;
    Tensor y;
    uint terms;  // elements of a row
    float factor;
};

struct RopeParams {
    Tensor x;
    Tensor y;
    uint positions;  // element of the first position, an int32
    uint stride;  // step from a section's positions to the next section's: x's dimension 2
    uint table;  // word of the first pair
    uint pairs;  // pairs that turn
    uint first;  // element of the first pair
    uint step;  // step from a pair's first element to its second: 1, or pairs
    float least;  // smaller magnitudes of a float32 y become +0, as FIT does for attention; or 0
};

struct NormParams {
    Tensor x;
    Tensor a;
    Tensor b;
    Tensor y;
    float eps;
    float factor;  // 1 / elements of a row, rounded once; not of l2
    float scales[2];  // of the two operations that follow
    uint joined;  // rows of y that form an int8 row: 1, or more where rows are whole blocks
    uint positions;  // element of the first position, an int32
    uint stride;  // step from a section's positions to the next section's: x's dimension 2
    uint table;  // word of the first pair
    uint pairs;  // pairs that turn
    uint first;  // element of the first pair
    uint step;  // step from a pair's first element to its second: 1, or pairs
    float least;  // smaller magnitudes of a float32 y become +0, as FIT does for attention; or 0
};

const uint BINARY_BIND_PARAMS = 0u, BINARY_BIND_A = 1u, BINARY_BIND_B = 2u, BINARY_BIND_Y = 3u;
#define BINARY_CONSTANTS \
    layout(constant_id = 0) const uint OP = 1u; layout(constant_id = 1) const uint A_TYPE = 1u; \
    layout(constant_id = 2) const uint B_TYPE = 1u; layout(constant_id = 3) const uint Y_TYPE = 1u;
const uint UNARY_BIND_PARAMS = 0u, UNARY_BIND_X = 1u, UNARY_BIND_OTHER = 2u, UNARY_BIND_Y = 3u;
#define UNARY_CONSTANTS \
    layout(constant_id = 0) const uint OP = 1u; layout(constant_id = 1) const uint X_TYPE = 1u; \
    layout(constant_id = 2) const uint Y_TYPE = 1u; layout(constant_id = 3) const uint THEN = 1u;
const uint GLU_BIND_PARAMS = 0u, GLU_BIND_A = 1u, GLU_BIND_B = 2u, GLU_BIND_Y = 3u;
#define GLU_CONSTANTS \
    layout(constant_id = 0) const uint OP = 1u; layout(constant_id = 1) const uint TYPE = 1u;
const uint GLU_QUANTIZED_BIND_PARAMS = 0u, GLU_QUANTIZED_BIND_A = 1u, GLU_QUANTIZED_BIND_B = 2u, GLU_QUANTIZED_BIND_Y =
    3u, GLU_QUANTIZED_BIND_Q = 4u, GLU_QUANTIZED_BIND_SCALES = 5u;
#define GLU_QUANTIZED_CONSTANTS \
    layout(constant_id = 0) const uint OP = 1u; layout(constant_id = 1) const uint TYPE = 1u;
const uint ADD_ID_BIND_PARAMS = 0u, ADD_ID_BIND_A = 1u, ADD_ID_BIND_B = 2u, ADD_ID_BIND_IDS = 3u, ADD_ID_BIND_Y = 4u;
const uint FIT_BIND_PARAMS = 0u, FIT_BIND_X = 1u, FIT_BIND_Y = 2u;
const uint MOVE_BIND_PARAMS = 0u, MOVE_BIND_X = 1u, MOVE_BIND_IDS = 2u, MOVE_BIND_Y = 3u;
#define MOVE_CONSTANTS \
    layout(constant_id = 0) const uint OP = 1u; layout(constant_id = 1) const uint SOURCE = 1u; \
    layout(constant_id = 2) const uint TARGET = 1u;
const uint TO_BLOCKS_BIND_PARAMS = 0u, TO_BLOCKS_BIND_X = 1u, TO_BLOCKS_BIND_IDS = 2u, TO_BLOCKS_BIND_Y = 3u;
#define TO_BLOCKS_CONSTANTS \
    layout(constant_id = 0) const uint OP = 1u; layout(constant_id = 1) const uint SOURCE = 1u; \
    layout(constant_id = 2) const uint TARGET = 1u;
const uint SORT_BIND_PARAMS = 0u, SORT_BIND_X = 1u, SORT_BIND_IDS = 2u, SORT_BIND_Y = 3u;
#define SORT_CONSTANTS \
    layout(constant_id = 0) const uint OP = 1u; layout(constant_id = 1) const uint DESCENDING = 1u; \
    layout(constant_id = 2) const uint COLUMNS = 1u;
const uint GET_WEIGHTS_BIND_PARAMS = 0u, GET_WEIGHTS_BIND_W = 1u, GET_WEIGHTS_BIND_IDS = 2u, GET_WEIGHTS_BIND_Y = 3u;
#define GET_WEIGHTS_CONSTANTS \
    layout(constant_id = 0) const uint TYPE = 1u;
const uint QUANTIZE_BIND_PARAMS = 0u, QUANTIZE_BIND_X = 1u, QUANTIZE_BIND_Q = 2u, QUANTIZE_BIND_SCALES = 3u;
const uint MUL_MAT_BIND_PARAMS = 0u, MUL_MAT_BIND_W = 1u, MUL_MAT_BIND_Q = 2u, MUL_MAT_BIND_SCALES = 3u,
    MUL_MAT_BIND_ADDED = 4u, MUL_MAT_BIND_IDS = 5u, MUL_MAT_BIND_Y = 6u;
#define MUL_MAT_CONSTANTS \
    layout(constant_id = 0) const uint TYPE = 1u; layout(constant_id = 1) const uint TILE_ROWS = 64u; \
    layout(constant_id = 2) const uint TILE_COLUMNS = 64u; layout(constant_id = 3) const uint OWN_ROWS = 4u; \
    layout(constant_id = 4) const uint OWN_COLUMNS = 4u; layout(local_size_x_id = 5, local_size_x = 64) in; \
    layout(constant_id = 6) const uint ADD = 1u; layout(constant_id = 7) const uint EXPERTS = 1u;
const uint MUL_MAT_VEC_BIND_PARAMS = 0u, MUL_MAT_VEC_BIND_W = 1u, MUL_MAT_VEC_BIND_Q = 2u, MUL_MAT_VEC_BIND_SCALES = 3u,
    MUL_MAT_VEC_BIND_ADDED = 4u, MUL_MAT_VEC_BIND_IDS = 5u, MUL_MAT_VEC_BIND_Y = 6u;
#define MUL_MAT_VEC_CONSTANTS \
    layout(constant_id = 0) const uint TYPE = 1u; layout(constant_id = 1) const uint COLUMNS = 1u; \
    layout(local_size_x_id = 2, local_size_x = 64) in; layout(constant_id = 3) const uint SUBGROUPS = 1u; \
    layout(constant_id = 4) const uint SUPERBLOCKS = 1u; layout(constant_id = 5) const uint AHEAD = 1u; \
    layout(constant_id = 6) const uint ADD = 1u; layout(constant_id = 7) const uint EXPERTS = 1u; \
    layout(constant_id = 8) const uint GLU = 1u;
const uint MUL_MAT_UNITS_BIND_PARAMS = 0u, MUL_MAT_UNITS_BIND_W = 1u, MUL_MAT_UNITS_BIND_Q = 2u,
    MUL_MAT_UNITS_BIND_SCALES = 3u, MUL_MAT_UNITS_BIND_ADDED = 4u, MUL_MAT_UNITS_BIND_IDS = 5u, MUL_MAT_UNITS_BIND_Y =
    6u;
#define MUL_MAT_UNITS_CONSTANTS \
    layout(constant_id = 0) const uint TYPE = 1u; layout(constant_id = 1) const uint TILE_ROWS = 64u; \
    layout(constant_id = 2) const uint TILE_COLUMNS = 64u; layout(constant_id = 3) const uint OWN_ROWS = 4u; \
    layout(constant_id = 4) const uint OWN_COLUMNS = 4u; layout(local_size_x_id = 5, local_size_x = 64) in; \
    layout(constant_id = 6) const uint MAT_M = 16u; layout(constant_id = 7) const uint MAT_N = 16u; \
    layout(constant_id = 8) const uint MAT_K = 16u; layout(constant_id = 9) const uint ADD = 1u; \
    layout(constant_id = 10) const uint EXPERTS = 1u;
const uint MUL_MAT_FLOAT_BIND_PARAMS = 0u, MUL_MAT_FLOAT_BIND_W = 1u, MUL_MAT_FLOAT_BIND_X = 2u,
    MUL_MAT_FLOAT_BIND_ADDED = 3u, MUL_MAT_FLOAT_BIND_IDS = 4u, MUL_MAT_FLOAT_BIND_Y = 5u;
#define MUL_MAT_FLOAT_CONSTANTS \
    layout(constant_id = 0) const uint W_TYPE = 1u; layout(constant_id = 1) const uint X_TYPE = 1u; \
    layout(constant_id = 2) const uint TILE_ROWS = 64u; layout(constant_id = 3) const uint TILE_COLUMNS = 64u; \
    layout(constant_id = 4) const uint OWN_ROWS = 4u; layout(constant_id = 5) const uint OWN_COLUMNS = 4u; \
    layout(local_size_x_id = 6, local_size_x = 64) in; layout(constant_id = 7) const uint ADD = 1u; \
    layout(constant_id = 8) const uint EXPERTS = 1u;
const uint MUL_MAT_FLOAT_VEC_BIND_PARAMS = 0u, MUL_MAT_FLOAT_VEC_BIND_W = 1u, MUL_MAT_FLOAT_VEC_BIND_X = 2u,
    MUL_MAT_FLOAT_VEC_BIND_ADDED = 3u, MUL_MAT_FLOAT_VEC_BIND_IDS = 4u, MUL_MAT_FLOAT_VEC_BIND_Y = 5u;
#define MUL_MAT_FLOAT_VEC_CONSTANTS \
    layout(constant_id = 0) const uint W_TYPE = 1u; layout(constant_id = 1) const uint X_TYPE = 1u; \
    layout(constant_id = 2) const uint COLUMNS = 1u; layout(local_size_x_id = 3, local_size_x = 64) in; \
    layout(constant_id = 4) const uint SUBGROUPS = 1u; layout(constant_id = 5) const uint SUPERBLOCKS = 1u; \
    layout(constant_id = 6) const uint AHEAD = 1u; layout(constant_id = 7) const uint ADD = 1u; \
    layout(constant_id = 8) const uint EXPERTS = 1u; layout(constant_id = 9) const uint RMS = 1u;
const uint BY_EXPERT_BIND_PARAMS = 0u, BY_EXPERT_BIND_IDS = 1u, BY_EXPERT_BIND_LIST = 2u;
const uint SSM_CONV_BIND_PARAMS = 0u, SSM_CONV_BIND_X = 1u, SSM_CONV_BIND_LATE = 2u, SSM_CONV_BIND_W = 3u,
    SSM_CONV_BIND_BIAS = 4u, SSM_CONV_BIND_Y = 5u, SSM_CONV_BIND_FIRST = 6u, SSM_CONV_BIND_SECOND = 7u;
#define SSM_CONV_CONSTANTS \
    layout(constant_id = 0) const uint BIASED = 1u; layout(constant_id = 1) const uint SILU = 1u; \
    layout(constant_id = 2) const uint NORMED = 1u; layout(constant_id = 3) const uint OP = 1u;
const uint DELTA_NET_BIND_PARAMS = 0u, DELTA_NET_BIND_Q = 1u, DELTA_NET_BIND_K = 2u, DELTA_NET_BIND_V = 3u,
    DELTA_NET_BIND_GATE = 4u, DELTA_NET_BIND_BETA = 5u, DELTA_NET_BIND_STATE = 6u, DELTA_NET_BIND_IDS = 7u,
    DELTA_NET_BIND_OUTPUTS = 8u, DELTA_NET_BIND_KEPT = 9u;
#define DELTA_NET_CONSTANTS \
    layout(constant_id = 0) const uint SIZE = 32u; layout(constant_id = 1) const uint OWN = 4u; \
    layout(constant_id = 2) const uint BY_CHANNEL = 1u; layout(constant_id = 3) const uint NAMED = 1u;
const uint SSM_SCAN_BIND_PARAMS = 0u, SSM_SCAN_BIND_STATE = 1u, SSM_SCAN_BIND_X = 2u, SSM_SCAN_BIND_DT = 3u,
    SSM_SCAN_BIND_A = 4u, SSM_SCAN_BIND_B = 5u, SSM_SCAN_BIND_C = 6u, SSM_SCAN_BIND_IDS = 7u, SSM_SCAN_BIND_OUTPUTS =
    8u, SSM_SCAN_BIND_KEPT = 9u;
#define SSM_SCAN_CONSTANTS \
    layout(constant_id = 0) const uint SIZE = 32u; layout(constant_id = 1) const uint OWN = 4u; \
    layout(constant_id = 2) const uint BY_ELEMENT = 1u;
const uint ROUTE_BIND_PARAMS = 0u, ROUTE_BIND_X = 1u, ROUTE_BIND_BIAS = 2u, ROUTE_BIND_IDS = 3u, ROUTE_BIND_Y = 4u;
#define ROUTE_CONSTANTS \
    layout(constant_id = 0) const uint GATE = 1u; layout(constant_id = 1) const uint BIASED = 1u; \
    layout(constant_id = 2) const uint NORM = 1u; layout(constant_id = 3) const uint SCALED = 1u;
const uint SUM_EXPERTS_BIND_PARAMS = 0u, SUM_EXPERTS_BIND_EXPERTS = 1u, SUM_EXPERTS_BIND_WEIGHTS = 2u,
    SUM_EXPERTS_BIND_PLUS = 3u, SUM_EXPERTS_BIND_MORE = 4u, SUM_EXPERTS_BIND_Y = 5u;
#define SUM_EXPERTS_CONSTANTS \
    layout(constant_id = 0) const uint ADDED = 1u;
const uint NORM_SUMMED_BIND_PARAMS = 0u, NORM_SUMMED_BIND_X = 1u, NORM_SUMMED_BIND_A = 2u, NORM_SUMMED_BIND_MORE = 3u,
    NORM_SUMMED_BIND_Y = 4u, NORM_SUMMED_BIND_Q = 5u, NORM_SUMMED_BIND_SCALES = 6u, NORM_SUMMED_BIND_EXPERTS = 7u,
    NORM_SUMMED_BIND_WEIGHTS = 8u, NORM_SUMMED_BIND_PLUS = 9u;
#define NORM_SUMMED_CONSTANTS \
    layout(constant_id = 0) const uint OP = 1u; layout(constant_id = 1) const uint FIRST = 1u; \
    layout(constant_id = 2) const uint SECOND = 1u; layout(constant_id = 3) const uint ADDED = 1u;
const uint NORM_QUANTIZED_BIND_PARAMS = 0u, NORM_QUANTIZED_BIND_X = 1u, NORM_QUANTIZED_BIND_A = 2u,
    NORM_QUANTIZED_BIND_B = 3u, NORM_QUANTIZED_BIND_Y = 4u, NORM_QUANTIZED_BIND_Q = 5u, NORM_QUANTIZED_BIND_SCALES = 6u;
#define NORM_QUANTIZED_CONSTANTS \
    layout(constant_id = 0) const uint OP = 1u; layout(constant_id = 1) const uint FIRST = 1u; \
    layout(constant_id = 2) const uint SECOND = 1u;
const uint SOFT_MAX_BIND_PARAMS = 0u, SOFT_MAX_BIND_X = 1u, SOFT_MAX_BIND_MASK = 2u, SOFT_MAX_BIND_SINKS = 3u,
    SOFT_MAX_BIND_Y = 4u;
#define SOFT_MAX_CONSTANTS \
    layout(constant_id = 0) const uint MASK_TYPE = 1u; layout(constant_id = 1) const uint HAS_SINKS = 1u;
const uint SUM_ROWS_BIND_PARAMS = 0u, SUM_ROWS_BIND_X = 1u, SUM_ROWS_BIND_Y = 2u;
const uint ROPE_BIND_PARAMS = 0u, ROPE_BIND_X = 1u, ROPE_BIND_POSITIONS = 2u, ROPE_BIND_TABLE = 3u, ROPE_BIND_Y = 4u;
#define ROPE_CONSTANTS \
    layout(constant_id = 0) const uint TYPE = 1u;
const uint NORM_BIND_PARAMS = 0u, NORM_BIND_X = 1u, NORM_BIND_A = 2u, NORM_BIND_B = 3u, NORM_BIND_Y = 4u,
    NORM_BIND_POSITIONS = 5u, NORM_BIND_TABLE = 6u;
#define NORM_CONSTANTS \
    layout(constant_id = 0) const uint OP = 1u; layout(constant_id = 1) const uint FIRST = 1u; \
    layout(constant_id = 2) const uint SECOND = 1u; layout(constant_id = 3) const uint ROPE = 1u;

const uint SORT_PIECE = 2048u;
const uint EXPERTS_MOST = 1024u;
const uint ROUTE_PIECE = 1024u;
const uint CHOSEN_PIECE = 256u;
const uint FLOAT_TYPE_F32 = 0u, FLOAT_TYPE_F16 = 1u, FLOAT_TYPE_BF16 = 2u;
const uint BINARY_OP_ADD = 0u, BINARY_OP_SUB = 1u, BINARY_OP_MUL = 2u, BINARY_OP_DIV = 3u;
const uint UNARY_OP_ABS = 0u, UNARY_OP_SGN = 1u, UNARY_OP_NEG = 2u, UNARY_OP_STEP = 3u, UNARY_OP_TANH = 4u, UNARY_OP_ELU
    = 5u, UNARY_OP_RELU = 6u, UNARY_OP_SIGMOID = 7u, UNARY_OP_GELU = 8u, UNARY_OP_GELU_QUICK = 9u, UNARY_OP_SILU = 10u,
    UNARY_OP_HARDSWISH = 11u, UNARY_OP_HARDSIGMOID = 12u, UNARY_OP_EXP = 13u, UNARY_OP_EXPM1 = 14u, UNARY_OP_SOFTPLUS =
    15u, UNARY_OP_GELU_ERF = 16u, UNARY_OP_XIELU = 17u, UNARY_OP_FLOOR = 18u, UNARY_OP_CEIL = 19u, UNARY_OP_ROUND = 20u,
    UNARY_OP_TRUNC = 21u, UNARY_OP_SCALE = 22u, UNARY_OP_CLAMP = 23u, UNARY_OP_SQR = 24u, UNARY_OP_SQRT = 25u,
    UNARY_OP_LOG = 26u, UNARY_OP_SIN = 27u, UNARY_OP_COS = 28u, UNARY_OP_LEAKY_RELU = 29u, UNARY_OP_FILL = 30u;
const uint FOLLOW_OP_NONE = 0u, FOLLOW_OP_MUL = 1u, FOLLOW_OP_ADD = 2u, FOLLOW_OP_SCALE = 3u;
const uint GLU_OP_REGLU = 0u, GLU_OP_GEGLU = 1u, GLU_OP_SWIGLU = 2u, GLU_OP_SWIGLU_OAI = 3u, GLU_OP_GEGLU_ERF = 4u,
    GLU_OP_GEGLU_QUICK = 5u, GLU_OP_SWIGLU_CLAMP = 6u, GLU_OP_MUL = 7u;
const uint MOVE_TYPE_F32 = 0u, MOVE_TYPE_F16 = 1u, MOVE_TYPE_BF16 = 2u, MOVE_TYPE_I32 = 3u, MOVE_TYPE_I16 = 4u,
    MOVE_TYPE_I8 = 5u, MOVE_TYPE_Q8_0 = 6u, MOVE_TYPE_Q4_0 = 7u, MOVE_TYPE_Q4_1 = 8u, MOVE_TYPE_Q5_0 = 9u,
    MOVE_TYPE_Q5_1 = 10u, MOVE_TYPE_IQ4_NL = 11u;
const uint MOVE_OP_LINEAR = 0u, MOVE_OP_WRAP = 1u, MOVE_OP_PAD = 2u, MOVE_OP_GET_ROWS = 3u, MOVE_OP_SET_ROWS = 4u;
const uint SORT_OP_SORT = 0u, SORT_OP_SORT_IDS = 1u, SORT_OP_EXCHANGE = 2u, SORT_OP_MERGE = 3u;
const uint WEIGHT_TYPE_Q4_0 = 0u, WEIGHT_TYPE_Q4_1 = 1u, WEIGHT_TYPE_Q5_0 = 2u, WEIGHT_TYPE_Q5_1 = 3u, WEIGHT_TYPE_Q8_0
    = 4u, WEIGHT_TYPE_IQ4_NL = 5u, WEIGHT_TYPE_MXFP4 = 6u, WEIGHT_TYPE_Q2_K = 7u, WEIGHT_TYPE_Q3_K = 8u,
    WEIGHT_TYPE_Q4_K = 9u, WEIGHT_TYPE_Q5_K = 10u, WEIGHT_TYPE_Q6_K = 11u, WEIGHT_TYPE_IQ4_XS = 12u;
const uint GATE_OP_NONE = 0u, GATE_OP_SOFT_MAX = 1u, GATE_OP_SIGMOID = 2u;
const uint ROUTE_NORM_OP_NONE = 0u, ROUTE_NORM_OP_SUM = 1u, ROUTE_NORM_OP_SOFT_MAX = 2u;
const uint NORM_OP_RMS = 0u, NORM_OP_NORM = 1u, NORM_OP_L2 = 2u;
const uint MASK_TYPE_NONE = 0u, MASK_TYPE_F32 = 1u, MASK_TYPE_F16 = 2u;

// For a type of weights: pieces of 16 bytes and of 4 bytes, and values and bytes of a block.
#define WEIGHT_PIECES_16(t) ((t) == 0u ? 1u : (t) == 1u ? 1u : (t) == 2u ? 1u : (t) == 3u ? 1u : (t) == 4u ? 2u : (t) == 5u ? 1u : (t) == 6u ? 1u : (t) == 7u ? 5u : (t) == 8u ? 6u : (t) == 9u ? 9u : (t) == 10u ? 11u : (t) == 11u ? 13u : 8u)
#define WEIGHT_PIECES_4(t) ((t) == 0u ? 0u : (t) == 1u ? 1u : (t) == 2u ? 1u : (t) == 3u ? 2u : (t) == 4u ? 0u : (t) == 5u ? 0u : (t) == 6u ? 0u : (t) == 7u ? 1u : (t) == 8u ? 3u : (t) == 9u ? 0u : (t) == 10u ? 0u : (t) == 11u ? 0u : 2u)
#define WEIGHT_VALUES(t) ((t) == 0u ? 32u : (t) == 1u ? 32u : (t) == 2u ? 32u : (t) == 3u ? 32u : (t) == 4u ? 32u : (t) == 5u ? 32u : (t) == 6u ? 32u : (t) == 7u ? 256u : (t) == 8u ? 256u : (t) == 9u ? 256u : (t) == 10u ? 256u : (t) == 11u ? 256u : 256u)
#define WEIGHT_SIZE(t) ((t) == 0u ? 18u : (t) == 1u ? 20u : (t) == 2u ? 22u : (t) == 3u ? 24u : (t) == 4u ? 34u : (t) == 5u ? 18u : (t) == 6u ? 17u : (t) == 7u ? 84u : (t) == 8u ? 110u : (t) == 9u ? 144u : (t) == 10u ? 176u : (t) == 11u ? 210u : 136u)
// For a type of weights: whether a scale has 16 values, and whether there are minima.
#define WEIGHT_HALVES(t) ((t) == 0u ? 0u : (t) == 1u ? 0u : (t) == 2u ? 0u : (t) == 3u ? 0u : (t) == 4u ? 0u : (t) == 5u ? 0u : (t) == 6u ? 0u : (t) == 7u ? 1u : (t) == 8u ? 1u : (t) == 9u ? 0u : (t) == 10u ? 0u : (t) == 11u ? 1u : 0u)
#define WEIGHT_MINIMUM(t) ((t) == 0u ? 0u : (t) == 1u ? 1u : (t) == 2u ? 0u : (t) == 3u ? 1u : (t) == 4u ? 0u : (t) == 5u ? 0u : (t) == 6u ? 0u : (t) == 7u ? 1u : (t) == 8u ? 0u : (t) == 9u ? 1u : (t) == 10u ? 1u : (t) == 11u ? 0u : 0u)
const uint WEIGHT_GROUP = 32u;
#define LANES_OF_STATE(size) ((size) > 16u ? 8u : ((size) > 8u ? 4u : ((size) > 4u ? 2u : 1u)))
