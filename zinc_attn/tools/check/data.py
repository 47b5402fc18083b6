"""The values of a case, which every machine makes alike: q, K and V of a data kind, and masks.

Word i of an array is splitmix64 (Steele, Lea, Flood 2014), whose seed is the first 8 bytes of SHA-256 of the array's
name. Three 21-bit fields of the word are added and scaled to standard deviation 1 in [-3, 3], and every step is exact.
Query head h is multiplied by 2**(h % 4), so that flat and sharp softmaxes occur.

``normal`` scores are of one size all along the context, so every leaf has nearly the same maximum. The other kinds move
the scores along the context, by dimension 0 of q and K; the amounts are natural units for a head of factor 1:

    rising      by 2 per leaf of 64 keys: every merge rescales what was summed before
    falling     by 2 per leaf: every merge scales down what is added, until it falls below the cut-off
    jumping     to -200, 0 or 200 and back, every 40 keys: weights, leaves and nodes vanish
    cancelling  not at all: keys occur twice, the second time backwards and with the opposite value, so that out is what
                the roundings of the sums leave
    coarse      not at all: K and V are multiples of 2**-5 that every type of 8 bits a number or more, but fp8, holds
    fading      of a few peaks per leaf, whose values are 0, from near 0 up to far beyond the cut-off. The other keys
                have a score of exactly 0 and values of powers of two, down to the least that are stored: sums are exact
                powers of two that hit the cut-off and the flush to 0, and pairs of values leave less than the flush
"""

from __future__ import annotations

import hashlib
import math
from typing import Any, Final, NamedTuple

import numpy as np
from ml_dtypes import bfloat16
from numpy.typing import NDArray

from ...cache.rows import stored
from ...canonical.constants import KEYS_PER_LEAF
from ...canonical.state import F32
from ...shapes import AttnShape
from ...storage import storage_types

KINDS: Final = ("normal", "rising", "falling", "jumping", "cancelling", "fading", "coarse")
MASKS: Final = ("random", "tree", "blind", "f32", "f16")
ROWS: Final = 3  # query rows made per shape; the last one is the case's
_JUMP: Final = 40  # keys between two jumps, no divisor of a leaf
_PEAK: Final = 16  # keys between two peaks of the kind fading
_LEAVES_PER_STEP: Final = 2  # leaves whose peaks have one height
_COARSE: Final = np.float32(2.0**-5)  # with 127 of them in every block of 32 values q8_0 has this scale
_MASK_KEYS: Final = 100  # the last keys of a row which the masks tree and f32 cover


def words(name: str, count: int, first: int = 0) -> NDArray[np.uint64]:
    """Words first ... first + count - 1 of the array called ``name``."""
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
    z = np.arange(first + 1, first + count + 1, dtype=np.uint64)
    z *= np.uint64(0x9E3779B97F4A7C15)
    z += np.uint64(seed)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z ^= z >> np.uint64(shift)
        z *= np.uint64(factor)
    z ^= z >> np.uint64(31)
    return z


def values(name: str, shape: tuple[int, ...], dtype: str = "f32") -> NDArray[Any]:
    """An array of ``shape``: float16 for f16, otherwise float32, of values that bfloat16 holds for bf16."""
    out = np.empty(shape, np.float16 if dtype == "f16" else np.float32)
    flat, mask, block = out.reshape(-1), np.uint64((1 << 21) - 1), 1 << 18
    for start in range(0, flat.size, block):
        w = words(name, min(block, flat.size - start), start)
        total = ((w & mask) + ((w >> np.uint64(21)) & mask) + ((w >> np.uint64(42)) & mask)).astype(np.int64)
        x = (2 * total - 3 * ((1 << 21) - 1)).astype(np.float32) * np.float32(2.0**-21)
        flat[start : start + block] = _rounded(x, dtype)
    return out


def _rounded(x: F32, dtype: str) -> NDArray[Any]:
    return x.astype(bfloat16) if dtype == "bf16" else x.astype(np.float16) if dtype == "f16" else x


class Data(NamedTuple):
    """q (ROWS or more, q_heads, head_dim) float32; k, v (tokens, kv_heads, head_dim and v_head_dim) as a cache of the
    dtype takes them. latent: v is the begin of k, and a cache takes k alone."""

    q: F32
    k: NDArray[Any]
    v: NDArray[Any]
    latent: bool = False

    @classmethod
    def make(cls, shape: AttnShape, dtype: str, tokens: int, kind: str = "normal", rows: int = ROWS) -> Data:
        """The values of a shape; fewer tokens or rows are a prefix of more, and a dtype rounds the same values."""
        q = values(f"{shape} q", (max(rows, ROWS), shape.q_heads, shape.head_dim))
        factors = np.exp2(np.arange(shape.q_heads) % 4).astype(np.float32)
        q *= factors[:, None]
        k_type, v_type = (kind.name for kind in storage_types(dtype))
        k = values(f"{shape} k", (tokens, shape.kv_heads, shape.head_dim), k_type)
        v = k if shape.latent else values(f"{shape} v", (tokens, shape.kv_heads, shape.v_head_dim), v_type)
        if kind == "cancelling":
            _cancel(k, v)
        elif kind == "coarse":
            for x in (k,) if shape.latent else (k, v):
                x[:] = np.clip(np.rint(x.astype(np.float32) / _COARSE), -127, 127) * _COARSE
                x[..., ::32] = np.copysign(127 * _COARSE, x[..., ::32].astype(np.float32))
        elif kind != "normal":
            q[..., 0] = _lift(shape.head_dim) * factors
            if kind == "fading":
                _fade(k, v, v_type)
            k[..., 0] = _rounded(_scores(kind, tokens, shape.kv_heads), k_type)
        return cls(q, k, v[..., : shape.v_head_dim], shape.latent)

    def rows(self, begin: int, end: int) -> tuple[NDArray[Any], ...]:
        """The tokens [begin, end) as a cache appends them: k and v, or k alone."""
        return (self.k[begin:end],) if self.latent else (self.k[begin:end], self.v[begin:end])

    def equals(self, other: Data) -> bool:
        return np.array_equal(self.k, other.k) and np.array_equal(self.v, other.v)

    def stored_as(self, dtype: str) -> Data:
        """The values that a cache of ``dtype`` holds, as float32."""
        k, v = stored(self.k, self.v, dtype, latent=self.latent)
        return self._replace(k=k, v=v)


