// Generated from zinc_attn/graph/ by scripts/build_shaders.py.

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
const uint INVERSE_TURN[8] = uint[](0x00000000u, 0x28BE60DBu, 0x9391054Au, 0x7F09D5F4u, 0x7D4D3770u, 0x36D8A566u, 0x4F10E410u, 0x7F9458EAu);
#define GELU_A 0.0447149985
#define GELU_B 0.797884583
#define GELU_LEAST -10.0
#define GELU_QUICK -1.70200002
#define SQRT_HALF 0.707106769
#define SOFTPLUS_LINEAR 20.0
const uint SUM_LANES = 256u;

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
const uint BINARY_SPEC_A_TYPE = 1u;
const uint BINARY_SPEC_B_TYPE = 2u;
const uint BINARY_SPEC_Y_TYPE = 3u;

struct UnaryParams {
    Tensor x;
    Tensor y;
    float a;  // scale: factor; clamp: minimum; fill: value; leaky_relu: slope below 0; xielu: alpha_n
    float b;  // scale: bias; clamp: maximum; xielu: alpha_p
    float c;  // xielu: beta
    float d;  // xielu: eps
};
const uint UNARY_BIND_PARAMS = 0u;
const uint UNARY_BIND_X = 1u;
const uint UNARY_BIND_Y = 2u;
const uint UNARY_SPEC_OP = 0u;
const uint UNARY_SPEC_X_TYPE = 1u;
const uint UNARY_SPEC_Y_TYPE = 2u;

struct GluParams {
    Tensor a;
    Tensor b;
    Tensor y;
    float alpha;  // of swiglu_oai
    float limit;  // of it and _clamp
};
const uint GLU_BIND_PARAMS = 0u;
const uint GLU_BIND_A = 1u;
const uint GLU_BIND_B = 2u;
const uint GLU_BIND_Y = 3u;
const uint GLU_SPEC_OP = 0u;
const uint GLU_SPEC_TYPE = 1u;

struct AddIdParams {
    Tensor a;
    Tensor b;
    Tensor ids;
    Tensor y;
};
const uint ADD_ID_BIND_PARAMS = 0u;
const uint ADD_ID_BIND_A = 1u;
const uint ADD_ID_BIND_B = 2u;
const uint ADD_ID_BIND_IDS = 3u;
const uint ADD_ID_BIND_Y = 4u;

struct NormParams {
    Tensor x;
    Tensor weight;
    Tensor bias;
    Tensor y;
    float eps;
    float factor;  // 1 / elements of a row, rounded once; not of l2
};
const uint NORM_BIND_PARAMS = 0u;
const uint NORM_BIND_X = 1u;
const uint NORM_BIND_WEIGHT = 2u;
const uint NORM_BIND_BIAS = 3u;
const uint NORM_BIND_Y = 4u;
const uint NORM_SPEC_OP = 0u;
const uint NORM_SPEC_WEIGHTED = 1u;
const uint NORM_SPEC_BIASED = 2u;

struct SoftMaxParams {
    Tensor x;
    Tensor mask;
    Tensor y;
    uint sinks;  // element of head 0's
    float scale;
    float step;  // -max_bias / heads
    float half_step;  // -max_bias / 2 / heads
    uint heads;  // the largest power of two up to x's dimension 2
};
const uint SOFT_MAX_BIND_PARAMS = 0u;
const uint SOFT_MAX_BIND_X = 1u;
const uint SOFT_MAX_BIND_MASK = 2u;
const uint SOFT_MAX_BIND_SINKS = 3u;
const uint SOFT_MAX_BIND_Y = 4u;
const uint SOFT_MAX_SPEC_MASK_TYPE = 0u;
const uint SOFT_MAX_SPEC_HAS_SINKS = 1u;

struct SumRowsParams {
    Tensor x;
    Tensor y;
    uint terms;  // elements of a row
    float factor;
};
const uint SUM_ROWS_BIND_PARAMS = 0u;
const uint SUM_ROWS_BIND_X = 1u;
const uint SUM_ROWS_BIND_Y = 2u;

struct RopeParams {
    Tensor x;
    Tensor y;
    uint positions;  // element of the first position, an int32
    uint stride;  // from the positions of a section to the next one's: x's dimension 2
    uint table;  // word of the first pair
    uint pairs;  // that turn
    uint first;  // element of the first pair
    uint step;  // from a pair's first element to its second: 1, or pairs
};
const uint ROPE_BIND_PARAMS = 0u;
const uint ROPE_BIND_X = 1u;
const uint ROPE_BIND_POSITIONS = 2u;
const uint ROPE_BIND_TABLE = 3u;
const uint ROPE_BIND_Y = 4u;
const uint ROPE_SPEC_TYPE = 0u;

const uint FLOAT_TYPE_F32 = 0u;
const uint FLOAT_TYPE_F16 = 1u;
const uint FLOAT_TYPE_BF16 = 2u;

const uint BINARY_OP_ADD = 0u;
const uint BINARY_OP_SUB = 1u;
const uint BINARY_OP_MUL = 2u;
const uint BINARY_OP_DIV = 3u;

const uint UNARY_OP_ABS = 0u;
const uint UNARY_OP_SGN = 1u;
const uint UNARY_OP_NEG = 2u;
const uint UNARY_OP_STEP = 3u;
const uint UNARY_OP_TANH = 4u;
const uint UNARY_OP_ELU = 5u;
const uint UNARY_OP_RELU = 6u;
const uint UNARY_OP_SIGMOID = 7u;
const uint UNARY_OP_GELU = 8u;
const uint UNARY_OP_GELU_QUICK = 9u;
const uint UNARY_OP_SILU = 10u;
const uint UNARY_OP_HARDSWISH = 11u;
const uint UNARY_OP_HARDSIGMOID = 12u;
const uint UNARY_OP_EXP = 13u;
const uint UNARY_OP_EXPM1 = 14u;
const uint UNARY_OP_SOFTPLUS = 15u;
const uint UNARY_OP_GELU_ERF = 16u;
const uint UNARY_OP_XIELU = 17u;
const uint UNARY_OP_FLOOR = 18u;
const uint UNARY_OP_CEIL = 19u;
const uint UNARY_OP_ROUND = 20u;
const uint UNARY_OP_TRUNC = 21u;
const uint UNARY_OP_SCALE = 22u;
const uint UNARY_OP_CLAMP = 23u;
const uint UNARY_OP_SQR = 24u;
const uint UNARY_OP_SQRT = 25u;
const uint UNARY_OP_LOG = 26u;
const uint UNARY_OP_SIN = 27u;
const uint UNARY_OP_COS = 28u;
const uint UNARY_OP_LEAKY_RELU = 29u;
const uint UNARY_OP_FILL = 30u;

const uint GLU_OP_REGLU = 0u;
const uint GLU_OP_GEGLU = 1u;
const uint GLU_OP_SWIGLU = 2u;
const uint GLU_OP_SWIGLU_OAI = 3u;
const uint GLU_OP_GEGLU_ERF = 4u;
const uint GLU_OP_GEGLU_QUICK = 5u;
const uint GLU_OP_SWIGLU_CLAMP = 6u;

const uint NORM_OP_RMS = 0u;
const uint NORM_OP_NORM = 1u;
const uint NORM_OP_L2 = 2u;

const uint MASK_TYPE_NONE = 0u;
const uint MASK_TYPE_F32 = 1u;
const uint MASK_TYPE_F16 = 2u;
