"""Oracles. ``attention`` is the float64 truth; ``emulate`` is the kernels' float32 arithmetic, bit for bit.

``emulate`` reads like the shaders: the same states, the same order, one rounding per operation. NumPy's float32
add, subtract, multiply, maximum and rint round as IEEE 754 says and are never fused, which is all it needs.

The third part is the textbook form of the same algebra (Milakov and Gimelshein 2018; Dao et al. 2023): an online
pass over paged keys, and partitions merged by their (m, denominator, accumulator).

The last part is attention states as values. ``PartialState`` holds what pass 1 computes for whole nodes of 512 keys,
unnormalised; ``fold`` gives the bits of one device attending everything, in whatever order the parts come.
``merge_state`` and ``merge_states`` take FlashInfer's (v, s), s = natural log-sum-exp: accurate (float64 inside), not
bit-canonical. A state of no keys has v = 0 and s = -inf and changes nothing.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .. import shapes
from ..errors import ArgumentError, ShapeError, ValueRangeError
from ..shapes import CHUNK, LANES, LEAF, NODE, check_array, check_bool, check_float, check_int, check_text, shown
from .tensorfile import LENGTH_BYTES, decimal, decode_header, encode_header, header_size, plain

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]

_BLOCK_ELEMENTS = 1 << 17  # float32 elements of the value accumulator that are worked on at a time


def _f32(value: float) -> np.float32:
    return np.float32(value)


def _rows(q: NDArray[Any]) -> NDArray[Any]:
    return q[None] if q.ndim == 2 else q


def key_ranges(tokens: int, q_len: int, causal: bool, window: int | None) -> tuple[NDArray[Any], NDArray[Any]]:
    """(first, limit) of each of q_len rows: row i sees keys [first, limit), first >= limit where it sees none."""
    behind = np.maximum(tokens - q_len + 1 + np.arange(q_len), 0)  # its own position and what comes before
    limits = behind if causal else np.full(q_len, tokens)
    firsts = np.zeros(q_len, np.int64) if window is None else np.maximum(behind - window, 0)
    return firsts, limits


def attention(
    q: NDArray[Any],
    k: NDArray[Any],
    v: NDArray[Any],
    *,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    sinks: NDArray[Any] | None = None,
) -> tuple[F64, F64]:
    """Softmax attention in float64.

    q: (q_heads, head_dim) or (q_len, q_heads, head_dim); k, v: (tokens, kv_heads, head_dim), any float dtype.
    With ``causal`` row i sees keys up to position tokens - q_len + i; with ``window`` that many keys at most, its own
    position counted. softcap: scores become softcap * tanh(score / softcap). sinks: (q_heads,), a logit per query head
    that joins the softmax without a value. Returns out with q's shape and lse (natural log, sinks included) with q's
    shape without head_dim; 0 and -inf where a row sees no key and no sink.
    """
    q, k, v = _checked_arrays(q, k, v, ("float32", "float16", "float64", "bfloat16"))
    scale, window, softcap, sinks = _checked_options(q.shape[-2], scale, causal, window, softcap, sinks)
    rows = _rows(q).astype(np.float64)
    q_len, q_heads, head_dim = rows.shape
    tokens, kv_heads, _ = k.shape
    factor = 1.0 / math.sqrt(head_dim) if scale is None else scale
    out = np.zeros(rows.shape)
    sink = np.full(q_heads, -np.inf) if sinks is None else np.asarray(sinks, np.float64)
    lse = np.repeat(sink[None], q_len, axis=0)
    group = q_heads // kv_heads
    firsts, limits = key_ranges(tokens, q_len, causal, window)
    for head in range(kv_heads):
        keys, values = k[:, head].astype(np.float64), v[:, head].astype(np.float64)
        heads = slice(head * group, (head + 1) * group)
        for i in range(q_len):
            seen = slice(firsts[i], limits[i])
            if firsts[i] >= limits[i]:
                continue
            s = rows[i, heads] @ keys[seen].T * factor
            if softcap is not None:
                s = softcap * np.tanh(s / softcap)
            top = np.maximum(s.max(axis=1, keepdims=True), sink[heads, None])
            p = np.exp(s - top)
            total = p.sum(axis=1, keepdims=True) + np.exp(sink[heads, None] - top)
            out[i, heads] = p @ values[seen] / total
            lse[i, heads] = (top + np.log(total))[:, 0]
    return out.reshape(q.shape), lse.reshape(q.shape[:-1])


def _checked_arrays(q: Any, k: Any, v: Any, dtypes: tuple[str, ...]) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """q, k and v as arrays that fit each other and hold numbers that the kernels take: see ``attention``."""
    qa, ka, va = (check_array(name, x, dtypes) for name, x in (("q", q), ("k", k), ("v", v)))
    if qa.ndim not in (2, 3) or 0 in qa.shape:
        raise ShapeError(f"q: got shape {qa.shape}, expected (q_heads, head_dim) or (q_len, q_heads, head_dim)")
    if ka.ndim != 3 or not ka.shape[1] or ka.shape[2] != qa.shape[-1] or qa.shape[-2] % ka.shape[1]:
        raise ShapeError(
            f"k: got shape {ka.shape}, expected (tokens, kv_heads, {qa.shape[-1]}) with a kv_heads that divides q's "
            f"{qa.shape[-2]} heads"
        )
    if va.shape != ka.shape:
        raise ShapeError(f"v: got shape {va.shape}, expected k's {ka.shape}")
    for name, x in (("q", qa), ("k", ka)):
        if x.ndim == 3 and len(x) > shapes.MAX_CONTEXT:
            raise ShapeError(f"{name}: got {len(x):,} tokens, expected at most {shapes.MAX_CONTEXT:,}")
    for name, x in (("q", qa), ("k", ka), ("v", va)):
        if x.size and not max(-float(x.min()), float(x.max())) <= shapes.MAX_INPUT:  # false for NaN too
            raise ValueRangeError(f"{name}: got a NaN, an infinity or a magnitude beyond 2**60, expected none")
    return qa, ka, va


def _checked_options(
    q_heads: int, scale: Any, causal: Any, window: Any, softcap: Any, sinks: Any
) -> tuple[float | None, int | None, float | None, NDArray[Any] | None]:
    """scale, window, softcap and sinks; refused where they are not what ``attention`` says."""
    check_bool("causal", causal)
    factor = None if scale is None else check_float("scale", scale)
    if factor is not None and not abs(factor) * shapes.LOG2E < 2.0**127:
        raise ValueRangeError(f"scale: got {factor:g}, expected a finite float32 number")
    keys = None if window is None else check_int("window", window, 1, 1 << 62)  # positions are int64
    cap = None if softcap is None else check_float("softcap", softcap)
    if cap is not None and not shapes.MIN_INPUT <= cap <= shapes.MAX_INPUT:
        raise ValueRangeError(f"softcap: got {cap:g}, expected a number from 2**-40 to 2**60, or None for no cap")
    array = None if sinks is None else check_array("sinks", sinks, ("float32", "float16", "float64"))
    if array is not None and array.shape != (q_heads,):
        raise ShapeError(f"sinks: got shape {array.shape}, expected ({q_heads},), a logit per query head")
    if array is not None and not np.all(np.abs(array) <= shapes.MAX_INPUT):
        raise ValueRangeError("sinks: got a NaN, an infinity or a magnitude beyond 2**60, expected none")
    return factor, keys, cap, array


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


def _soft_capped(t: F32, cap: float) -> F32:
    """cap * tanh(t / cap) in log2 units."""
    cap = float(_f32(cap))
    with np.errstate(over="ignore"):  # t / cap may be infinite, tanh is 1 there
        x = t * _f32(1.0 / cap)
        size = np.minimum(np.abs(x), _f32(shapes.TANH_MAX))
    e = _weight(size * (_f32(-2.0) * _f32(shapes.LOG2E)), np.zeros_like(size))
    large = (_f32(1.0) - e) * _reciprocal(_f32(1.0) + e)
    z = size * size
    y = np.full_like(x, shapes.TANH_POLY[-1])
    for c in reversed(shapes.TANH_POLY[:-1]):
        y = y * z + _f32(c)
    small = size + (y * z) * size
    tanh_size = np.where(size < _f32(shapes.TANH_SMALL), small, large)
    return (_f32(cap) * np.where(x < 0, -tanh_size, tanh_size)) * _f32(shapes.LOG2E)


def sink_scores(sinks: NDArray[Any]) -> F32:
    """Sinks in log2 units, as the kernels take them: float32 sink times float32 log2(e)."""
    return np.asarray(sinks, np.float32) * _f32(shapes.LOG2E)


def sink_state(scores: F32, head_dim: int) -> State:
    """The state of one key per vector with these scores and no value."""
    m = np.rint(scores)
    return State(m, _weight(scores, m), np.zeros((*scores.shape, head_dim), np.float32))


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


def _leaf_states(
    q: F32,
    k: F32,
    v: F32,
    seen: tuple[NDArray[Any], NDArray[Any]],
    first: int,
    scale: np.float32,
    softcap: float | None,
) -> State:
    """States (leaves, vectors) of whole leaves: q (vectors, head_dim), k and v (leaves * 64, head_dim).

    ``seen``: (first, limit) of each vector, absolute positions; ``first`` is the absolute position of k[0].
    """
    vectors, head_dim = q.shape
    leaves = k.shape[0] // LEAF
    s = _scores(q, np.ascontiguousarray(k.T), scale)
    if softcap is not None:
        s = _soft_capped(s, softcap)
    position = (first + np.arange(k.shape[0]))[None]
    present = (position >= seen[0][:, None]) & (position < seen[1][:, None])
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


def normalize(state: State) -> tuple[F32, F32]:
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


def score_scale(head_dim: int, scale: float | None, softcap: float | None = None) -> np.float32:
    """The one factor of the scores, rounded once: scale * log2(e), with softcap scale. None: 1 / sqrt(head_dim)."""
    factor = 1.0 / math.sqrt(head_dim) if scale is None else float(scale)
    return _f32(factor * shapes.LOG2E if softcap is None else factor)


def emulate(
    q: NDArray[Any],
    k: NDArray[Any],
    v: NDArray[Any],
    *,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    sinks: NDArray[Any] | None = None,
) -> tuple[F32, F32]:
    """The bits every kernel, layout, driver and device gives: (out, lse), float32.

    q: (q_heads, head_dim) or (q_len, q_heads, head_dim) float32 or float16; k, v: (tokens, kv_heads, head_dim)
    float32 or float16. Semantics as in ``attention``.
    """
    q, k, v = _checked_arrays(q, k, v, ("float32", "float16"))
    scale, window, softcap, sinks = _checked_options(q.shape[-2], scale, causal, window, softcap, sinks)
    if q.shape[-1] % CHUNK:
        raise ShapeError(f"q: got head_dim {q.shape[-1]}, expected a multiple of {CHUNK}")
    rows = as_input(_rows(q))
    q_len, q_heads, head_dim = rows.shape
    tokens, kv_heads, _ = k.shape
    group = q_heads // kv_heads
    factor = score_scale(head_dim, scale, softcap)
    firsts, limits = key_ranges(tokens, q_len, causal, window)
    vectors = q_len * group
    block = max(1, _BLOCK_ELEMENTS // (vectors * head_dim * NODE)) * NODE * LEAF
    out = np.empty((q_len, q_heads, head_dim), np.float32)
    lse = np.empty((q_len, q_heads), np.float32)
    for head in range(kv_heads):
        heads = slice(head * group, (head + 1) * group)
        mine = np.ascontiguousarray(rows[:, heads]).reshape(vectors, head_dim)
        seen = np.repeat(firsts, group), np.repeat(limits, group)
        total = empty_state((vectors,), head_dim)
        for first in range(int(firsts.min()) // (NODE * LEAF) * NODE * LEAF, tokens, block):
            last = min(first + block, tokens)
            padded = -(-(last - first) // (LEAF * NODE)) * LEAF * NODE
            keys = np.zeros((padded, head_dim), np.float32)
            values = np.zeros((padded, head_dim), np.float32)
            keys[: last - first] = as_input(k[first:last, head])
            values[: last - first] = as_input(v[first:last, head])
            leaf = _leaf_states(mine, keys, values, seen, first, factor, softcap)
            by_node = State(*(x.reshape(-1, NODE, *x.shape[1:]).swapaxes(0, 1) for x in leaf))
            nodes = _fold(by_node)
            for i in range(nodes.m.shape[0]):
                total = merge(total, State(nodes.m[i], nodes.l[i], nodes.o[i]))
        if sinks is not None:
            total = merge(total, sink_state(np.tile(sink_scores(sinks)[heads], q_len), head_dim))
        part_out, part_lse = normalize(total)
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


# --- states as values ----------------------------------------------------------------------------------------

FORMAT: Final = "zinc_attn partial state"
VERSION: Final = "2"
_TENSORS: Final[dict[str, tuple[np.dtype[Any], str]]] = {  # name: in NumPy, in safetensors
    "nodes": (np.dtype("<i8"), "I64"),
    "m": (np.dtype("<f4"), "F32"),
    "l": (np.dtype("<f4"), "F32"),
    "o": (np.dtype("<f4"), "F32"),
    "sinks": (np.dtype("<f4"), "F32"),
}
MAX_NODES: Final = shapes.MAX_CONTEXT // shapes.KEYS_PER_NODE
_MAX_M: Final = 2 * shapes.MAX_SCORE  # a factor of 2 for the roundings of a score
_MIN_L: Final = 0.7  # one key's weight is at least 2**-0.5
_MAX_L: Final = 2.0 * shapes.KEYS_PER_NODE  # and at most 2**0.5
_MAX_O: Final = _MAX_L * shapes.MAX_INPUT
_MAX_SINK: Final = 2 * shapes.MAX_INPUT  # log2(e) times a logit


class PartialStateError(ArgumentError):
    """Partial states do not make up one call: a node is missing or there twice, or a part is of another call."""


@dataclass(frozen=True, eq=False)
class PartialState:
    """Unnormalised attention of query rows over some nodes of 512 keys: the canonical fold's operands.

    nodes: (n,) int64, ascending absolute node numbers; m, l: (q_len, n, q_heads), o: (q_len, n, q_heads, head_dim),
    float32, the state of no keys where a row sees none of a node. span: (first, end), the nodes that the rows of the
    call see in all. call: names what was attended, so that parts of different calls cannot be folded. sinks: (q_heads,)
    scores in log2 units that join last, or None. Made by ``Attention.partial``.
    """

    nodes: NDArray[np.int64]
    m: F32
    l: F32  # noqa: E741  (the literature's name)
    o: F32
    span: tuple[int, int]
    call: str
    sinks: F32 | None = None

    def __post_init__(self) -> None:
        for name, dtype in (("nodes", "int64"), ("m", "float32"), ("l", "float32"), ("o", "float32")):
            _check_field(name, getattr(self, name), dtype)
        if self.sinks is not None:
            _check_field("sinks", self.sinks, "float32")
        if not isinstance(self.span, tuple) or len(self.span) != 2:
            raise PartialStateError(f"partial state: got span {shown(self.span)}, expected (first, end), node numbers")
        first, end = (check_int(f"span[{at}]", node, -(1 << 62), 1 << 62) for at, node in enumerate(self.span))
        if not 0 <= first <= end <= MAX_NODES:
            raise PartialStateError(
                f"partial state: got span {plain(self.span)}, expected (first, end), at most {MAX_NODES} nodes"
            )
        check_text("call", self.call, "the name of what was attended")

    @property
    def nbytes(self) -> int:
        """Bytes of m, l and o."""
        return self.m.nbytes + self.l.nbytes + self.o.nbytes

    def to_bytes(self) -> bytes:
        """A safetensors file's bytes: tensors nodes, m, l, o and sinks; the metadata have span, call and a checksum.

        sha256 in the metadata is that of all of these bytes with 64 zeros in its place.
        """
        arrays = self._arrays()
        data = [np.ascontiguousarray(array).tobytes() for array in arrays.values()]
        digest = hashlib.sha256(self._header(arrays, "0" * 64))
        for piece in data:
            digest.update(piece)
        return b"".join((self._header(arrays, digest.hexdigest()), *data))

    def _arrays(self) -> dict[str, NDArray[Any]]:
        arrays: dict[str, NDArray[Any]] = {"nodes": self.nodes, "m": self.m, "l": self.l, "o": self.o}
        return arrays if self.sinks is None else {**arrays, "sinks": self.sinks}

    def _header(self, arrays: dict[str, NDArray[Any]], digest: str) -> bytes:
        span = f"{self.span[0]} {self.span[1]}"
        metadata = {"format": FORMAT, "version": VERSION, "span": span, "call": self.call, "sha256": digest}
        kinds = {name: _TENSORS[name][1] for name in arrays}
        return encode_header(metadata, {name: (kinds[name], array.shape) for name, array in arrays.items()})

    @classmethod
    def from_bytes(cls, data: bytes) -> PartialState:
        """The inverse of ``to_bytes``. PartialStateError for anything else, down to a byte."""
        if not isinstance(data, (bytes, bytearray, memoryview)):
            raise PartialStateError(f"partial state: got {type(data).__name__}, expected the bytes that to_bytes gives")
        data = bytes(data)  # a copy of what its owner can change
        try:
            return cls._decoded(data)
        except PartialStateError:
            raise
        except ValueError as error:  # a TensorFileError among them
            raise PartialStateError(
                f"partial state: got {len(data):,} bytes that do not hold one ({error}), expected what to_bytes gives"
            ) from error

    @classmethod
    def _decoded(cls, data: bytes) -> PartialState:
        size = header_size(data[:LENGTH_BYTES], len(data)) + LENGTH_BYTES
        header = decode_header(data[LENGTH_BYTES:size], len(data) - size)
        found = header.metadata
        if (found.get("format"), found.get("version")) != (FORMAT, VERSION):
            raise PartialStateError(
                f"partial state: got {plain(found.get('format'))!r} version {plain(found.get('version'))!r}, expected "
                f"{FORMAT!r} version {VERSION!r}"
            )
        kinds = {name: _TENSORS[name][1] for name in _TENSORS if name != "sinks" or name in header.tensors}
        if {name: tensor.dtype for name, tensor in header.tensors.items()} != kinds:
            raise PartialStateError(
                f"partial state: got tensors {plain(sorted(header.tensors))}, expected {list(kinds)}"
            )
        arrays = {
            name: np.frombuffer(data[size + place.begin : size + place.end], _TENSORS[name][0]).reshape(place.shape)
            for name, place in header.tensors.items()
        }
        first, _, end = found.get("span", "").partition(" ")
        state = cls(span=(decimal(first), decimal(end)), call=found.get("call", ""), **arrays)
        state.check()
        digest = hashlib.sha256(state._header(arrays, "0" * 64))
        digest.update(memoryview(data)[size:])
        if data[:size] != state._header(arrays, digest.hexdigest()):
            raise PartialStateError(
                f"partial state: got sha256 {plain(found.get('sha256'))}, expected {digest.hexdigest()}, and the "
                "header that to_bytes writes; the bytes are damaged"
            )
        return state

    def check(self) -> None:
        """PartialStateError where the arrays do not fit each other, or hold what no kernel makes."""
        shape = self.o.shape
        for name, array in self._arrays().items():
            if array.dtype != _TENSORS[name][0]:
                raise PartialStateError(f"partial state: got {name} of {array.dtype}, expected {_TENSORS[name][0]}")
        if self.o.ndim != 4 or self.m.shape != shape[:3] or self.l.shape != shape[:3] or self.nodes.shape != shape[1:2]:
            raise PartialStateError(
                f"partial state: got m {self.m.shape}, l {self.l.shape}, o {shape}, nodes {self.nodes.shape}, expected "
                "(q_len, n, q_heads), twice, (q_len, n, q_heads, head_dim) and (n,)"
            )
        if 0 in (shape[0], *shape[2:]):
            raise PartialStateError(
                f"partial state: got o {shape}, expected at least one query row, query head and head dimension"
            )
        first, end = self.span
        if np.any(self.nodes[1:] <= self.nodes[:-1]) or np.any(self.nodes < first) or np.any(self.nodes >= end):
            raise PartialStateError(
                f"partial state: got nodes {plain(self.nodes.tolist())}, expected ascending numbers from {first} to "
                f"{end - 1}"
            )
        if self.sinks is not None and self.sinks.shape != shape[2:3]:
            raise PartialStateError(f"partial state: got sinks {self.sinks.shape}, expected {shape[2:3]}, one per head")
        self._check_values()

    def _check_values(self) -> None:
        """PartialStateError for numbers that no kernel makes: l and o of a state are sums of at most 512 weights."""
        if not isinstance(self.call, str) or not self.call.isprintable():
            raise PartialStateError(f"partial state: got call {plain(repr(self.call))}, expected a printable text")
        if self.sinks is not None and not np.all(np.abs(self.sinks) <= _MAX_SINK):  # NaN is not, either
            raise PartialStateError(f"partial state: got sinks {plain(self.sinks.tolist())}, expected at most 2**61")
        empty = self.m == np.float32(shapes.EMPTY_M)
        for name, x, most in (("m", self.m, _MAX_M), ("l", self.l, _MAX_L), ("o", self.o, _MAX_O)):
            size = np.where(empty, np.float32(0), x) if name == "m" else x
            least, largest = (size.min(), size.max()) if size.size else (np.float32(0), np.float32(0))  # NaN, if in x
            if not (least >= (0 if name == "l" else -most) and largest <= most):
                raise PartialStateError(
                    f"partial state: got {name} from {least:g} to {largest:g}, expected finite numbers "
                    f"{'from 0 to' if name == 'l' else 'of a magnitude up to'} {most:g}"
                )
        if np.any(self.m != np.rint(self.m)):
            raise PartialStateError("partial state: got an m that is no integer, expected integers in log2 units")
        if np.any(empty != (self.l == 0)) or np.any(self.l[~empty] < _MIN_L) or np.any(self.o[empty] != 0):
            raise PartialStateError(
                f"partial state: got an l that does not fit its m, expected at least {_MIN_L:g}; in a state of no "
                f"keys, m = {shapes.EMPTY_M:g}, l and o are 0"
            )


def _check_field(name: str, value: Any, dtype: str) -> None:
    """Refuse what is no plain array of a native dtype; ``PartialState.check`` looks at shapes and values."""
    if not isinstance(value, np.ndarray) or isinstance(value, np.ma.MaskedArray) or value.dtype != np.dtype(dtype):
        given = f"an array of {value.dtype}" if isinstance(value, np.ndarray) else shown(value)
        raise PartialStateError(f"partial state: got {name} {given}, expected a plain array of {dtype}")


def gather(parts: Iterable[PartialState]) -> PartialState:
    """One state of all nodes of a call from the parts in any order. PartialStateError: see there."""
    single = isinstance(parts, (PartialState, np.ndarray)) or not isinstance(parts, Iterable)
    found: list[Any] = [] if single else list(parts)
    if not found or not all(isinstance(part, PartialState) for part in found):
        given = ", ".join(sorted({type(part).__name__ for part in found})) or "none"
        given = f"one {type(parts).__name__}" if single else given
        raise PartialStateError(f"partial states: got {given}, expected a list of the PartialStates of one call")
    one = found[0]
    for other in found:
        other.check()
        if (other.call, other.span, other.o.shape[2:]) != (one.call, one.span, one.o.shape[2:]):
            raise PartialStateError(
                f"partial states: got parts of different calls: {one.call[:12]} with nodes {one.span} and "
                f"{other.call[:12]} with nodes {other.span}, expected one query, one sequence and one scoring"
            )
    nodes = np.concatenate([part.nodes for part in found])
    numbers, counts = np.unique(nodes, return_counts=True)
    if np.any(counts > 1):
        raise PartialStateError(f"partial states: got node {numbers[counts > 1][0]} more than once, expected it once")
    first, end = one.span
    if numbers.size < end - first:  # time and memory are those of the nodes held, whatever span a part's bytes say
        jumps = np.flatnonzero(np.diff(numbers) != 1)
        missing = first
        if numbers.size and numbers[0] == first:
            missing = int(numbers[jumps[0] if jumps.size else -1]) + 1
        raise PartialStateError(
            f"partial states: node {missing} is missing ({end - first - numbers.size} in all), expected every node "
            f"from {first} to {end - 1}"
        )
    order = np.argsort(nodes)
    m, total, o = (np.concatenate([getattr(part, x) for part in found], axis=1)[:, order] for x in "mlo")
    return PartialState(nodes[order], m, total, o, one.span, one.call, one.sinks)


def fold(parts: Iterable[PartialState]) -> tuple[F32, F32]:
    """out (q_len, q_heads, head_dim) and lse (q_len, q_heads), float32, from the parts of a call, in any order.

    The bits are those of ``Attention`` on one device; ``Fold`` does the same on a device. PartialStateError: nodes
    missing, twice, or of another call.
    """
    whole = gather(parts)
    q_len, _, q_heads, head_dim = whole.o.shape
    total = empty_state((q_len, q_heads), head_dim)
    for i in range(whole.nodes.size):
        total = merge(total, State(whole.m[:, i], whole.l[:, i], whole.o[:, i]))
    if whole.sinks is not None:
        total = merge(total, sink_state(np.repeat(whole.sinks[None], q_len, axis=0), head_dim))
    return normalize(total)


def _float_array(name: str, x: Any, ndim: int, axes: str) -> NDArray[Any]:
    array = check_array(name, x, ("float16", "float32", "float64"))
    if array.ndim != ndim:
        raise ShapeError(f"{name}: got shape {array.shape}, expected {axes}")
    return array


def merge_state(v_a: Any, s_a: Any, v_b: Any, s_b: Any) -> tuple[F32, F32]:
    """Merge the attention of two disjoint key sets.

    v_a, v_b: (seq, heads, head_dim) normalised outputs; s_a, s_b: (seq, heads) natural lse. Returns float32 (v, s)
    of the union. Source: FlashInfer's attention states (Ye et al. 2024).
    """
    a = _float_array("v_a", v_a, 3, "(seq, heads, head_dim)")
    b = _float_array("v_b", v_b, 3, "(seq, heads, head_dim)")
    if a.shape != b.shape:
        raise ShapeError(f"v_b: got shape {b.shape}, expected v_a's {a.shape}")
    s1 = _float_array("s_a", s_a, 2, "(seq, heads)")
    s2 = _float_array("s_b", s_b, 2, "(seq, heads)")
    if s1.shape != a.shape[:2] or s2.shape != a.shape[:2]:
        raise ShapeError(f"s_a, s_b: got shapes {s1.shape}, {s2.shape}, expected v_a's first two axes {a.shape[:2]}")
    return merge_states(np.stack([a, b], axis=1), np.stack([s1, s2], axis=1))


def merge_states(v: Any, s: Any) -> tuple[F32, F32]:
    """Merge n states per row: v (seq, n, heads, head_dim), s (seq, n, heads). Returns (seq, heads, ...) float32."""
    values, lse = _float_array("v", v, 4, "(seq, n, heads, head_dim)"), _float_array("s", s, 3, "(seq, n, heads)")
    if lse.shape != values.shape[:3]:
        raise ShapeError(f"s: got shape {lse.shape}, expected v's first three axes {values.shape[:3]}")
    if values.shape[1] == 0:
        raise ShapeError(f"v: got shape {values.shape}, expected at least one state (axis n)")
    if not np.all(np.isfinite(values)) or not np.all(lse < np.inf):
        raise ValueRangeError("v, s: got a NaN or an infinity, expected finite numbers, and -inf in s for no keys")
    values, lse = values.astype(np.float64), lse.astype(np.float64)
    top = lse.max(axis=1, keepdims=True)
    finite_top = np.where(np.isneginf(top), 0.0, top)
    w = np.exp(lse - finite_top)
    total = w.sum(axis=1)
    safe = np.where(total > 0.0, total, 1.0)
    out = (values * w[..., None]).sum(axis=1) / safe[..., None]
    with np.errstate(divide="ignore"):
        merged = np.log(total) + finite_top[:, 0]
    return out.astype(np.float32), merged.astype(np.float32)
