"""The algebra of normalised attention states, FlashInfer's convention: (v, s), s = natural log-sum-exp.

Merging is accurate (float64 inside) but, unlike the kernels' canonical fold, it is not bit-canonical: the result
rounds once per merge, so the order shows in the last bits. A state of no keys has v = 0 and s = -inf and changes
nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import DTypeError, ShapeError

F32 = NDArray[np.float32]


def _float_array(name: str, x: Any, ndim: int, axes: str) -> NDArray[Any]:
    array = np.asarray(x)
    if array.ndim != ndim:
        raise ShapeError(f"{name}: got shape {array.shape}, expected {axes}")
    if array.dtype not in (np.float16, np.float32, np.float64):
        raise DTypeError(f"{name}: got dtype {array.dtype}, expected float16, float32 or float64")
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
    values = _float_array("v", v, 4, "(seq, n, heads, head_dim)").astype(np.float64)
    lse = _float_array("s", s, 3, "(seq, n, heads)").astype(np.float64)
    if lse.shape != values.shape[:3]:
        raise ShapeError(f"s: got shape {lse.shape}, expected v's first three axes {values.shape[:3]}")
    if values.shape[1] == 0:
        raise ShapeError(f"v: got shape {values.shape}, expected at least one state (axis n)")
    top = lse.max(axis=1, keepdims=True)
    finite_top = np.where(np.isneginf(top), 0.0, top)
    w = np.exp(lse - finite_top)
    total = w.sum(axis=1)
    safe = np.where(total > 0.0, total, 1.0)
    out = (values * w[..., None]).sum(axis=1) / safe[..., None]
    with np.errstate(divide="ignore"):
        merged = np.log(total) + finite_top[:, 0]
    return out.astype(np.float32), merged.astype(np.float32)
