"""The float64 truth: ``attention``; and merges of normalized attention, in FlashInfer's form (v, s = natural lse).

Both are accurate (float64 inside), not bit-canonical. A state of no keys has v = 0 and s = -inf and changes nothing.
"""

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ..checks import check_array
from ..errors import ShapeError, ValueRangeError
from .arguments import checked_arrays, checked_options, key_ranges, with_rows
from .constants import BIASES
from .score_bound import largest
from .state import F32, F64, as_input

_MOST: Final = float(np.finfo(np.float32).max)


def attention(  # noqa: PLR0913  (public; all but q, k and v are keywords with a default)
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
    **biases: Any,
) -> tuple[F64, F64]:
    """Softmax attention in float64.

    q: (q_heads, head_dim) or (q_len, q_heads, head_dim); k: (tokens, kv_heads, head_dim); v: (tokens, kv_heads,
    v_head_dim); any float dtype.
    With ``causal`` row i sees keys up to its position, tokens - q_len + i; with ``window`` none before its position -
    window + 1. softcap: scores become softcap * tanh(score / softcap). sinks: (q_heads,), a logit per query head that
    joins the softmax without a value. mask: (q_len, n) of the last n keys, bool, True where the row sees the key, or
    float32 or float16, which is added to the scores, -inf for a key that the row does not see. mask_slopes: (q_heads,),
    what is added is mask * the head's slope (ggml's ALiBi). biases: alibi, (q_heads,), a slope per query head: scores
    become score - slope * |key's position - row's position|; all names are in ``BIASES``.
    Returns out ([q_len,] q_heads, v_head_dim) and lse ([q_len,] q_heads), natural log, sinks included; 0 and -inf where
    a row sees no key and no sink.
    """
    q, k, v = checked_arrays(q, k, v, ("float32", "float16", "float64", "bfloat16"))
    options = checked_options(q, k, scale, causal, window, softcap, sinks, mask, mask_slopes, biases)
    scale, window, softcap, sinks, biases, mask, mask_slopes = options
    rows = _exact(with_rows(q))
    sink = np.full(q.shape[-2], -np.inf) if sinks is None else np.asarray(sinks, np.float64)
    out, lse = np.zeros((*rows.shape[:2], v.shape[2])), np.repeat(sink[None], len(rows), axis=0)
    firsts, limits = key_ranges(len(k), len(rows), causal, window)
    for head, heads in enumerate(np.split(np.arange(q.shape[-2]), k.shape[1])):
        keys, values = _exact(k[:, head]), _exact(v[:, head])
        for i in np.flatnonzero(firsts < limits).tolist():
            s = rows[i, heads] @ keys[firsts[i] : limits[i]].T * scale
            s = s if softcap is None else softcap * np.tanh(s / softcap)
            seen = slice(firsts[i], limits[i])
            distance = np.arange(firsts[i], limits[i], dtype=np.float64) - (len(k) - len(rows) + i)
            for name, slopes in biases.items():
                s = s + slopes[heads, None].astype(np.float64) * BIASES[name](distance)
            if mask is not None:
                s = s + _masked(len(k), mask[i], None if mask_slopes is None else mask_slopes[heads, None])[:, seen]
            out[i, heads], lse[i, heads] = _softmax(s, values[seen], sink[heads])
    return out.reshape(*q.shape[:-1], -1), lse.reshape(q.shape[:-1])


def _exact(x: NDArray[Any]) -> F64:
    """The values in float64, as they enter the arithmetic."""
    return x if x.dtype == np.float64 else as_input(x).astype(np.float64)


def _masked(tokens: int, mask: NDArray[Any], slopes: NDArray[Any] | None) -> F64:
    """The addends of a row's mask (n,) for the scores of all keys: (heads or 1, tokens). slopes: (heads, 1)."""
    row = np.pad(mask.astype(np.float64), (tokens - len(mask), 0))[None]
    return row if slopes is None else np.where(np.isneginf(row), row, row * slopes.astype(np.float64))


def _softmax(s: F64, values: F64, sink: F64) -> tuple[F64, F64]:
    """out and lse of scores (heads, n), -inf for a key that is not seen, with a sink's score per head."""
    if np.all(np.isneginf(s)):
        return np.zeros((len(s), values.shape[1])), sink
    top = np.maximum(s.max(axis=1), sink)[:, None]
    p = np.exp(s - top)
    total = p.sum(axis=1, keepdims=True) + np.exp(sink[:, None] - top)
    return p @ values / total, (top + np.log(total))[:, 0]


def _float_array(name: str, x: Any, ndim: int, axes: str) -> NDArray[Any]:
    array = check_array(name, x, ("float16", "float32", "float64", "bfloat16"))
    if array.ndim != ndim:
        raise ShapeError(f"{name}: got shape {array.shape}, expected {axes}")
    return array


def merge_state(v_a: Any, s_a: Any, v_b: Any, s_b: Any) -> tuple[F32, F32]:
    """Merge the attention of two disjoint key sets.

    v_a, v_b: (seq, heads, head_dim) normalized outputs; s_a, s_b: (seq, heads) natural lse. Returns float32 (v, s)
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
    if not all(largest(x) <= _MOST for x in (values, np.where(np.isneginf(lse), 0.0, lse))):  # false for NaN, too
        raise ValueRangeError(
            "v, s: got a NaN, an infinity or a number that float32 does not hold, expected float32's finite numbers, "
            "and -inf in s for no keys"
        )
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
