"""The codec of K and V: values to words and back, as rows of tokens.

A row is one token's K and V of every KV head, (kv_heads, words): per KV head K values, V values, K scales, V scales,
in uint32 words (see shaders/attend/words.glsl).

Block types quantize as ``blocks`` says. In tiles and rows values follow each other by dimension, the first in the
lowest bits; after the values come the words that blocks share: scales, two a word, or scale and minimum in a word, the
last word filled up, then a word of fifth bits per block, bit i for its dimension i.
fp8_e4m3 (OCP, 2023) stores x / scale, rounded to float32, then to nearest even: the value over the head's scale.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..canonical.constants import MAX_INPUT, MIN_INPUT
from ..canonical.state import F32, as_input
from ..checks import BFLOAT16, check_array
from ..errors import DTypeError, ValueRangeError
from ..kernels.records import Words
from ..limits import BLOCK
from ..shapes import AttnShape, row_format
from ..storage import F16_MAX, FP8_MAX, GROWTH, STORAGE, StorageType, storage_types
from . import blocks

_FLOAT16: Final = np.dtype(np.float16)
_FLOAT32: Final = np.dtype(np.float32)
_F32_MOST: Final = int(np.float32(MAX_INPUT).view(np.uint32))
_F32_LEAST: Final = int(np.float32(MIN_INPUT).view(np.uint32))
# By dtype, as bits: the mask of a magnitude, and 1; the largest accepted magnitude, and the least that is not flushed.
_BOUNDS: Final[dict[np.dtype[Any], tuple[NDArray[Any], NDArray[Any], int, int]]] = {
    _FLOAT16: (np.array(0x7FFF, np.uint16), np.array(1, np.uint16), 0x7BFF, 0),  # none would be flushed
    BFLOAT16: (np.array(0x7FFF, np.uint16), np.array(1, np.uint16), _F32_MOST >> 16, _F32_LEAST >> 16),
    _FLOAT32: (np.array(0x7FFFFFFF, np.uint32), np.array(1, np.uint32), _F32_MOST, _F32_LEAST),
}
_NARROW: Final = {"f16": _FLOAT16, "bf16": BFLOAT16}  # caches that take rows as they are, or round them on request
_F16_OVERFLOW: Final = 65520.0  # the smallest magnitude that rounds to infinity
_PIECE: Final = 1 << 20  # values that are quantized together
_ANY: Final = "float32, float16 or bfloat16"
_TAKES: Final = {
    "f32": _ANY,
    "f16": "float16; a cache made with round_rows=True rounds float32 and bfloat16",
    "bf16": "bfloat16, or float32 or float16 values that bfloat16 holds exactly; a cache made with round_rows=True "
    "rounds float32 and float16",
    **dict.fromkeys((name for name, kind in STORAGE.items() if kind.quantized), _ANY),
}


class Largest(NamedTuple):
    """The largest magnitudes of K and of V."""

    k: float = 0.0
    v: float = 0.0

    def maximum(self, other: Largest) -> Largest:
        """The larger magnitudes of both."""
        if self.k >= other.k and self.v >= other.v:
            return self  # nearly always
        return Largest(max(self.k, other.k), max(self.v, other.v))


NO_ROWS: Final = Largest()


def pieces(rows: int, row_size: int, most: int) -> Iterator[slice]:
    """Slices that cut ``rows`` rows of size ``row_size`` into pieces of at most ``most``, and of one row at least."""
    step = max(1, most // row_size)
    return (slice(row, min(row + step, rows)) for row in range(0, rows, step))


def _first(mask: NDArray[np.bool_]) -> tuple[tuple[int, ...], str]:
    """The index of the first true element, and its text in errors."""
    index = tuple(np.argwhere(mask)[0].tolist())
    return index, ", ".join(map(str, index))


def checked_values(name: str, x: NDArray[Any]) -> tuple[NDArray[Any], float]:
    """float32, float16 or bfloat16 ``x`` with tiny values flushed, and its largest magnitude.

    ValueRangeError names the first bad index. Magnitudes are compared as bits, which order like the numbers, and put
    infinities and NaN last; ``argmax`` finds the largest of few in a quarter of ``max``'s time.
    """
    if x.size == 0:
        return x, 0.0
    magnitude, unit, most, least = _BOUNDS[x.dtype]
    bits = x.view(magnitude.dtype) & magnitude
    top = bits.argmax()
    if bits.item(top) > most:
        index, where = _first(~(np.abs(x.astype(np.float32)) <= MAX_INPUT))
        raise ValueRangeError(f"{name}[{where}]: got {float(x[index]):g}, expected a finite value of at most 2**60")
    largest = abs(float(x.item(top)))
    if least:
        bits -= unit  # zeros become the largest number
        if bits.item(bits.argmin()) < least - 1:
            x = np.where(x == 0, x, as_input(x)).astype(x.dtype, copy=False)  # zeros keep their sign
    return x, largest


def stored_values(
    name: str, x: Any, dtype: str, round_rows: bool = False, scale: F32 | None = None
) -> tuple[NDArray[Any], float]:
    """``x`` as checked values of rows of type ``dtype``, and their largest stored magnitude.

    An f16 cache takes float16, and a bf16 cache values that bfloat16 holds; with ``round_rows`` either rounds float32,
    float16 and bfloat16 to nearest even. Block types and fp8_e4m3 quantize. scale: (kv_heads,) of fp8_e4m3.
    Returns float16 for f16, bfloat16 for bf16; for other types float16 arrays as they are, and all others as float32.
    """
    array, kind = check_array(name, x), STORAGE[dtype]
    if array.dtype not in _BOUNDS or (dtype == "f16" and array.dtype != _FLOAT16 and not round_rows):
        takes = _ANY if round_rows else _TAKES[dtype]
        raise DTypeError(f"{name}: got dtype {array.dtype}, a {dtype} cache takes {takes}")
    narrow = _NARROW.get(dtype)
    if narrow is None and array.dtype == BFLOAT16:
        array = array.astype(np.float32)
    values, largest = checked_values(name, array)
    if narrow is not None and values.dtype != narrow:
        values = _narrowed(name, values, largest, narrow, round_rows)
        largest = float(narrow.type(largest))  # rounding keeps the order of magnitudes
    if kind.halves and largest > kind.most:
        _, where = _first(np.abs(values) > kind.most)
        raise ValueRangeError(
            f"{name}[{where}]: got a magnitude of up to {largest:.9g}, a cache of {dtype} takes at most "
            f"{kind.most:.9g}; use a bf16 or f32 cache"
        )
    if kind.head_scale and values.size:
        _check_fp8(name, values, largest, _scale_of(scale, values))
    return values, largest * GROWTH if kind.quantized else largest


def _scale_of(scale: F32 | None, x: NDArray[Any]) -> F32:
    """fp8_e4m3's scales as (kv_heads, 1) float32."""
    return np.ones((x.shape[1], 1), np.float32) if scale is None else scale[:, None]


