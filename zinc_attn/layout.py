"""The kernels' layout of K and V, made with NumPy. shaders/kv.glsl reads it."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .shapes import CHUNK, LEAF

Words = NDArray[np.uint32]


def tiles(tokens: int) -> int:
    """Tiles of 64 tokens that hold ``tokens``."""
    return -(-tokens // LEAF)


def _padded(x: NDArray[Any]) -> NDArray[Any]:
    """(tokens, kv_heads, head_dim) with tokens filled up by zeros to whole tiles."""
    missing = tiles(len(x)) * LEAF - len(x)
    return np.pad(x, ((0, missing), (0, 0), (0, 0))) if missing else x


def pack_k(k: NDArray[Any]) -> Words:
    """(tokens, kv_heads, head_dim) to (kv_heads, tiles, head_dim / 8, 64, 8), as uint32 words."""
    k = _padded(k)
    split = k.reshape(-1, LEAF, k.shape[1], k.shape[2] // CHUNK, CHUNK)
    return np.ascontiguousarray(split.transpose(2, 0, 3, 1, 4)).reshape(-1).view(np.uint32)


def pack_v(v: NDArray[Any]) -> Words:
    """(tokens, kv_heads, head_dim) to (kv_heads, tiles, 64, head_dim), as uint32 words."""
    return np.ascontiguousarray(_padded(v).transpose(1, 0, 2)).reshape(-1).view(np.uint32)
