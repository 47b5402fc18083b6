"""Attention states (m, l, o) in NumPy float32, with the bits of ``state.glsl`` and ``floats.glsl`` in ``shaders/``.

m is the maximum of the scores, an integer in log2 units; l the sum of the weights 2**(score - m); o the sum of the
weighted values. NumPy's float32 add, subtract, multiply, maximum and rint round as IEEE 754 says and are never fused.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from . import constants

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]


def f32(value: float) -> np.float32:
    return np.float32(value)


class State(NamedTuple):
    """Unnormalized attention over a set of keys: m (...), l (...), o (..., head_dim), float32."""

    m: F32
    l: F32  # noqa: E741  (the literature's name)
    o: F32


def empty_state(lead: tuple[int, ...], head_dim: int) -> State:
    """The state of no keys; merging with it changes no bit."""
    m = np.full(lead, constants.EMPTY_M, np.float32)
    return State(m, np.zeros(lead, np.float32), np.zeros((*lead, head_dim), np.float32))


def pow2(d: F32) -> F32:
    """2**d for integers d <= 0, and 0 below the cut-off."""
    exponent = np.maximum(d, f32(constants.CUTOFF)).astype(np.int32)
    exact = np.ldexp(f32(1.0), exponent).astype(np.float32)
    return np.where(d < f32(constants.CUTOFF), f32(0.0), exact)


def flush(x: F32) -> F32:
    return np.where(np.abs(x) < f32(constants.FLUSH), f32(0.0), x)


def merge(a: State, b: State) -> State:
    """a then b, in this order; the only rounding is the add."""
    m = np.maximum(a.m, b.m)
    wa, wb = pow2(a.m - m), pow2(b.m - m)
    total = flush(a.l * wa + b.l * wb)
    return State(m, total, flush(a.o * wa[..., None] + b.o * wb[..., None]))


def polynomial(x: F32, coefficients: Sequence[float]) -> F32:
    """c0 + c1 x + c2 x**2 + ... by Horner's rule, with a rounding after each product and each sum."""
    y = np.full_like(x, coefficients[-1])
    for c in reversed(coefficients[:-1]):
        y = y * x + f32(c)
    return y


def weight(s: F32, m: F32) -> F32:
    """2**(s - m): a power of two times the polynomial on [-1/2, 1/2]."""
    whole = np.rint(s)
    return polynomial(s - whole, constants.EXP2_POLY) * pow2(whole - m)


def tanh(x: F32) -> F32:
    """tanh x by its odd polynomial where 1 - 2**(-2 |x| log2 e) would cancel, else from that power of two."""
    size = np.minimum(np.abs(x), f32(constants.TANH_MAX))
    e = weight(size * (f32(-2.0) * f32(constants.LOG2E)), np.zeros_like(size))
    large = (f32(1.0) - e) * reciprocal(f32(1.0) + e)
    z = size * size
    y = polynomial(z, constants.TANH_POLY)
    small = size + (y * z) * size
    result = np.where(size < f32(constants.TANH_SMALL), small, large)
    return np.where(x < 0, -result, result)


def soft_capped(t: F32, cap: float) -> F32:
    """cap * tanh(t / cap) in log2 units; cap: a float32 number."""
    return (f32(cap) * tanh(t * f32(1.0 / cap))) * f32(constants.LOG2E)


def sink_scores(sinks: NDArray[Any]) -> F32:
    """Sinks in log2 units, as the kernels take them: float32 sink times float32 log2(e)."""
    return np.asarray(sinks, np.float32) * f32(constants.LOG2E)


def sink_state(scores: F32, head_dim: int) -> State:
    """The state of one key per vector with these scores and no value."""
    m = np.rint(scores)
    return State(m, weight(scores, m), np.zeros((*scores.shape, head_dim), np.float32))


def fold_ascending(states: State, total: State | None = None) -> State:
    """Fold axis 0, ascending, into ``total``, or into the state of no keys."""
    total = empty_state(states.m.shape[1:], states.o.shape[-1]) if total is None else total
    for i in range(states.m.shape[0]):
        total = merge(total, State(states.m[i], states.l[i], states.o[i]))
    return total


def reciprocal(x: F32) -> F32:
    y = (np.uint32(constants.RCP_SEED) - x.view(np.uint32)).view(np.float32)
    for _ in range(3):
        y = y + y * (f32(1.0) - x * y)
    return y


def ln(x: F32, power: F32) -> F32:
    """ln(x * 2**power) for normal x > 0."""
    bits = x.view(np.uint32)
    exponent = (bits >> 23).astype(np.int32) - 127
    mantissa = ((bits & np.uint32(0x7FFFFF)) | np.uint32(0x3F800000)).view(np.float32)
    upper = mantissa > f32(constants.SQRT2)
    x = np.where(upper, mantissa * f32(0.5), mantissa) - f32(1.0)
    e = power + np.where(upper, exponent + 1, exponent).astype(np.float32)
    z = x * x
    y = polynomial(x, constants.LN_POLY)
    y = (y * x) * z
    y = y + e * f32(constants.LN2_LO)
    y = y - f32(0.5) * z
    return (x + y) + e * f32(constants.LN2_HI)


def normalize(state: State) -> tuple[F32, F32]:
    """(out, natural lse) of a state: o / l, and 0 and -inf for no keys."""
    empty = state.l < f32(0.25)
    total = np.ascontiguousarray(np.where(empty, f32(1.0), state.l))
    out = flush(state.o * reciprocal(total)[..., None])
    lse = ln(total, state.m)
    return np.where(empty[..., None], f32(0.0), out), np.where(empty, f32(-np.inf), lse)


def as_input(x: NDArray[Any]) -> F32:
    """float32 values as they enter the arithmetic: a float32 magnitude below 2**-40 becomes +0."""
    if x.dtype == np.float16:
        return x.astype(np.float32)
    return np.where(np.abs(x) < f32(constants.MIN_INPUT), f32(0.0), x).astype(np.float32)
