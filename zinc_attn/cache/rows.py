"""The codec of K and V: values to words and back, as rows of tokens and as tiles of 64 tokens.

A row is one token's K and V of every KV head, (kv_heads, words): per KV head K values, V values, K scales, V scales,
in uint32 words (see shaders/cache.glsl).

q8_0: 32 consecutive head dimensions share a scale d = float16(max|x| / 127), rounded to nearest even, and are stored
as int8 q = rint(x / float32(d)), held within -127 ... 127; a block whose d is 0 stores zeros. The value is q * d,
exact in float32. (ggml's block format; its rounding of ties differs.)
"""

from __future__ import annotations

from dataclasses import astuple
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ..canonical.constants import CHUNK, KEYS_PER_LEAF, MAX_INPUT, MIN_INPUT
from ..canonical.state import as_input
from ..checks import BFLOAT16, check_array
from ..errors import DTypeError, ValueRangeError
from ..limits import Q8_BLOCK
from ..shapes import AttnShape, row_format

F32 = NDArray[np.float32]
Words = NDArray[np.uint32]

_FLOAT16: Final = np.dtype(np.float16)
_FLOAT32: Final = np.dtype(np.float32)
_F32_MOST: Final = np.float32(MAX_INPUT).view(np.uint32)
_F32_LEAST: Final = np.float32(MIN_INPUT).view(np.uint32)
# By dtype, as bits: all of a magnitude, the largest one that is taken, and the smallest that is not flushed.
_BOUNDS: Final[dict[np.dtype[Any], tuple[np.unsignedinteger[Any], ...]]] = {
    _FLOAT16: (np.uint16(0x7FFF), np.uint16(0x7BFF), np.uint16(0)),  # it has no magnitude that would be flushed
    BFLOAT16: (np.uint16(0x7FFF), np.uint16(_F32_MOST >> 16), np.uint16(_F32_LEAST >> 16)),
    _FLOAT32: (np.uint32(0x7FFFFFFF), _F32_MOST, _F32_LEAST),
}
_NARROW: Final = {"f16": _FLOAT16, "bf16": BFLOAT16}  # caches that take rows as they are, or round them on request
_F16_MAX: Final = 65504.0
_F16_OVERFLOW: Final = 65520.0  # the smallest magnitude that rounds to infinity
_Q8_MAX: Final = 127.0 * _F16_MAX  # beyond it the scale is no float16
_ANY: Final = "float32, float16 or bfloat16"
_TAKES: Final = {
    "f32": _ANY,
    "f16": "float16; a cache made with round_rows=True rounds float32 and bfloat16",
    "bf16": "bfloat16, or float32 or float16 values that bfloat16 holds exactly; a cache made with round_rows=True "
    "rounds float32 and float16",
    "q8_0": _ANY,
}


def checked_values(name: str, x: NDArray[Any]) -> tuple[NDArray[Any], float]:
    """float32, float16 or bfloat16 ``x`` with tiny values flushed, and its largest magnitude.

    ValueRangeError names the first bad index. Magnitudes are compared as bits, whose order is that of the numbers, NaN
    and infinities behind all of them.
    """
    if x.size == 0:
        return x, 0.0
    magnitude, most, least = _BOUNDS[x.dtype]
    bits = x.view(magnitude.dtype) & magnitude
    top = bits.max()
    if top > most:
        at = tuple(np.argwhere(~(np.abs(x.astype(np.float32)) <= MAX_INPUT))[0])
        where = ", ".join(map(str, at))
        raise ValueRangeError(f"{name}[{where}]: got {float(x[at]):g}, expected a finite value of at most 2**60")
    if least:
        one = magnitude.dtype.type(1)
        bits -= one  # zeros become the largest number
        if bits.min() < least - one:
            x = as_input(x).astype(x.dtype, copy=False)
    return x, float(top.view(x.dtype))


def stored_values(name: str, x: Any, dtype: str, round_rows: bool = False) -> tuple[NDArray[Any], float]:
    """``x`` as the values a cache of ``dtype`` takes, checked, and its largest magnitude.

    An f16 cache takes float16, and a bf16 cache values that bfloat16 holds; with ``round_rows`` either rounds float32,
    float16 and bfloat16 to nearest even. q8_0 quantizes, by the rule above.
    Returns float16 for f16 and bfloat16 for bf16; for f32 and q8_0 float16 arrays as they are, all others as float32.
    """
    array = check_array(name, x)
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
    if dtype == "q8_0" and largest > _Q8_MAX:
        raise ValueRangeError(f"{name}: got a magnitude of {largest:g}, a q8_0 cache takes at most {_Q8_MAX:g}")
    return values, largest


def _narrowed(name: str, x: NDArray[Any], largest: float, narrow: np.dtype[Any], round_rows: bool) -> NDArray[Any]:
    """Checked values as ``narrow``, rounded to nearest even with ``round_rows``. ValueRangeError names an index."""
    if narrow == _FLOAT16 and largest >= _F16_OVERFLOW:
        at = tuple(np.argwhere(np.abs(x.astype(np.float32)) >= _F16_OVERFLOW)[0])
        where = ", ".join(map(str, at))
        raise ValueRangeError(
            f"{name}[{where}]: got {float(x[at]):g}, a f16 cache takes magnitudes of at most "
            f"{_F16_MAX:g}, the largest float16; use a bf16 or f32 cache"
        )
    values = x.astype(narrow)
    if not round_rows and np.any(different := values.astype(np.float32) != x):
        where = ", ".join(map(str, np.argwhere(different)[0]))
        raise ValueRangeError(f"{name}[{where}]: not a bfloat16 value; a bf16 cache takes {_TAKES['bf16']}")
    return values


