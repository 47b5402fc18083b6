"""Operations that move elements, with the bits of shaders/graph/{move,to_blocks,get_weights}.comp.

Arrays have ggml's dimension 0 last. Types of blocks are bytes (..., blocks, bytes of a block), others NumPy's dtypes.
"""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from ml_dtypes import bfloat16
from numpy.typing import NDArray

from ..cache import blocks
from ..cache.encoded import from_blocks, to_blocks
from ..canonical.constants import MIN_INPUT
from ..canonical.state import F32, flush
from ..storage import STORAGE
from .blocks import decode

Array = NDArray[Any]
DTYPES: Final[dict[str, Any]] = {
    "f32": np.float32, "f16": np.float16, "bf16": bfloat16, "i32": np.int32, "i16": np.int16, "i8": np.int8,
}  # fmt: skip
LEAST: Final = np.float32(MIN_INPUT)  # smaller magnitudes count as 0 in blocks
UNFIT: Final = np.float16(np.nan)  # scale and minimum of a block with a NaN or a number out of range


def repeat(x: Array, shape: Sequence[int], shift: Sequence[int] = (0, 0, 0, 0)) -> Array:
    """y[i] = x[(i + shift) mod n] in each dimension: REPEAT, PAD (circular), ROLL."""
    places = [(np.arange(n) + s) % m for n, m, s in zip(shape, x.shape, shift, strict=True)]
    return np.asarray(x[np.ix_(*places)])


def pad(x: Array, shape: Sequence[int], before: Sequence[int]) -> Array:
    """x with zeros around it."""
    out = np.zeros(shape, x.dtype)
    out[tuple(slice(n, n + m) for n, m in zip(before, x.shape, strict=True))] = x
    return out


def get_rows(x: Array, ids: NDArray[np.int32]) -> Array:
    """y[l, k, j] = x[l, k, ids[l, k, j]]; a row that x does not have has all bits set."""
    there = (ids >= 0) & (ids < x.shape[2])
    rows = np.take_along_axis(x, np.where(there, ids, 0)[..., None], axis=2)
    rows.view(np.uint8)[~there] = 0xFF
    return rows


def set_rows(y: Array, x: Array, ids: NDArray[np.integer[Any]]) -> None:
    """y[l, k, ids[l mod .., k mod .., j]] = x[l, k, j]; a row that y does not have is not written."""
    for outer, inner, row in np.ndindex(x.shape[:3]):
        target = ids[outer % ids.shape[0], inner % ids.shape[1], row]
        if 0 <= target < y.shape[2]:
            y[outer, inner, target] = x[outer, inner, row]


def convert(x: Array, target: str) -> Array:
    """x's elements as another type, each through float32; nothing is flushed, since the shader converts by integers."""
    with np.errstate(over="ignore", invalid="ignore"):
        number = x.astype(np.float32)
        if target == "i32":
            fits = np.abs(number) < np.float32(2.0**31)
            return np.where(fits, np.where(fits, number, 0).astype(np.int32), np.int32(-(2**31)))
        return number.astype(DTYPES[target])


def to_block_type(x: Array, kind: str) -> NDArray[np.uint8]:
    """x (..., columns) in blocks, as cache/blocks.py makes them."""
    stored = STORAGE[kind]
    numbers = blocks.in_blocks(x.astype(np.float32))
    unfit = ~np.all(np.abs(numbers) <= np.float32(stored.most), axis=-1, keepdims=True)
    q, halves = blocks.quantize(np.where(unfit | (np.abs(numbers) < LEAST), np.float32(0), numbers), stored)
    q, halves = np.where(unfit, np.uint8(0), q), np.where(unfit, UNFIT, halves)
    return to_blocks(q, halves, stored)


def from_block_type(raw: NDArray[np.uint8], kind: str) -> F32:
    """(..., columns) of blocks."""
    q, halves = from_blocks(raw, STORAGE[kind])
    return flush(blocks.dequantize(q, halves, STORAGE[kind]).reshape(*raw.shape[:-2], -1))


def from_weights(raw: NDArray[np.uint8], kind: str) -> F32:
    """(rows, columns) of ggml's bytes (rows, bytes of a row)."""
    w = decode(kind, raw)
    q = w.q.astype(np.float32)
    d, m = (np.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (w.d, w.m))
    if w.scales is None or w.minima is None:
        return flush(d * q + m)
    scales, minima = (np.repeat(x, 16, axis=1).astype(np.float32) for x in (w.scales, w.minima))
    return flush(d * scales * q - m * minima)
