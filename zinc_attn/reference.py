"""Oracles. ``attention`` is the float64 truth; ``emulate`` is the kernels' float32 arithmetic, bit for bit.

``emulate`` reads like the shaders: the same states, the same order, one rounding per operation. NumPy's float32
add, subtract, multiply, maximum and rint round as IEEE 754 says and are never fused, which is all it needs.

The third part is the textbook form of the same algebra (Milakov and Gimelshein 2018; Dao et al. 2023): an online
pass over paged keys, and partitions merged by their (m, denominator, accumulator).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from . import shapes
from .shapes import CHUNK, LANES, LEAF, NODE

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]

_BLOCK_ELEMENTS = 1 << 17  # float32 elements of the value accumulator that are worked on at a time


def _f32(value: float) -> np.float32:
    return np.float32(value)


def _rows(q: NDArray[Any]) -> NDArray[Any]:
    return q[None] if q.ndim == 2 else q


def attention(
    q: NDArray[Any],
    k: NDArray[Any],
    v: NDArray[Any],
    *,
    scale: float | None = None,
    causal: bool = True,
) -> tuple[F64, F64]:
    """Softmax attention in float64.

    q: (q_heads, head_dim) or (q_len, q_heads, head_dim); k, v: (tokens, kv_heads, head_dim), any float dtype.
    With ``causal`` row i sees keys up to position tokens - q_len + i. Returns out with q's shape and lse
    (natural log) with q's shape without head_dim; 0 and -inf where a row sees no key.
    """
    rows = _rows(q).astype(np.float64)
    q_len, q_heads, head_dim = rows.shape
    tokens, kv_heads, _ = k.shape
    factor = 1.0 / math.sqrt(head_dim) if scale is None else float(scale)
    out = np.zeros(rows.shape)
    lse = np.full((q_len, q_heads), -np.inf)
    group = q_heads // kv_heads
    for head in range(kv_heads):
        keys, values = k[:, head].astype(np.float64), v[:, head].astype(np.float64)
        heads = slice(head * group, (head + 1) * group)
        for i in range(q_len):
            limit = tokens - q_len + 1 + i if causal else tokens
            if limit <= 0:
                continue
            s = rows[i, heads] @ keys[:limit].T * factor
            top = s.max(axis=1, keepdims=True)
            p = np.exp(s - top)
            total = p.sum(axis=1, keepdims=True)
            out[i, heads] = p @ values[:limit] / total
            lse[i, heads] = (top + np.log(total))[:, 0]
    return out.reshape(q.shape), lse.reshape(q.shape[:-1])


# --- the kernels' arithmetic -------------------------------------------------------------------------------


class State(NamedTuple):
    """Unnormalised attention over a set of keys: m (...), l (...), o (..., head_dim), float32."""

    m: F32
    l: F32  # noqa: E741  (the literature's name)
    o: F32


def empty_state(lead: tuple[int, ...], head_dim: int) -> State:
    """The state of no keys; merging with it changes no bit."""
    m = np.full(lead, shapes.EMPTY_M, np.float32)
    return State(m, np.zeros(lead, np.float32), np.zeros((*lead, head_dim), np.float32))


def _pow2(d: F32) -> F32:
    """2**d for integers d <= 0, and 0 below the cut-off."""
    exponent = np.maximum(d, _f32(shapes.CUTOFF)).astype(np.int32)
    exact = np.ldexp(_f32(1.0), exponent).astype(np.float32)
    return np.where(d < _f32(shapes.CUTOFF), _f32(0.0), exact)


def _flush(x: F32) -> F32:
    return np.where(np.abs(x) < _f32(shapes.FLUSH), _f32(0.0), x)


def merge(a: State, b: State) -> State:
    """a then b, in this order; the only rounding is the add."""
    m = np.maximum(a.m, b.m)
    wa, wb = _pow2(a.m - m), _pow2(b.m - m)
    total = _flush(a.l * wa + b.l * wb)
    return State(m, total, _flush(a.o * wa[..., None] + b.o * wb[..., None]))


def _weight(s: F32, m: F32) -> F32:
    """2**(s - m): a power of two times the polynomial on [-1/2, 1/2]."""
    whole = np.rint(s)
    x = s - whole
    y = np.full_like(x, shapes.EXP2_POLY[-1])
    for c in reversed(shapes.EXP2_POLY[:-1]):
        y = y * x + _f32(c)
    return y * _pow2(whole - m)


def _scores(q: F32, keys: F32, scale: np.float32) -> F32:
    """(vectors, tokens) from q (vectors, head_dim) and keys (head_dim, tokens), in chunks of 8 dimensions."""
    dot = np.zeros((q.shape[0], keys.shape[1]), np.float32)
    product = np.empty_like(dot)
    for c in range(0, q.shape[1], CHUNK):
        part = q[:, c, None] * keys[c]
        for d in range(c + 1, c + CHUNK):
            np.multiply(q[:, d, None], keys[d], out=product)
            part += product
        dot += part
    dot *= scale
    return dot


def _leaf_states(q: F32, k: F32, v: F32, limits: NDArray[np.int64], first: int, scale: np.float32) -> State:
    """States (leaves, vectors) of whole leaves: q (vectors, head_dim), k and v (leaves * 64, head_dim).

    ``limits`` (vectors,) are the numbers of keys each vector sees, counted from absolute position 0; ``first`` is
    the absolute position of k[0].
    """
    vectors, head_dim = q.shape
    leaves = k.shape[0] // LEAF
    s = _scores(q, np.ascontiguousarray(k.T), scale)
    present = (first + np.arange(k.shape[0]))[None] < limits[:, None]
    s = np.where(present, s, _f32(shapes.EMPTY_M)).reshape(vectors, leaves, LEAF).transpose(1, 0, 2)
    present = present.reshape(vectors, leaves, LEAF).transpose(1, 0, 2)
    m = np.rint(s.max(axis=2))
    p = np.where(present, _weight(s, m[..., None]), _f32(0.0))
    c = np.zeros((leaves, vectors, LANES), np.float32)
    for t in range(0, LEAF, LANES):
        c += p[:, :, t : t + LANES]
    total = (c[..., 0] + c[..., 1]) + (c[..., 2] + c[..., 3])
    values = v.reshape(leaves, LEAF, head_dim)
    o = np.zeros((leaves, vectors, head_dim), np.float32)
    product = np.empty_like(o)
    for t in range(LEAF):
        np.multiply(p[:, :, t, None], values[:, None, t], out=product)
        o += product
    return State(m, total, _flush(o))


def _fold(states: State) -> State:
    """Fold axis 0, ascending."""
    total = empty_state(states.m.shape[1:], states.o.shape[-1])
    for i in range(states.m.shape[0]):
        total = merge(total, State(states.m[i], states.l[i], states.o[i]))
    return total


def _reciprocal(x: F32) -> F32:
    y = (np.uint32(shapes.RCP_SEED) - x.view(np.uint32)).view(np.float32)
    for _ in range(3):
        y = y + y * (_f32(1.0) - x * y)
    return y


def _natural_lse(m: F32, total: F32) -> F32:
    bits = total.view(np.uint32)
    exponent = (bits >> 23).astype(np.int32) - 127
    mantissa = ((bits & np.uint32(0x7FFFFF)) | np.uint32(0x3F800000)).view(np.float32)
    upper = mantissa > _f32(shapes.SQRT2)
    x = np.where(upper, mantissa * _f32(0.5), mantissa) - _f32(1.0)
    e = m + np.where(upper, exponent + 1, exponent).astype(np.float32)
    z = x * x
    y = np.full_like(x, shapes.LN_POLY[-1])
    for c in reversed(shapes.LN_POLY[:-1]):
        y = y * x + _f32(c)
    y = (y * x) * z
    y = y + e * _f32(shapes.LN2_LO)
    y = y - _f32(0.5) * z
    return (x + y) + e * _f32(shapes.LN2_HI)


def finish(state: State) -> tuple[F32, F32]:
    """(out, natural lse) of a state: o / l, and 0 and -inf for no keys."""
    empty = state.l < _f32(0.25)
    total = np.ascontiguousarray(np.where(empty, _f32(1.0), state.l))
    out = _flush(state.o * _reciprocal(total)[..., None])
    lse = _natural_lse(np.ascontiguousarray(state.m), total)
    return np.where(empty[..., None], _f32(0.0), out), np.where(empty, _f32(-np.inf), lse)


def as_input(x: NDArray[Any]) -> F32:
    """float32 values as they enter the arithmetic: a float32 magnitude below 2**-40 becomes +0."""
    if x.dtype == np.float16:
        return x.astype(np.float32)
    return np.where(np.abs(x) < _f32(shapes.MIN_INPUT), _f32(0.0), x).astype(np.float32)


def score_scale(head_dim: int, scale: float | None) -> np.float32:
    """The one factor of the scores: scale * log2(e), rounded once. ``scale`` None means 1 / sqrt(head_dim)."""
    return _f32((1.0 / math.sqrt(head_dim) if scale is None else float(scale)) * shapes.LOG2E)


def emulate(
    q: NDArray[Any],
    k: NDArray[Any],
    v: NDArray[Any],
    *,
    scale: float | None = None,
    causal: bool = True,
) -> tuple[F32, F32]:
    """The bits every kernel, layout, driver and device gives: (out, lse), float32.

    q: (q_heads, head_dim) or (q_len, q_heads, head_dim) float32 or float16; k, v: (tokens, kv_heads, head_dim)
    float32 or float16. Semantics as in ``attention``.
    """
    rows = as_input(_rows(q))
    q_len, q_heads, head_dim = rows.shape
    tokens, kv_heads, _ = k.shape
    group = q_heads // kv_heads
    factor = score_scale(head_dim, scale)
    limits = np.maximum(tokens - q_len + 1 + np.arange(q_len), 0) if causal else np.full(q_len, tokens)
    vectors = q_len * group
    block = max(1, _BLOCK_ELEMENTS // (vectors * head_dim * NODE)) * NODE * LEAF
    out = np.empty((q_len, q_heads, head_dim), np.float32)
    lse = np.empty((q_len, q_heads), np.float32)
    for head in range(kv_heads):
        heads = slice(head * group, (head + 1) * group)
        mine = np.ascontiguousarray(rows[:, heads]).reshape(vectors, head_dim)
        vector_limits = np.repeat(limits, group)
        total = empty_state((vectors,), head_dim)
        for first in range(0, tokens, block):
            last = min(first + block, tokens)
            padded = -(-(last - first) // (LEAF * NODE)) * LEAF * NODE
            keys = np.zeros((padded, head_dim), np.float32)
            values = np.zeros((padded, head_dim), np.float32)
            keys[: last - first] = as_input(k[first:last, head])
            values[: last - first] = as_input(v[first:last, head])
            leaf = _leaf_states(mine, keys, values, vector_limits, first, factor)
            by_node = State(*(x.reshape(-1, NODE, *x.shape[1:]).swapaxes(0, 1) for x in leaf))
            nodes = _fold(by_node)
            for i in range(nodes.m.shape[0]):
                total = merge(total, State(nodes.m[i], nodes.l[i], nodes.o[i]))
        part_out, part_lse = finish(total)
        out[:, heads] = part_out.reshape(q_len, group, head_dim)
        lse[:, heads] = part_lse.reshape(q_len, group)
    return out.reshape(q.shape), lse.reshape(q.shape[:-1])


# --- the textbook form -------------------------------------------------------------------------------------


class Partial(NamedTuple):
    """One query's attention over a set of keys, float64: largest score, denominator, unnormalised accumulator."""

    m: float
    denominator: float
    accumulator: F64


def attend_partial(q: F64, k: F64, v: F64, scale: float) -> Partial:
    """q (head_dim,), k and v (keys, head_dim). Not normalised: a normalised partial can no longer be merged."""
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
