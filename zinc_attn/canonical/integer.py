"""Arithmetic "integer": both products of attention are sums of integers, which float32 holds exactly in any order.

K and V are caches of integers times a scale per block of 32 dimensions, so k = scale * n with |n| <= 128. A row of q,
and a leaf's weights times the scales of a block of V, are rounded to 12 bits: integers of at most 2**11 times a power
of two. A block's sum is at most 32 * 2**11 * 128 = 2**23, a leaf's 64 * 2**11 * 128 = 2**24.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..checks import check_array
from ..errors import ArgumentError, ShapeError, ValueRangeError
from ..limits import BLOCK
from .constants import INTEGER_BITS
from .state import F32, as_input, f32

MOST_INTEGER: Final = 128  # the largest magnitude of an integer in a cache


class Stored(NamedTuple):
    """K or V: values (tokens, [kv_heads,] dims). In arithmetic "integer" the values are integers, and scales (tokens,
    [kv_heads,] blocks) are their factors; otherwise scales is None."""

    values: NDArray[Any]
    scales: F32 | None

    def of_head(self, head: int) -> Stored:
        return Stored(self.values[:, head], None if self.scales is None else self.scales[:, head])

    def padded(self, first: int, last: int, rows: int, dims: int) -> tuple[F32, F32 | None]:
        """Tokens [first, last) as (rows, dims) and (rows, blocks), 0 after the last token and dimension."""
        parts = [np.zeros((rows, size), np.float32) for size in (dims, -(-dims // BLOCK))]
        for part, x in zip(parts, self, strict=True):
            if x is not None:
                part[: last - first, : x.shape[1]] = as_input(x[first:last])
        return parts[0], None if self.scales is None else parts[1]


def integers(name: str, x: NDArray[Any], scales: Any) -> tuple[F32, F32]:
    """The integers of K or V (tokens, kv_heads, dims), whose values are integers times scales (tokens, kv_heads,
    blocks), and the scales in float32. An integer is 0 where its scale is."""
    if scales is None:
        raise ArgumentError(f"{name}_scales: got None, expected the scales of the blocks of {name}'s cache")
    array = check_array(f"{name}_scales", scales, ("float16", "float32"))
    expected = (*x.shape[:-1], -(-x.shape[-1] // BLOCK))
    if array.shape != expected:
        raise ShapeError(f"{name}_scales: got shape {array.shape}, expected {expected}, one for {BLOCK} dimensions")
    factors = array.astype(np.float32)
    each = np.repeat(factors, BLOCK, axis=2)[..., : x.shape[2]]
    values = as_input(x)
    whole = np.rint(np.divide(values, each, out=np.zeros_like(values), where=each != 0))
    if not np.array_equal(whole * each, values) or np.abs(whole).max(initial=0) > MOST_INTEGER:
        raise ValueRangeError(
            f"{name}: got values that are no integers of at most {MOST_INTEGER} times {name}_scales, expected what a "
            "cache of q8_0, q4_0, q5_0 or iq4_nl holds"
        )
    return whole, factors


def rounded(x: F32, axis: int) -> tuple[F32, F32]:
    """(x along ``axis`` as integers of at most 2**11, their power-of-two unit)."""
    top = np.abs(x).max(axis=axis, keepdims=True)
    exponent = np.where(top > 0, np.frexp(top)[1] - 1 - INTEGER_BITS, 0)
    return np.rint(x * np.ldexp(f32(1.0), -exponent)), np.ldexp(f32(1.0), exponent)


def rounded_rows(q: NDArray[Any]) -> F32:
    """Rows of q (..., dims) as the kernel attend takes them: ``rounded``, then multiplied by their powers of two."""
    whole, unit = rounded(q.astype(np.float32, copy=False), -1)
    return whole * unit


def dots(q: F32, keys: F32, scales: F32) -> F32:
    """(vectors, tokens) from q (vectors, dims), integers (tokens, dims) and scales (tokens, blocks)."""
    a, unit = rounded(q, 1)
    total = np.zeros((len(q), len(keys)), np.float32)
    for b in range(scales.shape[1]):
        block = slice(b * BLOCK, (b + 1) * BLOCK)
        total += scales[:, b] * (a[:, block] @ keys[:, block].T)
    return total * unit


def weighted(p: F32, values: F32, scales: F32) -> F32:
    """(leaves, vectors, dims) from p (leaves, vectors, 64), values (leaves, 64, dims), scales (leaves, 64, blocks)."""
    sums = []
    for b in range(scales.shape[2]):
        u, unit = rounded(p * scales[:, None, :, b], 2)
        sums.append((u @ values[:, :, b * BLOCK : (b + 1) * BLOCK]) * unit)
    return np.concatenate(sums, axis=2)
