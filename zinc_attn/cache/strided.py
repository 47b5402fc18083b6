"""Rows as most engines keep them: K's bytes, filled up to words, then V's; block types are ggml's blocks.

The functions convert such rows from and to the rows of ``rows.encode``.
"""

import numpy as np
from numpy.typing import NDArray

from ..kernels.records import Words
from ..shapes import AttnShape, Strides, row_format, strided_format
from ..storage import StorageType, storage_types
from . import blocks
from .encoded import from_blocks, to_blocks
from .rows import row_parts


def from_rows(words: Words, shape: AttnShape, dtype: str, strides: Strides) -> Words:
    """(n, kv_heads, words) of ``rows.encode`` as rows of these strides."""
    out = np.zeros((*words.shape[:2], strided_format(strides, shape.latent).words), np.uint32)
    if not len(words):
        return out
    k_values, v_values, k_shared, v_shared = row_parts(words, shape, dtype)
    k_type, v_type = storage_types(dtype)
    k_words = -(-strides[0] // 4)
    out[..., :k_words] = _filled(_bytes(k_values, k_shared, shape.head_dim, k_type), k_words)
    if not shape.latent:
        out[..., k_words:] = _filled(_bytes(v_values, v_shared, shape.v_head_dim, v_type), out.shape[-1] - k_words)
    return out


def to_rows(words: Words, shape: AttnShape, dtype: str, strides: Strides) -> Words:
    """The inverse of ``from_rows``."""
    out = np.zeros((*words.shape[:2], row_format(shape, dtype).words), np.uint32)
    if not len(words):
        return out
    k_values, v_values, k_shared, v_shared = row_parts(out, shape, dtype)
    k_type, v_type = storage_types(dtype)
    k_words = -(-strides[0] // 4)
    _take(words[..., :k_words], k_values, k_shared, shape.head_dim, k_type)
    if not shape.latent:
        _take(words[..., k_words:], v_values, v_shared, shape.v_head_dim, v_type)
    return out


def _bytes(values: Words, shared: Words, dims: int, kind: StorageType) -> NDArray[np.uint8]:
    """The bytes of K or V of rows."""
    values, shared = np.ascontiguousarray(values), np.ascontiguousarray(shared)
    if not kind.halves:
        return values.view(np.uint8)[..., : kind.row_bytes(dims)]
    raw = to_blocks(*blocks.read(values, shared, kind), kind)
    return raw.reshape(*values.shape[:2], raw.shape[-2] * kind.block_bytes)[..., : kind.row_bytes(dims)]


def _filled(raw: NDArray[np.uint8], words: int) -> Words:
    """Bytes of rows, filled up to ``words`` words."""
    return np.pad(raw, ((0, 0), (0, 0), (0, 4 * words - raw.shape[-1]))).view(np.uint32)


def _take(words: Words, values: Words, shared: Words, dims: int, kind: StorageType) -> None:
    """Write K or V of rows from their bytes."""
    raw = np.ascontiguousarray(words).view(np.uint8)[..., : kind.row_bytes(dims)]
    if not kind.halves:
        values[...] = _filled(raw, values.shape[-1])
        return
    q, halves = from_blocks(raw.reshape(*raw.shape[:2], raw.shape[-1] // kind.block_bytes, kind.block_bytes), kind)
    blocks.write(values, shared, q, halves, kind)
