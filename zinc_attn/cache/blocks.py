"""Block types: 32 consecutive dimensions that share a scale, quantized as ggml's reference procedure does it.

Equal rows give ggml's bytes. In each block, d is the scale and x the values, all float32 with one rounding per
operation; q is what is stored, and d and m are stored as float16, rounded to nearest even.

    q8_0    d = max|x| / 127                q = x * (1 / d), to nearest, ties away from zero
    q4_0    d = x_e / -8, q5_0 x_e / -16    q = trunc(x * (1 / d) + 8.5 or 16.5), at most 15 or 31
    q4_1    d = (max - min) / 15, q5_1 31   q = trunc((x - min) * (1 / d) + 0.5), m = min
    iq4_nl  d = sum(x**2 * t * x) / sum(x**2 * t * t), ascending, where t = IQ4_NL[q] is the entry nearest to
            x * (1 / (x_e / IQ4_NL[0])), the larger one of two

x_e is the first value of the largest magnitude, min and max the first ones; 1 / d counts as 0 where d is 0. A row whose
size is no multiple of 32 is filled up with zeros. Source: ggml's quantize_row_*_ref.
"""

from typing import Final

import numpy as np
from ml_dtypes import float8_e4m3fn
from numpy.typing import NDArray

from ..canonical.state import F32
from ..kernels.records import Words
from ..limits import BLOCK
from ..storage import IQ4_NL, StorageType

FP8: Final = np.dtype(float8_e4m3fn)
_TABLE: Final = np.array(IQ4_NL, np.float32)
_BETWEEN: Final = _TABLE[:-1] + _TABLE[1:]  # twice the middle of two entries


def in_blocks(x: NDArray[np.generic]) -> F32:
    """x (..., dims) as float32 (..., blocks, 32), the last block filled up with zeros."""
    missing = -x.shape[-1] % BLOCK
    if missing:
        x = np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)])
    return np.ascontiguousarray(x, np.float32).reshape(*x.shape[:-1], -1, BLOCK)


def quantize(x: F32, kind: StorageType) -> tuple[NDArray[np.uint8], NDArray[np.float16]]:
    """Stored numbers (..., blocks, 32), int8 as uint8 for q8_0, and float16 (..., blocks, halves): d, or d and m.

    x: (..., blocks, 32), of magnitudes up to ``kind.most``.
    """
    if kind.name == "iq4_nl":
        q, d = _nonlinear(x)
        return q, d[..., None].astype(np.float16)
    levels = 31 if kind.fifth_bits else 15
    if kind.halves == 2:
        least = _picked(x, x.argmin(axis=-1))
        d = (_picked(x, x.argmax(axis=-1)) - least) / np.float32(levels)
        shifted = x - least[..., None]
        scaled = np.multiply(shifted, _inverse(d)[..., None], out=shifted)
        scaled += np.float32(0.5)
        return _integers(scaled, levels), np.stack([d, least], axis=-1).astype(np.float16)
    if kind.name == "q8_0":
        d = np.abs(x).max(axis=-1) / np.float32(127.0)
        scaled = x * _inverse(d)[..., None]
        whole = np.trunc(scaled)
        whole += np.trunc(np.float32(2.0) * (scaled - whole))
        return whole.astype(np.int8).view(np.uint8), d[..., None].astype(np.float16)
    half = (levels + 1) // 2
    d = _extreme(x) / np.float32(-half)
    scaled = x * _inverse(d)[..., None]
    scaled += np.float32(half + 0.5)
    return _integers(scaled, levels), d[..., None].astype(np.float16)


def dequantize(q: NDArray[np.uint8], halves: NDArray[np.float16], kind: StorageType) -> F32:
    """float32 values (..., blocks, 32) of what ``quantize`` returns: the arithmetic of shaders/attend/storage.glsl."""
    scale = halves[..., 0].astype(np.float32)[..., None]
    if kind.name == "q8_0":
        return q.view(np.int8).astype(np.float32) * scale
    if kind.name == "iq4_nl":
        return _TABLE[q] * scale
    if kind.halves == 2:
        return np.asarray(q.astype(np.float32) * scale + halves[..., 1].astype(np.float32)[..., None])
    return (q.astype(np.float32) - np.float32(16.0 if kind.fifth_bits else 8.0)) * scale


