"""Operations element by element, and FIT, which copies attention's operands."""

from typing import Final

from ...kernels.declarations import Access
from .declare import AS_INT8, OF_BLOCKS, OF_ELEMENTS, Field, kernel, tensors

FLOAT_TYPES: Final = ("f32", "f16", "bf16")  # numbered by specialization constants type, x_type, ...
# An invocation writes a word of y. A 16-bit y is contiguous and begins on a word; half a word after its elements stays.
_OF_WORDS: Final = "ceil_div(elements(p.y), 512 if {} else 256)"
BINARY_OPS: Final = ("add", "sub", "mul", "div")  # specialization constant op
# y = a op b; b's sizes divide a's, and it repeats.
BINARY: Final = kernel(
    "binary",
    {"a": "read", "b": "read", "y": "write"},
    ("op", "a_type", "b_type", "y_type"),
    tensors("a", "b", "y"),
    _OF_WORDS.format("y_type"),
)
UNARY_OPS: Final = (
    *("abs", "sgn", "neg", "step", "tanh", "elu", "relu", "sigmoid", "gelu", "gelu_quick", "silu", "hardswish"),
    *("hardsigmoid", "exp", "expm1", "softplus", "gelu_erf", "xielu", "floor", "ceil", "round", "trunc"),  # ggml's
    *("scale", "clamp", "sqr", "sqrt", "log", "sin", "cos", "leaky_relu", "fill"),
)
FOLLOW_OPS: Final = ("none", "mul", "add", "scale")  # operations that may follow another, each with its own rounding
# y = op(x), then none, mul or add of ``other``, which repeats as in BINARY. fill reads no x: bind y in its place.
UNARY: Final = kernel(
    "unary",
    {"x": "read", "other": "read", "y": "write"},
    ("op", "x_type", "y_type", "then"),
    (
        *tensors("x", "other", "y"),
        Field("a", "float", "scale: factor; clamp: minimum; fill: value; leaky_relu: slope below 0; xielu: alpha_n"),
        Field("b", "float", "scale: bias; clamp: maximum; xielu: alpha_p"),
        Field("c", "float", "xielu: beta"),
        Field("d", "float", "xielu: eps"),
    ),
    _OF_WORDS.format("y_type"),
)
GLU_OPS: Final = (
    *("reglu", "geglu", "swiglu", "swiglu_oai", "geglu_erf", "geglu_quick", "swiglu_clamp"),  # ggml's
    "mul",
)
# y = act(a) * b; mul: a * b. Halves of one tensor are two tensors here, and swapped halves are swapped operands.
_GLU_BINDINGS: Final[dict[str, Access]] = {"a": "read", "b": "read", "y": "write"}
_GLU_PARAMS: Final = (
    *tensors("a", "b", "y"),
    Field("alpha", "float", "of swiglu_oai"),
    Field("limit", "float", "of swiglu_oai and swiglu_clamp"),
)
GLU: Final = kernel("glu", _GLU_BINDINGS, ("op", "type"), _GLU_PARAMS, _OF_WORDS.format("type"))
GLU_QUANTIZED: Final = kernel(
    "glu_quantized", _GLU_BINDINGS | AS_INT8, ("op", "type"), _GLU_PARAMS, OF_BLOCKS.format("p.y")
)
# y = a + row ids[i1, i2] of b; float32, ids int32.
ADD_ID: Final = kernel(
    "add_id", {"a": "read", "b": "read", "ids": "read", "y": "write"}, (), tensors("a", "b", "ids", "y"), OF_ELEMENTS
)

# y = x where x has an element in dimension 0, else 0; magnitudes below ``least`` become +0. float32; x and y do
# not overlap. For attention's q, least is 2**-40; for a tensor of attention's results, 0.
FIT: Final = kernel("fit", {"x": "read", "y": "write"}, (), (*tensors("x", "y"), Field("least", "float")), OF_ELEMENTS)
