"""Norms, sums and SOFT_MAX of rows, with the bits of shaders/graph/{norm,sum_rows,soft_max}.comp.

Rows lie along the last axis, ggml's dimension 0.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..canonical.constants import LOG2E
from ..canonical.state import F32, f32, flush, weight
from . import constants, floats
from .elementwise import binary, repeated, unary
from .floats import quietly, quotient


@quietly
def row_sum(x: F32) -> F32:
    """The sum of each row: ``halves_sum`` of partial sums r, of the elements j = r mod SUM_LANES, ascending."""
    lanes = constants.SUM_LANES
    partial = np.zeros((*x.shape[:-1], lanes), np.float32)
    for start in range(0, x.shape[-1], lanes):
        piece = x[..., start : start + lanes]
        partial[..., : piece.shape[-1]] += piece
    return halves_sum(partial)


def halves_sum(partial: F32) -> F32:
    """The sum along the last axis: the upper half is added to the lower, until one element is left."""
    while (lanes := partial.shape[-1] // 2) > 0:
        partial = partial[..., :lanes] + partial[..., lanes:]
    return partial[..., 0]


@quietly
def sum_rows(x: F32, factor: float = 1.0) -> F32:
    """The sums times a factor, in rows of one element."""
    return flush(row_sum(flush(x)) * f32(factor))[..., None]


@quietly
def norm(op: str, x: F32, eps: float, *then: tuple[str, Any]) -> F32:
    """RMS_NORM ("rms"), NORM ("norm") or L2_NORM ("l2"), then operations: of FOLLOW_OPS, and an operand or a number."""
    x, least, factor = flush(x), f32(eps), f32(1.0 / x.shape[-1])
    mean = flush(row_sum(x) * factor)[..., None] if op == "norm" else f32(0.0)
    total = row_sum(flush((x - mean) * (x - mean)))
    if op == "l2":
        length = floats.root(total)
        scale = flush(quotient(f32(1.0), flush(np.where(length > least, length, least))))
    else:
        scale = floats.inverse_root(flush(flush(total * factor) + least))
    y = flush((x - mean) * scale[..., None])
    for follower, other in then:
        y = unary("scale", y, other, 0.0) if follower == "scale" else binary(follower, y, other)
    return y


def slopes(max_bias: float, heads: int) -> dict[str, float | int]:
    """The kernel's step, half_step and heads: ggml's ALiBi slopes of so many heads."""
    whole = 1 << (heads.bit_length() - 1)
    return {"step": -max_bias / whole, "half_step": -max_bias / 2 / whole, "heads": whole}


def _slope(head: NDArray[np.int64], step: float, half_step: float, heads: int) -> F32:
    first, second = (head + 1).astype(np.float32), (2 * (head - heads) + 1).astype(np.float32)
    exponent = np.where(head < heads, f32(step) * first, f32(half_step) * second)
    return weight(exponent, np.zeros_like(exponent)) if step else np.ones_like(exponent)


def _weights(s: F32, m: F32) -> F32:
    """2**(s - m); NaN where s or m is NaN, or m is infinite."""
    whole = np.isfinite(m) & ~np.isnan(s)
    lowest = np.finfo(np.float32).min
    p = weight(np.where(whole, np.maximum(s, lowest), f32(0.0)), np.where(whole, m, f32(0.0)))
    return np.where(whole, p, floats.NAN)


@quietly
def soft_max(x: F32, scale: float, mask: NDArray[Any] | None = None, sinks: F32 | None = None, **alibi: Any) -> F32:
    """softmax(x * scale + slope * mask) of x (batch, heads, rows, columns); alibi: of ``slopes``; sinks: one a head."""
    t = flush(x) * f32(scale)
    if mask is not None:
        slope = _slope(np.arange(x.shape[-3]), **alibi)[:, None, None] if alibi else f32(1.0)
        t = t + slope * flush(repeated(mask.astype(np.float32), x.shape))
    s = t * f32(LOG2E)
    most = np.fmax.reduce(s, axis=-1, keepdims=True)
    if sinks is not None:
        sink = flush(sinks)[:, None, None] * f32(LOG2E)
        most = np.maximum(most, sink)
    m = np.where(most == -floats.INF, floats.NAN, np.rint(most))
    p = _weights(s, m)
    total = row_sum(p)[..., None]
    if sinks is not None:
        total = total + _weights(np.broadcast_to(sink, total.shape), m)
    return flush(p * quotient(f32(1.0), total))
