"""Operations on rows, a workgroup each, and rotary positions."""

from typing import Final

from ...kernels.declarations import Access
from .declare import AS_INT8, OF_ROWS, Field, kernel, tensors

NORM_OPS: Final = ("rms", "norm", "l2")
# y = norm(x), then two of FOLLOW_OPS: mul or add of a, then b, which repeat as in BINARY; scale: SCALE without a bias.
# GROUP_NORM is norm of a contiguous x whose dimension 0 is a whole group. Unused bindings: any buffer.
_NORM_BINDINGS: Final[dict[str, Access]] = {"x": "read", "a": "read", "b": "read", "y": "write"}
NORM_PARAMS: Final = (
    *tensors("x", "a", "b", "y"),
    Field("eps", "float"),
    Field("factor", "float", "1 / elements of a row, rounded once; not of l2"),
    Field("scales", "float", "of the two operations that follow", 2),
    Field("joined", "uint", "rows of y that form an int8 row: 1, or more where rows are whole blocks"),
)
_NORM_SPEC: Final = "op", "first", "second"
NORM_QUANTIZED: Final = kernel("norm_quantized", _NORM_BINDINGS | AS_INT8, _NORM_SPEC, NORM_PARAMS, OF_ROWS)
MASK_TYPES: Final = ("none", "f32", "f16")  # specialization constant mask_type
# y = softmax(x * scale + slope * mask) along dimension 0; the mask repeats in dimensions 2 and 3. sinks: float32, one a
# head (dimension 2). The slope of head h is 1 where step is 0, else 2**(step * (h + 1)) for h < heads, and else
# 2**(half_step * (2 * (h - heads) + 1)).
SOFT_MAX: Final = kernel(
    "soft_max",
    {"x": "read", "mask": "read", "sinks": "read", "y": "write"},
    ("mask_type", "has_sinks"),
    (
        *tensors("x", "mask", "y"),
        Field("sinks", "uint", "element of head 0's sink"),
        Field("scale", "float"),
        Field("step", "float", "-max_bias / heads"),
        Field("half_step", "float", "-max_bias / 2 / heads"),
        Field("heads", "uint", "the largest power of two up to x's dimension 2"),
    ),
    OF_ROWS,
)
# y = factor * the sum of a row: of ``terms`` elements of x, counted through its dimensions 0, 1, ... SUM_ROWS: terms is
# x's dimension 0 and factor 1; MEAN: factor 1 / terms, rounded once; SUM: terms is all of x.
SUM_ROWS: Final = kernel(
    "sum_rows",
    {"x": "read", "y": "write"},
    (),
    (*tensors("x", "y"), Field("terms", "uint", "elements of a row"), Field("factor", "float")),
    "elements(p.y)",
)

# --- rotary positions -------------------------------------------------------------------------------------------------

_TURNS: Final = (
    Field("positions", "uint", "element of the first position, an int32"),
    Field("stride", "uint", "step from a section's positions to the next section's: x's dimension 2"),
    Field("table", "uint", "word of the first pair"),
    Field("pairs", "uint", "pairs that turn"),
    Field("first", "uint", "element of the first pair"),
    Field("step", "uint", "step from a pair's first element to its second: 1, or pairs"),
    Field("least", "float", "smaller magnitudes of a float32 y become +0, as FIT does for attention; or 0"),
)
_TURNING: Final[dict[str, Access]] = {"positions": "read", "table": "read"}
# y = x with pairs of its dimension 0 turned, the others copied. Type f32 or f16 of both; y as BINARY's where it is f16,
# or in the place of x with any steps between rows; its pairs then are neighbors or a multiple of 2 in number, and
# ``first`` is even. An invocation has a pair, or two elements that are copied, and of f16 at least that.
# table: ROPE_WORDS words a pair, made by graph.rope and rope_table of native/graph.
ROPE_WORDS: Final = 4  # low and high word of the fraction of a turn; which of 4 positions; the factor, a float32
ROPE: Final = kernel(
    "rope",
    {"x": "read", **_TURNING, "y": "write"},
    ("type",),
    (*tensors("x", "y"), *_TURNS),
    "ceil_div(elements(p.y), 512)",
)
# rope 1: y is ROPE, of f32, of the norm's result after the operations that follow.
NORM: Final = kernel("norm", _NORM_BINDINGS | _TURNING, (*_NORM_SPEC, "rope"), (*NORM_PARAMS, *_TURNS), OF_ROWS)
