"""What the NumPy oracle says that a call must give, for as many heads and rows as a budget allows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ...cache.rows import stored
from ...canonical import reference
from .bits import F32, Output

ORACLE_PRODUCTS: Final = 1 << 30  # rows * context * q_heads * head_dim up to which a tool computes every head


def oracle(
    q: F32,
    k: NDArray[Any],
    v: NDArray[Any],
    dtype: str,
    kv_heads: int | None = None,
    masking: Mapping[str, Any] | None = None,
) -> Output:
    """The oracle's output for the query heads of the last ``kv_heads`` KV heads (None: of all of them).

    q: (q_heads, head_dim) or (q_len, q_heads, head_dim); k, v: (tokens, kv_heads, head_dim) as a cache of ``dtype``
    takes them; masking: keyword arguments of ``reference.emulate``. The last heads are those whose buffer offsets are
    the largest. KV heads are computed one after the other, so that only one is held as float32.
    """
    held = k.shape[1]
    group, options = q.shape[-2] // held, dict(masking or {})
    sinks = options.get("sinks")
    parts = []
    for head in range(held - (held if kv_heads is None else kv_heads), held):
        served = slice(head * group, (head + 1) * group)
        keys, values = k[:, head : head + 1], v[:, head : head + 1]
        if dtype in ("bf16", "q8_0"):
            keys, values = stored(keys, values, dtype)
        if sinks is not None:
            options["sinks"] = sinks[served]
        parts.append(reference.emulate(q[..., served, :], keys, values, **options))
    out, lse = zip(*parts, strict=True)
    return Output(np.concatenate(out, axis=-2), np.concatenate(lse, axis=-1))