def quantize_q8_0(x: NDArray[Any]) -> tuple[NDArray[np.int8], NDArray[np.float16]]:
    """int8 values (..., head_dim) and float16 scales (..., head_dim / 32) of x (..., head_dim)."""
    blocks = np.ascontiguousarray(x, np.float32).reshape(*x.shape[:-1], -1, Q8_BLOCK)
    scale = (np.abs(blocks).max(axis=-1) / np.float32(127.0)).astype(np.float16)
    step = scale.astype(np.float32)[..., None]
    ratio = np.divide(blocks, step, out=np.zeros_like(blocks), where=step > 0)
    return np.clip(np.rint(ratio), -127, 127).astype(np.int8).reshape(x.shape), scale


def encode_into(out: Words, k: NDArray[Any], v: NDArray[Any], shape: AttnShape, dtype: str) -> None:
    """Write the rows of stored values k (n, kv_heads, head_dim) and v (n, kv_heads, v_head_dim) to ``out`` (n,
    kv_heads, words), whose other words are 0. A latent shape has no v."""
    row = row_format(shape, dtype)
    values = row.k_values + row.v_values
    parts = [(k, 0, values), (v, row.k_values, values + row.k_scales)]
    for x, first, scales in parts[: 1 if shape.latent else 2]:
        size = x.shape[-1]
        if dtype == "q8_0":
            quants, steps = quantize_q8_0(x)
            out[..., first : first + size // 4] = quants.view(np.uint32)
            halves = out.view(np.float16)
            halves[..., 2 * scales : 2 * scales + steps.shape[-1]] = steps
        elif dtype == "bf16":
            out.view(np.uint16)[..., 2 * first : 2 * first + size] = x.astype(BFLOAT16, copy=False).view(np.uint16)
        elif dtype == "f16":
            out.view(np.float16)[..., 2 * first : 2 * first + size] = x
        else:
            out.view(np.float32)[..., first : first + size] = x


def encode(k: NDArray[Any], v: NDArray[Any], shape: AttnShape, dtype: str) -> Words:
    """(n, kv_heads, words) of stored values k and v; see ``encode_into`` and ``stored_values``."""
    out = np.zeros((*k.shape[:2], row_format(shape, dtype).words), np.uint32)
    encode_into(out, k, v, shape, dtype)
    return out


def decode(words: Words, shape: AttnShape, dtype: str) -> tuple[F32, F32]:
    """The float32 values k (n, kv_heads, head_dim) and v (n, kv_heads, v_head_dim) that rows hold; the inverse of
    ``encode``. A latent shape's v are the first dimensions of k."""
    row = row_format(shape, dtype)
    k_values, v_values, k_scales, v_scales = np.split(words, np.cumsum(astuple(row)[:-1]), axis=2)
    keys = _join(k_values, k_scales, shape.head_dim, dtype)
    if shape.latent:
        return keys, keys[..., : shape.v_head_dim]
    return keys, _join(v_values, v_scales, shape.v_head_dim, dtype)


def _join(values: Words, scales: Words, dims: int, dtype: str) -> F32:
    values = np.ascontiguousarray(values)
    if dtype == "f32":
        return values.view(np.float32)[..., :dims]
    if dtype == "f16":
        return values.view(np.float16)[..., :dims].astype(np.float32)
    if dtype == "bf16":
        return np.asarray(values.view(BFLOAT16)[..., :dims], np.float32)
    factor = np.ascontiguousarray(scales).view(np.float16)[..., : dims // Q8_BLOCK].astype(np.float32)
    return values.view(np.int8).astype(np.float32) * np.repeat(factor, Q8_BLOCK, axis=-1)


def stored(
    k: NDArray[Any], v: NDArray[Any], dtype: str, round_rows: bool = False, latent: bool = False
) -> tuple[F32, F32]:
    """The values a cache of ``dtype`` holds after k and v were appended: what an oracle must be given."""
    keys, values = (stored_values(name, x, dtype, round_rows)[0] for name, x in (("k", k), ("v", v)))
    shape = AttnShape(k.shape[1], k.shape[1], k.shape[2], v.shape[2], latent)
    return decode(encode(keys, values, shape, dtype), shape, dtype)


# --- contiguous K and V ------------------------------------------------------------------------------------


def tiles(tokens: int) -> int:
    """Tiles of 64 tokens that hold ``tokens``."""
    return -(-tokens // KEYS_PER_LEAF)


def _padded(x: NDArray[Any], dims: int) -> NDArray[Any]:
    """(tokens, kv_heads, dims) with tokens filled up by zeros to whole tiles, and dimensions to ``dims``."""
    missing = tiles(len(x)) * KEYS_PER_LEAF - len(x), dims - x.shape[2]
    return np.pad(x, ((0, missing[0]), (0, 0), (0, missing[1]))) if any(missing) else x


def pack_k(k: NDArray[Any], shape: AttnShape) -> Words:
    """(tokens, kv_heads, head_dim) to (kv_heads, tiles, k_dim / 8, 64, 8), as uint32 words."""
    k = _padded(k, shape.k_dim)
    split = k.reshape(-1, KEYS_PER_LEAF, k.shape[1], k.shape[2] // CHUNK, CHUNK)
    return np.ascontiguousarray(split.transpose(2, 0, 3, 1, 4)).reshape(-1).view(np.uint32)


def pack_v(v: NDArray[Any], shape: AttnShape) -> Words:
    """(tokens, kv_heads, v_head_dim) to (kv_heads, tiles, 64, v_dim), as uint32 words."""
    return np.ascontiguousarray(_padded(v, shape.v_dim).transpose(1, 0, 2)).reshape(-1).view(np.uint32)
