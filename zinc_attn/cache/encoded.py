"""Rows that are stored already: the bytes of a llama.cpp cache, or of any other.

k and v are uint8 (tokens, kv_heads, bytes), a head's row of head_dim values after the other. Block types have ggml's
blocks of 32 values, in this order: the float16 d, the float16 m (q4_1, q5_1), 32 fifth bits (q5_0, q5_1), the values of
4 bits in 16 bytes, byte i with value i in its low half and value i + 16 in its high half. Other types have their
values, little-endian; f32 and bf16 magnitudes below 2**-40 count as 0, as in every row.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..checks import BFLOAT16, check_array
from ..errors import ArgumentError, DTypeError, ShapeError, ValueRangeError
from ..limits import BLOCK
from ..shapes import AttnShape, row_format
from ..storage import StorageType, storage_types
from . import blocks
from .rows import F32, Words, row_parts, stored_values, write_part

Bytes = NDArray[np.uint8]

PIECE: Final = 1 << 20  # values that are decoded together, for the largest of them
_FLOATS: Final = {"f32": np.dtype("<f4"), "f16": np.dtype("<f2"), "bf16": BFLOAT16}


def block_bytes(kind: StorageType) -> int:
    """Bytes of one of ggml's blocks."""
    return 2 * kind.halves + 4 * kind.fifth_bits + BLOCK * kind.bits // 8


def row_bytes(kind: StorageType, dims: int) -> int:
    """Bytes of a head's row of ``dims`` values."""
    return dims // BLOCK * block_bytes(kind) if kind.halves else dims * kind.bits // 8


def from_blocks(raw: Bytes, kind: StorageType) -> tuple[Bytes, NDArray[np.float16]]:
    """ggml's bytes (..., blocks, block_bytes) as what ``blocks.quantize`` returns."""
    at, end = 2 * kind.halves, raw.shape[-1]
    halves = np.ascontiguousarray(raw[..., :at]).view("<f2").astype(np.float16, copy=False)
    packed = raw[..., at + 4 * kind.fifth_bits : end]
    if kind.bits == 8:
        return np.ascontiguousarray(packed), halves
    q = np.concatenate([packed & 15, packed >> 4], axis=-1)
    if kind.fifth_bits:
        q |= np.unpackbits(np.ascontiguousarray(raw[..., at : at + 4]), axis=-1, bitorder="little") << 4
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


def token_count(k: Any, v: Any, shape: AttnShape, dtype: str) -> int:
    """Tokens of encoded rows, at least one, whose arrays are such as the cache takes. A latent shape has no v.

    Typed refusals: an array of another shape or dtype, or blocks of a size that has none.
    """
    if (v is None) != shape.latent:
        what = "None: the values of a latent cache are part of k" if shape.latent else "the bytes of V's rows"
        raise ArgumentError(f"v: got {'None' if v is None else 'an array'}, expected {what}")
    k_type, v_type = storage_types(dtype)
    keys = check_array("k", k)
    if not keys.ndim or not keys.size:
        raise ShapeError(f"k: got shape {keys.shape}, expected (tokens, kv_heads, bytes), at least one token")
    given = [("k", keys, k_type, shape.head_dim)]
    if not shape.latent:
        given.append(("v", check_array("v", v), v_type, shape.v_head_dim))
    for name, array, kind, dims in given:
        if kind.halves and dims % BLOCK:
            raise ArgumentError(
                f"{name}: got encoded rows of {dims} values, expected a multiple of {BLOCK} for {kind.name}; use "
                "append for other sizes"
            )
        if array.dtype != np.uint8:
            raise DTypeError(f"{name}: got dtype {array.dtype}, expected uint8, the bytes of {kind.name} rows")
        want = (len(keys), shape.kv_heads, row_bytes(kind, dims))
        if array.shape != want:
            raise ShapeError(
                f"{name}: got shape {array.shape}, expected (tokens, kv_heads, bytes) {want} for {kind.name}"
            )
    return len(keys)


def encoded_rows(k: Any, v: Any, shape: AttnShape, dtype: str, scales: F32 | None) -> tuple[Words, float]:
    """The rows (tokens, kv_heads, words) of encoded k and v, as ``rows`` lays them out, and max |k|.

    scales: see ``rows.encode_into``. Typed refusals: those of ``token_count``, and ValueRangeError for a scale, a
    minimum or a value that is no finite number.
    """
    tokens = token_count(k, v, shape, dtype)
    words = np.zeros((tokens, shape.kv_heads, row_format(shape, dtype).words), np.uint32)
    k_values, v_values, k_shared, v_shared = row_parts(words, shape, dtype)
    (k_type, v_type), (k_scale, v_scale) = storage_types(dtype), (None, None) if scales is None else scales
    largest, most = 0.0, max(1, PIECE // max(k_values[0].size * 32 // k_type.bits, 1))
    for at in range(0, tokens, most):
        part = slice(at, at + most)
        k_part = _Part("k", at, k_values[part], k_shared[part], k_type, k_scale)
        largest = max(largest, k_part.write(check_array("k", k)[part]))
        if not shape.latent:
            _Part("v", at, v_values[part], v_shared[part], v_type, v_scale).write(check_array("v", v)[part])
    return words, largest


class _Part(NamedTuple):
    """The words of some tokens of K or V: values and what their blocks share, (tokens, kv_heads, words) each.

    first: the first token's place among those of the call.
    """

    name: str
    first: int
    values: Words
    shared: Words
    kind: StorageType
    scale: F32 | None

    def write(self, array: Bytes) -> float:
        """Write encoded rows and return their largest magnitude."""
        raw, kind = np.ascontiguousarray(array), self.kind
        if kind.halves:
            q, halves = from_blocks(raw.reshape(*raw.shape[:2], -1, block_bytes(kind)), kind)
            self._check(np.isfinite(halves), "block", "a scale or minimum that is not finite")
            blocks.write(self.values, self.shared, q, halves, kind)
            return float(np.abs(blocks.dequantize(q, halves, kind)).max())
        if kind.head_scale:
            self._check((raw & 0x7F) != 0x7F, "value", "an fp8_e4m3 NaN")
            self.values.view(np.uint8)[..., : raw.shape[2]] = raw
            largest = (raw & 0x7F).max(axis=(0, 2)).view(blocks.FP8).astype(np.float32)
            return float((largest if self.scale is None else largest * self.scale).max())
        found, most = stored_values(self.name, raw.view(_FLOATS[kind.name]), kind.name)
        write_part(self.values, self.shared, found, kind, None)
        return most

    def _check(self, fits: NDArray[np.bool_], what: str, found: str) -> None:
        if not np.all(fits):
            token, head, at = np.argwhere(~fits)[0][:3]
            where = f"token {self.first + token}, KV head {head}, {what} {at}"
            raise ValueRangeError(f"{self.name}: got {found} in {where}, expected numbers")
