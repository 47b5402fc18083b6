"""Quantized weights in NumPy: layout R32 and back, and the integers and scales that ggml's blocks stand for."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..canonical.state import F32
from ..storage import IQ4_NL
from .constants import MXFP4
from .pieces import GROUP, TYPES

Bytes = NDArray[np.uint8]
Ints = NDArray[np.int32]


class Weights(NamedTuple):
    """Weights of a matrix, q (rows, k), with their scales.

    Types of 32 values: d * q + m, with d and m (rows, k / 32); m is 0 where the type has none. Types of 256 values:
    d * scales * q - m * minima, with d and m (rows, k / 256) and a scale and a minimum for each 16: (rows, k / 16).
    """

    q: NDArray[np.int8]
    d: F32
    m: F32
    scales: Ints | None = None
    minima: Ints | None = None


def _groups(kind: str, rows: int, blocks: int) -> Iterator[tuple[slice, slice, int, int, int]]:
    """(bytes in R32, rows, rows of the group, offset in a block, size) of each piece of a matrix."""
    for first in range(0, rows, GROUP):
        count, place = min(GROUP, rows - first), first * blocks * TYPES[kind].size
        for offset, size in TYPES[kind].pieces:
            end = place + blocks * count * size
            yield slice(place, end), slice(first, first + count), count, offset, size
            place = end


def pack(kind: str, rows: Bytes) -> Bytes:
    """R32 of the rows of a matrix: ggml's bytes (rows, bytes of a row)."""
    source, packed = rows.reshape(len(rows), -1, TYPES[kind].size), np.empty(rows.size, np.uint8)
    for place, group_rows, _, offset, size in _groups(kind, *source.shape[:2]):
        packed[place] = source[group_rows, :, offset : offset + size].swapaxes(0, 1).reshape(-1)
    return packed


def unpack(kind: str, packed: Bytes, rows: int) -> Bytes:
    """The inverse of ``pack``."""
    target = np.empty((rows, packed.size // rows // TYPES[kind].size, TYPES[kind].size), np.uint8)
    for place, group_rows, count, offset, size in _groups(kind, *target.shape[:2]):
        target[group_rows, :, offset : offset + size] = packed[place].reshape(-1, count, size).swapaxes(0, 1)
    return target.reshape(rows, -1)


def decode(kind: str, rows: Bytes) -> Weights:
    """The weights that ggml's bytes (rows, bytes of a row) stand for."""
    blocks = rows.reshape(len(rows), -1, TYPES[kind].size)
    return (_decode_32 if TYPES[kind].values == 32 else _decode_256)(kind, blocks)


def _halves(x: Bytes) -> F32:
    return np.ascontiguousarray(x).view(np.float16).astype(np.float32)


def _bits(x: Bytes, width: int) -> Bytes:
    """(..., n) bytes to (..., 8 / width, n): their lowest bits, the next ones, ..."""
    shifts = np.arange(0, 8, width, dtype=np.uint8)
    return (x[..., None, :] >> shifts[:, None]) & np.uint8((1 << width) - 1)


def _signed(q: NDArray[Any], rows: int) -> NDArray[np.int8]:
    return q.astype(np.int8).reshape(rows, -1)


def _decode_32(kind: str, blocks: Bytes) -> Weights:
    rows, count = blocks.shape[:2]
    none = np.zeros((rows, count), np.float32)
    if kind == "q8_0":
        return Weights(_signed(blocks[..., 2:].view(np.int8), rows), _halves(blocks[..., :2])[..., 0], none)
    nibbles = _bits(blocks[..., -16:], 4).astype(np.int16).reshape(rows, count, 32)
    if kind == "mxfp4":
        exponents = blocks[..., 0].astype(np.int32)
        scale = np.where(exponents < 2, 0, np.ldexp(np.float32(1), exponents - 128))
        return Weights(_signed(np.array(MXFP4, np.uint32).view(np.int8)[nibbles], rows), scale.astype(np.float32), none)
    halves = _halves(blocks[..., : 4 if kind in ("q4_1", "q5_1") else 2])
    if kind in ("q5_0", "q5_1"):  # bits 0 ... 31 of a word are the values' fifth bits
        nibbles |= np.unpackbits(blocks[..., -20:-16], axis=-1, bitorder="little").astype(np.int16) << 4
    q = np.array(IQ4_NL)[nibbles] if kind == "iq4_nl" else nibbles - {"q4_0": 8, "q5_0": 16}.get(kind, 0)
    return Weights(_signed(q, rows), halves[..., 0], halves[..., 1] if kind in ("q4_1", "q5_1") else none)


def _decode_256(kind: str, blocks: Bytes) -> Weights:
    rows, count = blocks.shape[:2]
    halves = np.zeros((rows, count, 2), np.float32)
    q: NDArray[Any]
    scales: NDArray[Any] = np.zeros((), np.int32)
    minima: NDArray[Any] = np.zeros((), np.int32)
    if kind == "q2_K":
        halves = _halves(blocks[..., 80:])
        q = _bits(blocks[..., 16:80].reshape(rows, count, 2, 32), 2).astype(np.int16)
        scales, minima = blocks[..., :16] & 15, blocks[..., :16] >> 4
    elif kind == "q3_K":
        halves[..., :1] = _halves(blocks[..., 108:])
        high = _bits(blocks[..., :32], 1).reshape(rows, count, 2, 4, 32).astype(np.int16)
        q = _bits(blocks[..., 32:96].reshape(rows, count, 2, 32), 2) + 4 * high - 4
        low = _bits(blocks[..., 96:104], 4).reshape(rows, count, 16)
        scales = (low | _bits(blocks[..., 104:108], 2).reshape(rows, count, 16) << 4).astype(np.int32) - 32
    elif kind in ("q4_K", "q5_K"):
        halves = _halves(blocks[..., :4])
        q = _bits(blocks[..., -128:].reshape(rows, count, 4, 32), 4).astype(np.int16)
        if kind == "q5_K":
            q |= _bits(blocks[..., 16:48], 1).reshape(q.shape).astype(np.int16) << 4
        a, b, c = (blocks[..., i : i + 4] for i in (4, 8, 12))
        scales = np.repeat(np.concatenate([a & 63, c & 15 | a >> 6 << 4], -1), 2, -1)
        minima = np.repeat(np.concatenate([b & 63, c >> 4 | b >> 6 << 4], -1), 2, -1)
    elif kind == "q6_K":
        halves[..., :1] = _halves(blocks[..., 208:])
        low = _bits(blocks[..., :128].reshape(rows, count, 2, 64), 4).reshape(rows, count, 2, 4, 32)
        q = (low | _bits(blocks[..., 128:192].reshape(rows, count, 2, 32), 2) << 4).astype(np.int16) - 32
        scales = blocks[..., 192:208].view(np.int8)
    else:  # iq4_xs
        halves[..., :1] = _halves(blocks[..., :2])
        q = np.array(IQ4_NL)[_bits(blocks[..., 8:].reshape(rows, count, 8, 16), 4)]
        four = _bits(blocks[..., 4:8], 4).swapaxes(-1, -2).reshape(rows, count, 8)
        two = _bits(blocks[..., 2:4], 2).swapaxes(-1, -2).reshape(rows, count, 8)
        scales = np.repeat((four | two << 4).astype(np.int32) - 32, 2, -1)
    shape = rows, count * 16
    whole = (np.broadcast_to(x, (rows, count, 16)).astype(np.int32).reshape(shape) for x in (scales, minima))
    return Weights(_signed(q, rows), halves[..., 0], halves[..., 1], *whole)