def _check_fp8(name: str, x: NDArray[Any], most: float, scale: F32) -> None:
    """Refuse magnitudes beyond those of fp8_e4m3 times the head's scale. most: the largest magnitude of all heads."""
    if np.float32(most) / scale.min() <= FP8_MAX:
        return
    largest = np.abs(x).max(axis=(0, 2)).astype(np.float32)
    beyond = largest / scale[:, 0] > FP8_MAX
    if np.any(beyond):
        head = int(np.argmax(beyond))
        raise ValueRangeError(
            f"{name}: got a magnitude of {largest[head]:g} in KV head {head}, a fp8_e4m3 cache takes at most "
            f"{FP8_MAX:g} times the head's scale, {float(scale[head, 0]):g}; give a larger {name}_scale"
        )


def _narrowed(name: str, x: NDArray[Any], largest: float, narrow: np.dtype[Any], round_rows: bool) -> NDArray[Any]:
    """Checked values as ``narrow``, rounded to nearest even with ``round_rows``. ValueRangeError names an index."""
    if narrow == _FLOAT16 and largest >= _F16_OVERFLOW:
        index, where = _first(np.abs(x.astype(np.float32)) >= _F16_OVERFLOW)
        raise ValueRangeError(
            f"{name}[{where}]: got {float(x[index]):g}, a f16 cache takes magnitudes of at most "
            f"{F16_MAX:g}, the largest float16; use a bf16 or f32 cache"
        )
    values = x.astype(narrow)
    if not round_rows and np.any(different := values.astype(np.float32) != x):
        _, where = _first(different)
        raise ValueRangeError(f"{name}[{where}]: not a bfloat16 value; a bf16 cache takes {_TAKES['bf16']}")
    return values


def encode_into(
    out: Words, k: NDArray[Any], v: NDArray[Any], shape: AttnShape, dtype: str, scales: F32 | None = None
) -> None:
    """Write the rows of stored values k (n, kv_heads, head_dim) and v (n, kv_heads, v_head_dim) to ``out`` (n,
    kv_heads, words), whose other words are 0. A latent shape has no v. scales: (2, kv_heads) of fp8_e4m3, or None."""
    k_values, v_values, k_scales, v_scales = row_parts(out, shape, dtype)
    k_type, v_type = storage_types(dtype)
    k_factor, v_factor = (None, None) if scales is None else scales
    write_part(k_values, k_scales, k, k_type, k_factor)
    if not shape.latent:
        write_part(v_values, v_scales, v, v_type, v_factor)


def row_parts(words: Words, shape: AttnShape, dtype: str) -> list[Words]:
    """The views of K values, V values, K scales and V scales of rows."""
    return [words[..., begin:end] for begin, end in row_format(shape, dtype).spans]


