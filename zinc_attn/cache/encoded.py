"""Rows that are stored already: the bytes of a llama.cpp cache, or of any other.

k and v are uint8 (tokens, kv_heads, bytes): rows of head_dim values, a KV head after the other. Block types have ggml's
blocks of 32 values, in this order: the float16 d, the float16 m (q4_1, q5_1), 32 fifth bits (q5_0, q5_1), the values of
4 bits in 16 bytes, byte i with value i in its low half and value i + 16 in its high half. Other types have their
values, little-endian; f32 and bf16 magnitudes below 2**-40 count as 0, as in every row.
"""

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ..canonical.state import F32
from ..checks import BFLOAT16, check_array
from ..errors import ArgumentError, DTypeError, ShapeError, ValueRangeError
from ..kernels.records import Words
from ..limits import BLOCK
from ..shapes import AttnShape, row_format
from ..storage import StorageType, storage_types
from . import blocks
from .rows import Largest, pieces, row_parts, stored_values, write_part

Bytes = NDArray[np.uint8]

PIECE: Final = 1 << 20  # bytes that are decoded together, to find their largest value
_FLOATS: Final = {"f32": np.dtype("<f4"), "f16": np.dtype("<f2"), "bf16": BFLOAT16}


def from_blocks(raw: Bytes, kind: StorageType) -> tuple[Bytes, NDArray[np.float16]]:
    """The numbers of ``blocks.quantize`` from ggml's bytes (..., blocks, block_bytes)."""
    offset, end = 2 * kind.halves, raw.shape[-1]
    halves = np.ascontiguousarray(raw[..., :offset]).view("<f2").astype(np.float16, copy=False)
    packed = raw[..., offset + 4 * kind.fifth_bits : end]
    if kind.bits == 8:
        return np.ascontiguousarray(packed), halves
    q = np.concatenate([packed & 15, packed >> 4], axis=-1)
    if kind.fifth_bits:
        q |= np.unpackbits(np.ascontiguousarray(raw[..., offset : offset + 4]), axis=-1, bitorder="little") << 4
    return q, halves


def to_blocks(q: Bytes, halves: NDArray[np.float16], kind: StorageType) -> Bytes:
    """The inverse of ``from_blocks``."""
    parts: list[Bytes] = [np.ascontiguousarray(halves.astype("<f2", copy=False)).view(np.uint8)]
    if kind.fifth_bits:
        parts.append(np.packbits(q >> 4, axis=-1, bitorder="little").astype(np.uint8, copy=False))
    half = BLOCK // 2
    packed = q if kind.bits == 8 else (q[..., :half] & np.uint8(15)) | (q[..., half:] << np.uint8(4))
    parts.append(packed.astype(np.uint8, copy=False))
    return np.concatenate(parts, axis=-1)


def check_encoded(k: Any, v: Any, shape: AttnShape, dtype: str) -> list[Bytes]:
    """k, and v unless the shape is latent, with shapes and dtypes that the cache takes, at least one token.

    Typed refusals: an array of another shape or dtype, or a head size that is no multiple of a block.
    """
    if (v is None) != shape.latent:
        what = "None: the values of a latent cache are part of k" if shape.latent else "the bytes of V's rows"
        raise ArgumentError(f"v: got {'None' if v is None else 'an array'}, expected {what}")
    k_type, v_type = storage_types(dtype)
    keys = check_array("k", k)
    if not keys.ndim or not keys.size:
        raise ShapeError(f"k: got shape {keys.shape}, expected (tokens, kv_heads, bytes), at least one token")
    arrays = [("k", keys, k_type, shape.head_dim)]
    if not shape.latent:
        arrays.append(("v", check_array("v", v), v_type, shape.v_head_dim))
    for name, array, kind, dims in arrays:
        if kind.halves and dims % BLOCK:
            raise ArgumentError(
                f"{name}: got encoded rows of {dims} values, expected a multiple of {BLOCK} for {kind.name}; use "
                "append for other sizes"
            )
        if array.dtype != np.uint8:
            raise DTypeError(f"{name}: got dtype {array.dtype}, expected uint8, the bytes of {kind.name} rows")
        want = (len(keys), shape.kv_heads, kind.row_bytes(dims))
        if array.shape != want:
            raise ShapeError(
                f"{name}: got shape {array.shape}, expected (tokens, kv_heads, bytes) {want} for {kind.name}"
            )
    return [array for _, array, _, _ in arrays]


def encoded_rows(arrays: list[Bytes], shape: AttnShape, dtype: str, scales: F32 | None) -> tuple[Words, Largest]:
    """(rows as ``rows`` lays them out, largest magnitudes) of the arrays of ``check_encoded``.

    scales: see ``rows.encode_into``. ValueRangeError: a scale, a minimum or a value is no finite number.
    """
    words = np.zeros((len(arrays[0]), shape.kv_heads, row_format(shape, dtype).words), np.uint32)
    k_values, v_values, k_shared, v_shared = row_parts(words, shape, dtype)
    kinds, factors = storage_types(dtype), (None, None) if scales is None else scales
    parts = zip("kv", (k_values, v_values), (k_shared, v_shared), kinds, factors, strict=True)
    largest = [_write(x, *part) for x, part in zip(arrays, parts, strict=False)]  # a latent shape has no v
    return words, Largest(largest[0], largest[-1])


def _write(raw: Bytes, name: str, values: Words, shared: Words, kind: StorageType, scale: F32 | None) -> float:
    """Write the rows of K or V, and return their largest magnitude. shared: the words that blocks share."""
    if not kind.quantized:
        numbers, largest = stored_values(name, np.ascontiguousarray(raw).view(_FLOATS[kind.name]), kind.name)
        write_part(values, shared, numbers, kind, None)
        return largest
    largest = 0.0
    for part in pieces(len(raw), raw[0].size, PIECE):
        piece = np.ascontiguousarray(raw[part])
        if kind.head_scale:
            _check_finite((piece & 0x7F) != 0x7F, name, part.start, "value", "an fp8_e4m3 NaN")
            values[part].view(np.uint8)[..., : raw.shape[2]] = piece
            by_head = (piece & 0x7F).max(axis=(0, 2)).view(blocks.FP8).astype(np.float32)
            numbers = by_head if scale is None else by_head * scale
        else:
            q, halves = from_blocks(piece.reshape(*piece.shape[:2], -1, kind.block_bytes), kind)
            _check_finite(np.isfinite(halves), name, part.start, "block", "a scale or minimum that is not finite")
            blocks.write(values[part], shared[part], q, halves, kind)
            numbers = np.abs(blocks.dequantize(q, halves, kind))
        largest = max(largest, float(numbers.max()))
    return largest


def _check_finite(fits: NDArray[np.bool_], name: str, first: int, what: str, problem: str) -> None:
    """Refuse values that do not fit. first: the token that ``fits`` begins with."""
    if not np.all(fits):
        token, head, index = np.argwhere(~fits)[0][:3]
        raise ValueRangeError(
            f"{name}: got {problem} in token {first + token}, KV head {head}, {what} {index}, expected numbers"
        )