def _lift(head_dim: int) -> np.float32:
    """A power of two near sqrt(head_dim): in dimension 0 of q it makes K's dimension 0 nearly the score's part."""
    return np.float32(2.0 ** round(math.log2(head_dim) / 2))


def _scores(kind: str, tokens: int, kv_heads: int) -> F32:
    """Dimension 0 of K along the context: (tokens, kv_heads), or (tokens, 1) where the heads do not differ."""
    position = np.arange(tokens)[:, None]
    if kind == "jumping":
        jumps = words("jumps", tokens // _JUMP + 1) % np.uint64(3)
        return (200.0 * (jumps.astype(np.float32) - 1))[position // _JUMP].astype(np.float32)
    if kind == "fading":  # a step is 3 in log2 units for the first head, so that its maxima meet the cut-off of 48
        heights = position // (_LEAVES_PER_STEP * KEYS_PER_LEAF) * 2.08203125 * (1 + np.arange(kv_heads) / 96)
        return np.where(position % _PEAK == 5, heights, 0).astype(np.float32)
    return (position * np.float32(2 / KEYS_PER_LEAF if kind == "rising" else -2 / KEYS_PER_LEAF)).astype(np.float32)


def _cancel(k: NDArray[Any], v: NDArray[Any]) -> None:
    """Give the second of every two leaves the keys of the first backwards, and the opposite values."""
    position = np.arange(len(k))
    block, within = position // (2 * KEYS_PER_LEAF) * 2 * KEYS_PER_LEAF, position % (2 * KEYS_PER_LEAF)
    second = within >= KEYS_PER_LEAF
    first = (block + 2 * KEYS_PER_LEAF - 1 - within)[second]
    k[second] = k[first]
    if not np.shares_memory(k, v):
        v[second] = -v[first]


def _fade(k: NDArray[Any], v: NDArray[Any], dtype: str) -> None:
    """Keys of score 0, and the values of the kind ``fading``.

    In an even dimension d, key d of each leaf has the value 2**-(d / 2 % 24). In an odd one, two keys of each leaf have
    2**-40 (1 + 2**-r) and its opposite without the 2**-r; r is 13 in odd leaves, so that the flush takes the sum at the
    cut-off, and 6 in even ones. float16, which holds no 2**-40, has zeros there.
    """
    k[:] = 0
    v[:] = 0
    tokens, dims = len(v), np.arange(v.shape[2])
    even, odd = dims[::2], dims[1::2]
    for leaf in range(-(-tokens // KEYS_PER_LEAF)):
        r = 13 if leaf % 2 else 6
        for d, key, value in (
            (even, even % KEYS_PER_LEAF, np.exp2(-(even // 2 % 24.0))),
            (odd, odd // 2 % 16, np.full(len(odd), 2.0**-40 * (1 + 2.0**-r))),
            (odd, 63 - odd // 2 % 16, np.full(len(odd), -(2.0**-40))),
        ):
            here = leaf * KEYS_PER_LEAF + key
            there = (here < tokens) & (here % _PEAK != 5)
            v[here[there], :, d[there]] = _rounded(value[there, None].astype(np.float32), dtype)


def mask_of(kind: str, rows: int, tokens: int) -> NDArray[Any]:
    """A mask of the last ``rows`` of ``tokens`` tokens, by its name; a row sees its own key.

    random: bool, of all keys, one in three hidden; tree: bool, of the last keys, one in three hidden; blind: bool, of
    the last keys, all hidden, the row's own, too; f32: added to the scores of the last keys; f16: float16, added to the
    scores of all keys, one in five hidden. A row's mask depends on its position alone.
    """
    last = kind in ("tree", "blind", "f32")
    count = min(tokens, _MASK_KEYS + rows - 1) if last else tokens
    position = np.arange(tokens - count, tokens)
    mask = np.empty((rows, count), {"f16": np.float16, "f32": np.float32}.get(kind, bool))
    for i, row in enumerate(range(tokens - rows, tokens)):
        x = values(f"mask of row {row}", (tokens,))[tokens - count :]
        outside = (position == row) | (last & (position <= row - _MASK_KEYS))
        if kind == "blind":
            mask[i] = position <= row - _MASK_KEYS
        elif mask.dtype == bool:
            mask[i] = (x > -0.4) | outside
        else:
            hidden = (x < -0.8) & (kind == "f16")
            mask[i] = np.where(outside, 0, np.where(hidden, -np.inf, 4 * x))
    return mask
