"""The textbook form of the kernels' algebra: an online pass over paged keys, and partitions that are merged.

Source: Milakov and Gimelshein 2018; Dao et al. 2023.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]


class Partial(NamedTuple):
    """One query's attention over a set of keys, float64: largest score, denominator, unnormalized accumulator."""

    m: float
    denominator: float
    accumulator: F64


def attend_partial(q: F64, k: F64, v: F64, scale: float) -> Partial:
    """q (head_dim,), k and v (keys, head_dim). Not normalized: a normalized partial can no longer be merged."""
    if len(k) == 0:
        return Partial(-math.inf, 0.0, np.zeros(v.shape[1]))
    s = k @ q * scale
    p = np.exp(s - s.max())
    return Partial(float(s.max()), float(p.sum()), p @ v)


def merge_two(a: Partial, b: Partial) -> Partial:
    """Both rescaled to the larger m. Associative and commutative up to rounding; no keys are the identity."""
    m = max(a.m, b.m)
    if m == -math.inf:
        return a
    wa, wb = math.exp(a.m - m), math.exp(b.m - m)
    return Partial(m, a.denominator * wa + b.denominator * wb, a.accumulator * wa + b.accumulator * wb)


def merge_partials(partials: Iterable[Partial]) -> F64:
    """The output (head_dim,) of the union of the partials' keys; 0 for no keys."""
    total: Partial | None = None
    for partial in partials:
        total = partial if total is None else merge_two(total, partial)
    if total is None:
        raise ValueError("merge_partials: got no partial, expected at least one")
    return total.accumulator / total.denominator if total.denominator else total.accumulator


def partitioned_attention(q: F64, k: F64, v: F64, parts: int, scale: float) -> F64:
    """Split the keys into ``parts`` ranges (some may be empty), attend each, merge."""
    ranges = np.array_split(np.arange(len(k)), parts)
    return merge_partials(attend_partial(q, k[r], v[r], scale) for r in ranges)


def paged_online_attention(
    q: F64, k_pages: F64, v_pages: F64, block_table: Iterable[int], tokens: int, scale: float
) -> F64:
    """One streaming pass over scattered pages: k_pages, v_pages (pages, page_size, head_dim).

    Token t is row t % page_size of page block_table[t // page_size]; the last page is read up to ``tokens``.
    """
    size = k_pages.shape[1]
    total = Partial(-math.inf, 0.0, np.zeros(v_pages.shape[2]))
    for i, page in enumerate(block_table):
        valid = min(size, tokens - i * size)
        if valid <= 0:
            break
        total = merge_two(total, attend_partial(q, k_pages[page, :valid], v_pages[page, :valid], scale))
    return total.accumulator / total.denominator if total.denominator else total.accumulator
