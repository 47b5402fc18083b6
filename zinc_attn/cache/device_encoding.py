"""New rows that the device encodes: the condition, and the host's upload.

The host checks the rows and uploads their stored values as float32: K of all rows, (rows, kv_heads, head_dim), then V,
(rows, kv_heads, v_head_dim). ``shaders/cache/encode.comp`` makes the words of ``rows.encode`` of them.
"""

from collections.abc import Iterable
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ..checks import BFLOAT16
from ..planning.padding import power_of_two
from ..runtime.protocol import Buffer, Runtime
from ..shapes import AttnShape
from ..storage import storage_types

LEAST_ROWS: Final = 64


def encodes_on_device(dtype: str, rows: int) -> bool:
    """Whether the device encodes ``rows`` new rows: K or V is quantized, and the recording for them, whose size is a
    power of two, has room for ``LEAST_ROWS``."""
    return power_of_two(rows) >= LEAST_ROWS and any(kind.quantized for kind in storage_types(dtype))


def value_words(shape: AttnShape, rows: int) -> int:
    """Words of the values of ``rows`` rows."""
    return rows * shape.kv_heads * (shape.head_dim + (0 if shape.latent else shape.v_head_dim))


def upload_values(
    runtime: Runtime, buffer: Buffer, shape: AttnShape, rows: int, new: Iterable[tuple[NDArray[Any], NDArray[Any]]]
) -> None:
    """Write pairs of stored k, v (n, kv_heads, dims; latent: k alone) to a buffer of ``value_words(shape, rows)``."""
    k_at, v_at = 0, rows * shape.kv_heads * shape.head_dim
    for k, v in new:
        k_at = _write(runtime, buffer, k, k_at)
        if not shape.latent:
            v_at = _write(runtime, buffer, v, v_at)


def _write(runtime: Runtime, buffer: Buffer, x: NDArray[Any], offset: int) -> int:
    """Write ``x`` as float32 from word ``offset`` on; returns the word after it."""
    if x.dtype == BFLOAT16:
        words = np.ascontiguousarray(x).view(np.uint16).astype(np.uint32)
        words <<= np.uint32(16)
    else:
        words = np.ascontiguousarray(x, np.float32).view(np.uint32)
    runtime.write(buffer, words.reshape(-1), offset)
    return offset + words.size
