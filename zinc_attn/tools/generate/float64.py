"""The float64 reference of ``validate``, over keys and values that come in blocks."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]

_MASKED: Final = -1e300  # a float64 score that weighs nothing beside a real one


def blockwise_attention(
    q: F32,
    blocks: Iterator[tuple[F32, F32]],
    limits: NDArray[Any],
    scale: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks: F32 | None = None,
) -> F64:
    """Softmax attention in float64 over keys and values that come in blocks: (n, q_heads, v_head_dim).

    q: (n, q_heads, head_dim). blocks: at least one pair of k (tokens, kv_heads, head_dim) and v (tokens, kv_heads,
    v_head_dim), consecutive from position 0. limits: (n,); row i sees the keys below limits[i], which is at least 1,
    and with ``window`` only the last ``window`` of these.
    """
    n, q_heads, head_dim = q.shape
    top = np.full((n, q_heads), _MASKED) if sinks is None else np.tile(sinks.astype(np.float64), (n, 1))
    total = np.zeros((n, q_heads)) if sinks is None else np.ones((n, q_heads))
    first = next(blocks)
    v_head_dim = first[1].shape[2]
    sums = np.zeros((n, q_heads, v_head_dim))
    firsts = np.zeros_like(limits) if window is None else np.maximum(limits - window, 0)
    begin = 0
    for k, v in chain([first], blocks):
        tokens, kv_heads, _ = k.shape
        position = begin + np.arange(tokens)
        seen = (position < limits[:, None]) & (position >= firsts[:, None])  # (n, tokens)
        begin += tokens
        if not seen.any():
            continue
        group = q_heads // kv_heads
        for head in range(kv_heads):
            mine = slice(head * group, (head + 1) * group)
            s = q[:, mine].astype(np.float64).reshape(n * group, head_dim) @ k[:, head].astype(np.float64).T * scale
            if softcap is not None:
                s = softcap * np.tanh(s / softcap)
            s = np.where(seen[:, None], s.reshape(n, group, tokens), _MASKED)
            higher = np.maximum(top[:, mine], s.max(axis=2))
            kept = np.exp(top[:, mine] - higher)
            p = np.exp(s - higher[..., None]) * seen[:, None]
            total[:, mine] = total[:, mine] * kept + p.sum(axis=2)
            added = p.reshape(n * group, tokens) @ v[:, head].astype(np.float64)
            sums[:, mine] = sums[:, mine] * kept[..., None] + added.reshape(n, group, v_head_dim)
            top[:, mine] = higher
    return sums / total[..., None]
