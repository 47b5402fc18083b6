"""The float32 oracle: ``emulate`` gives the kernels' bits. It reads like the shaders: same states, same order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..checks import shown
from ..errors import ArgumentError
from . import constants
from .arguments import checked_arrays, checked_options, key_ranges, log2_biases, log2_slopes, with_rows
from .constants import BIASES, CHUNK, KEYS_PER_LEAF, KEYS_PER_NODE, LEAVES_PER_NODE, WEIGHT_PARTIALS
from .integer import Stored, dots, integers, weighted
from .products import FusedProducts, Products
from .state import (
    F32,
    State,
    as_input,
    empty_state,
    f32,
    flush,
    fold_ascending,
    merge,
    normalize,
    sink_scores,
    sink_state,
    soft_capped,
    weight,
)

_BLOCK_ELEMENTS: Final = 1 << 17  # float32 elements of the value accumulator that are worked on at a time


def score_scale(scale: float, softcap: float | None = None) -> np.float32:
    """The one factor of the scores, rounded once: scale * log2(e), with softcap scale."""
    return f32(scale * constants.LOG2E if softcap is None else scale)


def _dots(q: F32, k: F32, scoring: _Scoring) -> F32:
    """(vectors, tokens) from q (vectors, dims) and k (tokens, dims), in chunks of 8 dimensions."""
    keys = np.ascontiguousarray(k.T)
    dot = np.zeros((q.shape[0], keys.shape[1]), np.float32)
    products = scoring.products(dot.shape)
    a, b = products.factors(q), products.factors(keys)
    for c in range(0, q.shape[1], CHUNK):
        part = q[:, c, None] * keys[c]
        for d in range(c + 1, c + CHUNK):
            products.add(part, a[:, d, None], b[d])
        dot += part
    return dot


def _weighted(p: F32, v: F32, scoring: _Scoring) -> F32:
    """(leaves, vectors, dims) from weights p (leaves, vectors, 64) and v (leaves, 64, dims), keys ascending."""
    o = np.zeros((*p.shape[:2], v.shape[2]), np.float32)
    products = scoring.products(o.shape)
    a, b = products.factors(p * products.scale), products.factors(v)
    for t in range(KEYS_PER_LEAF):
        products.add(o, a[:, :, t, None], b[:, None, t])
    return o * (f32(1.0) / products.scale)


class _Scoring(NamedTuple):
    """scale: one factor, rounded once; mask: None, or float32 (q_len, tokens and more), see ``check_mask``.

    fused: whether a product and its sum are rounded once.
    """

    scale: np.float32
    softcap: float | None
    mask: F32 | None
    fused: bool

    def products(self, shape: tuple[int, ...]) -> Products:
        """An accumulator of products for sums of a shape."""
        return FusedProducts(shape) if self.fused else Products(shape)


class _Rows(NamedTuple):
    """The keys that each vector (query row and head) sees, and its position: each (vectors,).

    A vector sees keys [first, limit). row: its query row; slopes: of biases by name, log2 units; mask_factor: a mask's.
    """

    first: NDArray[Any]
    limit: NDArray[Any]
    position: NDArray[Any]
    row: NDArray[Any]
    slopes: Mapping[str, F32]
    mask_factor: F32


def _leaf_states(
    q: F32, k: F32, v: F32, scales: tuple[F32 | None, F32 | None], rows: _Rows, first: int, scoring: _Scoring
) -> State:
    """States (leaves, vectors) of whole leaves: q (vectors, dims), k (leaves * 64, dims), v (leaves * 64, value_dim).

    scales: of arithmetic "integer", whose k and v are integers. ``first`` is the absolute position of k[0].
    """
    vectors, (k_scales, v_scales) = len(q), scales
    leaves = k.shape[0] // KEYS_PER_LEAF
    s = (_dots(q, k, scoring) if k_scales is None else dots(q, k, k_scales)) * scoring.scale
    if scoring.softcap is not None:
        s = soft_capped(s, scoring.softcap)
    position = (first + np.arange(k.shape[0]))[None]
    present = (position >= rows.first[:, None]) & (position < rows.limit[:, None])
    distance = (position - rows.position[:, None]).astype(np.float32)
    for name, slope in rows.slopes.items():
        s = (s + slope[:, None] * BIASES[name](distance)).astype(np.float32)
    if scoring.mask is not None:
        bias = scoring.mask[rows.row, first : first + k.shape[0]]
        hidden = np.isneginf(bias)
        s = (s + np.where(hidden, f32(0.0), bias) * rows.mask_factor[:, None]).astype(np.float32)
        present = present & ~hidden
    s = np.where(present, s, f32(constants.EMPTY_M)).reshape(vectors, leaves, KEYS_PER_LEAF).transpose(1, 0, 2)
    present = present.reshape(vectors, leaves, KEYS_PER_LEAF).transpose(1, 0, 2)
    m = np.rint(s.max(axis=2))
    p = np.where(present, weight(s, m[..., None]), f32(0.0))
    c = np.zeros((leaves, vectors, WEIGHT_PARTIALS), np.float32)
    for t in range(0, KEYS_PER_LEAF, WEIGHT_PARTIALS):
        c += p[:, :, t : t + WEIGHT_PARTIALS]
    total = (c[..., 0] + c[..., 1]) + (c[..., 2] + c[..., 3])
    by_leaf = v.reshape(leaves, KEYS_PER_LEAF, -1)
    if v_scales is None:
        return State(m, total, flush(_weighted(p, by_leaf, scoring)))
    return State(m, total, weighted(p, by_leaf, v_scales.reshape(leaves, KEYS_PER_LEAF, -1)))


def _attend_head(q: F32, k: Stored, v: Stored, rows: _Rows, scoring: _Scoring) -> State:
    """The state (vectors) of all keys of a KV head: q (vectors, dims), k (tokens, head_dim), v (tokens, value_dim).

    The dimensions of q beyond head_dim are 0, and k's are taken as 0.
    """
    (vectors, dims), (tokens, value_dim) = q.shape, v.values.shape
    block = max(1, _BLOCK_ELEMENTS // (vectors * max(dims, value_dim) * LEAVES_PER_NODE)) * KEYS_PER_NODE
    total = empty_state((vectors,), value_dim)
    for first in range(int(rows.first.min()) // KEYS_PER_NODE * KEYS_PER_NODE, tokens, block):
        last = min(first + block, tokens)
        padded = -(-(last - first) // KEYS_PER_LEAF) * KEYS_PER_LEAF
        (keys, k_scales), (values, v_scales) = (
            x.padded(first, last, padded, size) for x, size in ((k, dims), (v, value_dim))
        )
        leaf = _leaf_states(q, keys, values, (k_scales, v_scales), rows, first, scoring)
        rest = empty_state((-len(leaf.m) % LEAVES_PER_NODE, vectors), value_dim)  # fills up the last node
        whole = (np.concatenate(pair) for pair in zip(leaf, rest, strict=True))
        by_node = State(*(x.reshape(-1, LEAVES_PER_NODE, *x.shape[1:]).swapaxes(0, 1) for x in whole))
        total = fold_ascending(fold_ascending(by_node), total)
    return total


def emulate(  # noqa: PLR0913  (public; all but q, k and v are keywords with a default)
    q: NDArray[Any],
    k: NDArray[Any],
    v: NDArray[Any],
    *,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    sinks: NDArray[Any] | None = None,
    mask: NDArray[Any] | None = None,
    mask_slopes: NDArray[Any] | None = None,
    arithmetic: str = "canonical",
    k_scales: NDArray[Any] | None = None,
    v_scales: NDArray[Any] | None = None,
    **biases: Any,
) -> tuple[F32, F32]:
    """The bits of every kernel, layout, driver and device: (out, lse), float32.

    q: (q_heads, head_dim) or (q_len, q_heads, head_dim); k: (tokens, kv_heads, head_dim); v: (tokens, kv_heads,
    v_head_dim); each float32, float16 or bfloat16. Semantics as in ``attention``; rows that see no key have 0 and -inf
    here, too. arithmetic: "canonical", or "fused", whose sums of q k and of the weighted values round each product and
    its sum at once; it takes about five times as long; or "integer", for which k and v are the values of a cache of
    integers (q8_0, q4_0, q5_0, iq4_nl), and k_scales and v_scales (tokens, kv_heads, blocks) its blocks' float scales.
    """
    if not isinstance(arithmetic, str) or arithmetic not in ("canonical", "fused", "integer"):
        raise ArgumentError(f"arithmetic: got {shown(arithmetic)}, expected 'canonical', 'fused' or 'integer'")
    q, k, v = checked_arrays(q, k, v, ("float32", "float16", "bfloat16"))
    options = checked_options(q, k, scale, causal, window, softcap, sinks, mask, mask_slopes, biases)
    rows = as_input(with_rows(q))
    (q_len, q_heads, head_dim), (tokens, kv_heads, value_dim) = rows.shape, v.shape
    rows, group = np.pad(rows, ((0, 0), (0, 0), (0, -head_dim % CHUNK))), q_heads // kv_heads  # whole chunks
    whole_mask = options.mask  # padded to all keys and to the end of the last node
    if whole_mask is not None:
        whole_mask = np.pad(whole_mask, ((0, 0), (tokens - whole_mask.shape[1], -tokens % KEYS_PER_NODE)))
    scoring = _Scoring(score_scale(options.scale, softcap), options.softcap, whole_mask, arithmetic == "fused")
    keys, values = Stored(k, None), Stored(v, None)
    if arithmetic == "integer":
        keys, values = Stored(*integers("k", k, k_scales)), Stored(*integers("v", v, v_scales))
    slopes, factors = log2_biases(options.biases, q_heads), log2_slopes("mask_slopes", mask_slopes, q_heads)
    factors = np.full(q_heads, constants.LOG2E, np.float32) if factors is None else factors
    numbers, vectors = np.arange(q_len), q_len * group
    row_facts = *key_ranges(tokens, q_len, causal, options.window), tokens - q_len + numbers, numbers
    first_seen, limit, position, row = (np.repeat(x, group) for x in row_facts)
    out = np.empty((q_len, q_heads, value_dim), np.float32)
    lse = np.empty((q_len, q_heads), np.float32)
    for head in range(kv_heads):
        heads = slice(head * group, (head + 1) * group)
        queries = rows[:, heads].reshape(vectors, -1)
        head_slopes = {name: np.tile(slope[heads], q_len) for name, slope in slopes.items()}
        seen = _Rows(first_seen, limit, position, row, head_slopes, np.tile(factors[heads], q_len))
        total = _attend_head(queries, keys.of_head(head), values.of_head(head), seen, scoring)
        if options.sinks is not None:
            total = merge(total, sink_state(np.tile(sink_scores(options.sinks)[heads], q_len), value_dim))
        for target, part in zip((out, lse), normalize(total), strict=True):
            target[:, heads] = part.reshape(q_len, group, *part.shape[1:])
    return out.reshape(*q.shape[:-1], value_dim), lse.reshape(q.shape[:-1])
