"""ARGSORT and TOP_K, with the indices of shaders/graph/sort.comp."""

import numpy as np
from numpy.typing import NDArray

from ..canonical.state import F32


def argsort(x: F32, descending: bool) -> NDArray[np.int32]:
    """Indices along the last axis by value, then by index; zeros of both signs are equal; NaN are last."""
    key = np.where(np.isnan(x), np.float32(np.inf), -x if descending else x)
    by_index = np.broadcast_to(np.arange(x.shape[-1]), x.shape)
    return np.lexsort((by_index, key, np.isnan(x)), axis=-1).astype(np.int32)


def top_k(x: F32, k: int) -> NDArray[np.int32]:
    """The first k of the descending order."""
    return argsort(x, True)[..., :k]