def write(values: Words, shared: Words, q: NDArray[np.uint8], halves: NDArray[np.float16], kind: StorageType) -> None:
    """Write the results of ``quantize``: values (..., dims * bits / 32), and the words that blocks share."""
    flat = q.reshape(*q.shape[:-2], q.shape[-2] * BLOCK)[..., : values.shape[-1] * 32 // kind.bits]
    low = flat if kind.bits == 8 else (flat[..., 0::2] & 15) | (flat[..., 1::2] << 4)
    values.view(np.uint8)[..., : low.shape[-1]] = low
    numbers = halves.reshape(*halves.shape[:-2], halves.shape[-2] * halves.shape[-1])
    shared.view(np.float16)[..., : numbers.shape[-1]] = numbers
    if kind.fifth_bits:
        bits = np.packbits(q >> 4, axis=-1, bitorder="little").view(np.uint32)[..., 0]
        shared[..., shared.shape[-1] - bits.shape[-1] :] = bits


def read(values: Words, shared: Words, kind: StorageType) -> tuple[NDArray[np.uint8], NDArray[np.float16]]:
    """The inverse of ``write``; numbers after the stored dimensions are 0."""
    stored = values.view(np.uint8)
    if kind.bits == 4:
        stored = np.stack([stored & 15, stored >> 4], axis=-1).reshape(*stored.shape[:-1], 2 * stored.shape[-1])
    count = -(-stored.shape[-1] // BLOCK)
    q = np.zeros((*values.shape[:-1], count * BLOCK), np.uint8)
    q[..., : stored.shape[-1]] = stored
    q = q.reshape(*values.shape[:-1], count, BLOCK)
    halves = shared.view(np.float16)[..., : count * kind.halves].reshape(*values.shape[:-1], count, kind.halves)
    if kind.fifth_bits:
        words = np.ascontiguousarray(shared[..., shared.shape[-1] - count :])
        bits = np.unpackbits(words.view(np.uint8), axis=-1, bitorder="little").reshape(q.shape)
        q |= bits << 4
    return q, halves


def _inverse(d: F32) -> F32:
    return np.divide(np.float32(1.0), d, out=np.zeros_like(d), where=d != 0)


def _extreme(x: F32) -> F32:
    """The first value of the largest magnitude of each block, and +0 where all are zeros of either sign."""
    return _picked(x, np.abs(x).argmax(axis=-1)) + np.float32(0.0)


def _picked(x: F32, index: NDArray[np.intp]) -> F32:
    """Element ``index`` of each block."""
    return np.take_along_axis(x, index[..., None], axis=-1)[..., 0]


def _integers(x: F32, most: int) -> NDArray[np.uint8]:
    """x truncated, at most ``most``; no x is below 0."""
    return np.minimum(x, np.float32(most), out=x).astype(np.uint8)


def _nonlinear(x: F32) -> tuple[NDArray[np.uint8], F32]:
    """iq4_nl's numbers and scales."""
    extreme = _extreme(x)
    step = extreme / _TABLE[0]
    scaled = x * _inverse(step)[..., None]
    q = np.searchsorted(_BETWEEN, scaled + scaled, side="right").astype(np.uint8)
    entry, weight = _TABLE[q], x * x
    products = np.stack([weight * entry * x, weight * entry * entry])
    sums = np.zeros(products.shape[:-1], np.float32)
    for i in range(BLOCK):
        sums += products[..., i]
    scale = np.divide(sums[0], sums[1], out=np.zeros_like(extreme), where=(sums[1] > 0) & (extreme != 0))
    q[extreme == 0] = 0  # any numbers would do: the block's scale is 0
    return q, scale
