"""Experts: the experts of a token, and the sum of their results. Operations of a graph in one dispatch each."""

from typing import Final

from .declare import AS_INT8, OF_ELEMENTS, OF_ROWS, Field, kernel, tensors
from .rows import NORM_PARAMS

# The experts of a row among n, and their weights, as the operations named here make them.
# gate of a row's logits x: none, soft_max (SOFT_MAX), sigmoid. ids: the first ids.n[0] of ARGSORT, descending, of the
# gate's results, plus bias where ``biased``; y: the gate's results there (GET_ROWS), normed by sum (SUM_ROWS, CLAMP to
# least and most, DIV) or soft_max (SOFT_MAX of the chosen), then SCALE where ``scaled``.
# x and bias: (n, rows), n at most ROUTE_PIECE; the bias may repeat. ids and y: (k, rows), k at most CHOSEN_PIECE.
ROUTE_PIECE: Final = 1024
CHOSEN_PIECE: Final = 256  # an expert of a row has an invocation
GATE_OPS: Final = ("none", "soft_max", "sigmoid")
ROUTE_NORM_OPS: Final = ("none", "sum", "soft_max")
ROUTE: Final = kernel(
    "route",
    {"x": "read", "bias": "read", "ids": "write", "y": "write"},
    ("gate", "biased", "norm", "scaled"),
    (
        *tensors("x", "bias", "ids", "y"),
        Field("least", "float"),
        Field("most", "float"),
        Field("factor", "float", "of SCALE"),
        Field("added", "float", "number that SCALE adds"),
    ),
    OF_ROWS,
)
# y = the sum of a row's experts in order, each times its weight: MUL, then ADD of the first two, of the next, ...; then
# ADD of plus and of more: ``added`` of them, 0 to 2.
# experts: (elements, experts, rows), weights: (1, experts, rows), y: (elements, rows), plus and more such, contiguous.
_SUM_PARAMS: Final = (*tensors("experts", "weights"), Field("added", "uint", "where plus and more begin", 2))
SUM_EXPERTS: Final = kernel(
    "sum_experts",
    {"experts": "read", "weights": "read", "plus": "read", "more": "read", "y": "write"},
    ("added",),
    (*_SUM_PARAMS, *tensors("y")),
    OF_ELEMENTS,
)
# NORM_QUANTIZED of SUM_EXPERTS' sum, which is written to x, contiguous; ``second`` is none.
NORM_SUMMED: Final = kernel(
    "norm_summed",
    {"x": "write", "a": "read", "more": "read", "y": "write", **AS_INT8}
    | {"experts": "read", "weights": "read", "plus": "read"},
    ("op", "first", "second", "added"),
    (*_SUM_PARAMS, *NORM_PARAMS),
    OF_ROWS,
)