def write_part(out: Words, shared: Words, x: NDArray[Any], kind: StorageType, scale: F32 | None) -> None:
    """Write values x (n, kv_heads, dims) of K or V and the words that their blocks share."""
    dims = x.shape[-1]
    if kind.halves:
        for part in pieces(len(x), x.shape[1] * dims, _PIECE):
            blocks.write(out[part], shared[part], *blocks.quantize(blocks.in_blocks(x[part]), kind), kind)
    elif kind.head_scale:
        codes = (x / _scale_of(scale, x)).astype(blocks.FP8).view(np.uint8)
        out.view(np.uint8)[..., :dims] = codes
    elif kind.name == "bf16":
        out.view(np.uint16)[..., :dims] = x.astype(BFLOAT16, copy=False).view(np.uint16)
    else:
        out.view(np.float16 if kind.name == "f16" else np.float32)[..., :dims] = x


def encode(k: NDArray[Any], v: NDArray[Any], shape: AttnShape, dtype: str, scales: F32 | None = None) -> Words:
    """(n, kv_heads, words) of stored values k and v; see ``encode_into`` and ``stored_values``."""
    out = np.zeros((*k.shape[:2], row_format(shape, dtype).words), np.uint32)
    encode_into(out, k, v, shape, dtype, scales)
    return out


def decode(words: Words, shape: AttnShape, dtype: str, scales: F32 | None = None) -> tuple[F32, F32]:
    """The float32 values k (n, kv_heads, head_dim) and v (n, kv_heads, v_head_dim) that rows hold: the arithmetic of
    shaders/attend/storage.glsl. A latent shape's v are the first dimensions of k. scales: see ``encode_into``."""
    k_values, v_values, k_scales, v_scales = row_parts(words, shape, dtype)
    k_type, v_type = storage_types(dtype)
    k_factor, v_factor = (None, None) if scales is None else scales
    keys = _decode_part(k_values, k_scales, shape.head_dim, k_type, k_factor)
    if shape.latent:
        return keys, keys[..., : shape.v_head_dim]
    return keys, _decode_part(v_values, v_scales, shape.v_head_dim, v_type, v_factor)


def row_magnitudes(
    words: Words, shape: AttnShape, dtype: str, scales: F32 | None = None
) -> tuple[Largest, NDArray[np.bool_]]:
    """The largest magnitudes of rows, their padding included, and for each row (n,) whether ``stored_values`` could
    have returned its values. scales: see ``encode_into``."""
    whole = AttnShape(shape.q_heads, shape.kv_heads, shape.k_dim, shape.v_dim, shape.latent)
    with np.errstate(all="ignore"):
        k, v = (np.abs(x) for x in decode(words, whole, dtype, scales))
        fits = [((x == 0) | ((x >= MIN_INPUT) & (x <= MAX_INPUT))).all(axis=(1, 2)) for x in (k, v)]
    return Largest(float(k.max(initial=0.0)), float(v.max(initial=0.0))), fits[0] & fits[1]


def _decode_part(values: Words, shared: Words, dims: int, kind: StorageType, scale: F32 | None) -> F32:
    values, shared = np.ascontiguousarray(values), np.ascontiguousarray(shared)
    if kind.halves:
        numbers = blocks.dequantize(*blocks.read(values, shared, kind), kind)
        return numbers.reshape(*values.shape[:2], numbers.shape[-2] * BLOCK)[..., :dims]
    if kind.head_scale:
        codes = values.view(blocks.FP8)[..., :dims]
        return np.asarray(codes.astype(np.float32) * _scale_of(scale, codes), np.float32)
    if kind.name == "bf16":
        return np.asarray(values.view(BFLOAT16)[..., :dims], np.float32)
    return np.asarray(values.view(np.float16 if kind.name == "f16" else np.float32)[..., :dims], np.float32)


def stored(
    k: NDArray[Any],
    v: NDArray[Any],
    dtype: str,
    round_rows: bool = False,
    latent: bool = False,
    scales: F32 | None = None,
) -> tuple[F32, F32]:
    """The values a cache of ``dtype`` holds after k and v were appended: the oracle's inputs."""
    words, shape = _held(k, v, dtype, round_rows, latent, scales)
    return decode(words, shape, dtype, scales)


def stored_scales(k: NDArray[Any], v: NDArray[Any], dtype: str) -> dict[str, NDArray[np.float16]]:
    """k_scales and v_scales (n, kv_heads, blocks) of ``stored``'s values, for the oracle of arithmetic "integer"."""
    words, shape = _held(k, v, dtype, False, False, None)
    parts, scales = row_parts(words, shape, dtype), []
    for values, shared, kind in zip(parts[:2], parts[2:], storage_types(dtype), strict=True):
        scales.append(blocks.read(np.ascontiguousarray(values), np.ascontiguousarray(shared), kind)[1][..., 0])
    return {"k_scales": scales[0], "v_scales": scales[1]}


def _held(
    k: NDArray[Any], v: NDArray[Any], dtype: str, round_rows: bool, latent: bool, scales: F32 | None
) -> tuple[Words, AttnShape]:
    shape = AttnShape(k.shape[1], k.shape[1], k.shape[2], v.shape[2], latent)
    factors = (None, None) if scales is None else scales
    columns = zip("kv", (k, v), storage_types(dtype), factors, strict=True)
    keys, values = (stored_values(name, x, kind.name, round_rows, factor)[0] for name, x, kind, factor in columns)
    return encode(keys, values, shape, dtype, scales), shape
