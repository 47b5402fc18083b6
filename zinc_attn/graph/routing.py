"""Routers and sums of experts, with the bits of shaders/graph/{route,sum_experts}.comp: operations in a row."""

import numpy as np
from numpy.typing import NDArray

from ..canonical.state import F32
from .elementwise import binary, unary
from .order import top_k
from .rows import soft_max, sum_rows


def route(
    x: F32,
    k: int,
    gate: str,
    bias: F32 | None = None,
    norm: str = "none",
    clamp: tuple[float, float] = (0.0, np.inf),
    scale: tuple[float, float] | None = None,
) -> tuple[NDArray[np.int32], F32]:
    """The k experts of each row of logits x (rows, experts), and their weights (rows, k); as ROUTE declares them.

    bias: (1 or rows, experts). clamp: of the sum by which norm "sum" divides; scale: factor and what is added.
    """
    probabilities = _soft_max(x) if gate == "soft_max" else unary("sigmoid", x) if gate == "sigmoid" else x
    ids = top_k(probabilities if bias is None else binary("add", probabilities, bias), k)
    weights: F32 = np.take_along_axis(probabilities, ids, axis=-1)
    if norm == "sum":
        weights = binary("div", weights, np.repeat(unary("clamp", sum_rows(weights), *clamp), k, axis=-1))
    elif norm == "soft_max":
        weights = _soft_max(weights)
    return ids, weights if scale is None else unary("scale", weights, *scale)


def _soft_max(x: F32) -> F32:
    y: F32 = soft_max(x[None, None], 1.0)[0, 0]
    return y


def sum_experts(x: F32, weights: F32, *added: F32) -> F32:
    """x (rows, experts, elements) times weights (rows, experts, 1), summed over experts in order, then ``added``."""
    products = binary("mul", x, np.broadcast_to(weights, x.shape))
    total: F32 = products[:, 0]
    for term in (*products.swapaxes(0, 1)[1:], *added):
        total = binary("add", total, term)
    return total
