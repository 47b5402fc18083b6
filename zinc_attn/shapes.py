"""Heads and head dimension of attention layers, and the sizes of their rows by storage type."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from .checks import check_bool, check_int, parse_digits, shown
from .dtypes import storage_dtype
from .errors import ArgumentError
from .limits import K_DIMS, MAX_HEAD_DIM, MAX_HEADS_PER_WORKGROUP, MAX_Q_HEADS, V_DIMS, WAVE
from .storage import storage_types


@dataclass(frozen=True)
class AttnShape:
    """Heads and head dimensions of one attention layer.

    q_heads: query heads; kv_heads: key/value heads, a divisor of q_heads; head_dim: of q and K; v_head_dim: of V and
    the output, None for head_dim; both 1 to MAX_HEAD_DIM. latent: V is the first v_head_dim dimensions of K, and is
    stored and read once (multi-head latent attention in its absorbed form: DeepSeek-V2, 2024).
    Query head ``h`` reads KV head ``h // group``.
    """

    q_heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int = None  # type: ignore[assignment]  # an int from __post_init__ on
    latent: bool = False

    def __post_init__(self) -> None:
        if self.v_head_dim is None:
            object.__setattr__(self, "v_head_dim", self.head_dim)
        bounds = {"q_heads": MAX_Q_HEADS, "kv_heads": None, "head_dim": MAX_HEAD_DIM, "v_head_dim": MAX_HEAD_DIM}
        for name, most in bounds.items():
            object.__setattr__(self, name, check_int(f"AttnShape.{name}", getattr(self, name), 1, most))
        object.__setattr__(self, "latent", check_bool("AttnShape.latent", self.latent))
        if self.q_heads % self.kv_heads:
            raise ArgumentError(
                f"q_heads: got {shown(self.q_heads)}, expected a multiple of kv_heads = {shown(self.kv_heads)}"
            )
        if self.latent and self.v_head_dim > self.head_dim:
            raise ArgumentError(
                f"v_head_dim: got {self.v_head_dim}, expected at most head_dim = {self.head_dim}, since a latent "
                "shape's V is the begin of its K"
            )

    @cached_property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.q_heads // self.kv_heads

    @cached_property
    def k_dim(self) -> int:
        """head_dim as devices hold it: q and K are filled up with zeros, which changes no sum."""
        whole = _filled(self.head_dim, K_DIMS)
        return max(whole, _filled(self.v_dim, K_DIMS)) if self.latent else whole

    @cached_property
    def v_dim(self) -> int:
        """v_head_dim as devices hold it: whole slices of a lane."""
        return _filled(self.v_head_dim, max(self.value_slice, V_DIMS))

    @cached_property
    def value_slice(self) -> int:
        """Dimensions of V per lane if one pass covers V: the least power of two, 2 or more, with which a wave does."""
        return max(2, 1 << (-(-self.v_head_dim // WAVE) - 1).bit_length())

    @cached_property
    def head_chunks(self) -> int:
        """Workgroups (grid z) that share one KV head."""
        return -(-self.group // MAX_HEADS_PER_WORKGROUP)

    @cached_property
    def heads_per_workgroup(self) -> int:
        """Query heads that one workgroup serves; the last chunk of a group may have fewer."""
        return -(-self.group // self.head_chunks)

    def kv_bytes_per_token(self, dtype: object = "f16") -> int:
        """Bytes of K and V of one token in one layer. dtype: see ``storage_dtype``."""
        return 4 * self.kv_heads * row_format(self, storage_dtype(dtype)).words

    def to_dict(self) -> dict[str, Any]:
        """A JSON-serializable form; v_head_dim and latent only where they say something."""
        form: dict[str, Any] = {"q_heads": self.q_heads, "kv_heads": self.kv_heads, "head_dim": self.head_dim}
        if self.v_head_dim != self.head_dim or self.latent:
            form |= {"v_head_dim": self.v_head_dim, "latent": self.latent}
        return form

    def __str__(self) -> str:
        text = f"{self.q_heads}/{self.kv_heads}/{self.head_dim}"
        if self.v_head_dim != self.head_dim or self.latent:
            text += f"/{self.v_head_dim}"
        return f"{text}/latent" if self.latent else text

    @classmethod
    def parse(cls, text: str) -> AttnShape:
        """``"16/2/256"`` to AttnShape(16, 2, 256); ``"32/8/192/128"`` and ``"20/1/576/512/latent"`` have V's size."""
        parts = text.split("/") if isinstance(text, str) else []
        latent = len(parts) == 5 and parts[4] == "latent"
        numbers = [parse_digits(part) for part in (parts[:4] if latent else parts)]
        known = [number for number in numbers if number is not None]
        if len(numbers) not in (3, 4) or len(known) != len(numbers):
            raise ArgumentError(
                f"shape: got {shown(text)}, expected q_heads/kv_heads/head_dim, for example 16/2/256, with V's size "
                "where it differs, 32/8/192/128, and the word latent where V is the begin of K, 20/1/576/512/latent"
            )
        q_heads, kv_heads, *dims = known
        return cls(q_heads, kv_heads, dims[0], dims[-1], latent)


def _filled(size: int, to: int) -> int:
    return -(-size // to) * to


def filled_up(x: NDArray[Any], dims: int) -> NDArray[np.float32]:
    """``x`` as contiguous float32 whose last axis is filled up by zeros to ``dims``."""
    if x.shape[-1] == dims:
        return np.ascontiguousarray(x, np.float32)
    whole = np.zeros((*x.shape[:-1], dims), np.float32)
    whole[..., : x.shape[-1]] = x
    return whole


@dataclass(frozen=True)
class RowFormat:
    """Words of one token's K and V of one KV head; a row is K values, V values, K scales, V scales, in this order.

    k_values, v_values: words of the values; k_scales, v_scales: words of block scales, minima and fifth bits (see
    ``StorageType.scale_words``). A latent shape has no words of V.
    """

    k_values: int
    v_values: int
    k_scales: int
    v_scales: int

    @cached_property
    def spans(self) -> list[tuple[int, int]]:
        """(begin, end) of each of the four parts in a row."""
        return list(pairwise(accumulate((0, self.k_values, self.v_values, self.k_scales, self.v_scales))))

    @property
    def k_words(self) -> int:
        """Words of K, scales included."""
        return self.k_values + self.k_scales

    @property
    def v_words(self) -> int:
        """Words of V, scales included."""
        return self.v_values + self.v_scales

    @property
    def words(self) -> int:
        """Words of K and V, scales included."""
        return self.k_words + self.v_words


Strides = tuple[int, int]  # bytes from a row to the next, of K and of V, where they lie as rows
KV_LAYOUTS: Final = ("tiles", "NHD")
TILES: Final[Strides] = 0, 0  # the strides that stand for tiles


def check_kv_layout(kv_layout: Any) -> str:
    """``kv_layout`` if it names a layout, else ArgumentError."""
    if not isinstance(kv_layout, str) or kv_layout not in KV_LAYOUTS:
        raise ArgumentError(f"kv_layout: got {shown(kv_layout)}, expected {' or '.join(map(repr, KV_LAYOUTS))}")
    return kv_layout


def row_strides(shape: AttnShape, dtype: str) -> Strides:
    """The strides of contiguous rows, in whole pairs of bytes; a latent shape's V lies in K's rows."""
    k, v = storage_types(dtype)
    sides = (k, shape.head_dim), (v, shape.v_head_dim)
    k_bytes, v_bytes = (-(-kind.row_bytes(dims) // 2) * 2 for kind, dims in sides)
    return k_bytes, k_bytes if shape.latent else v_bytes


def strided_format(strides: Strides, latent: bool) -> RowFormat:
    """A row of a row tensor whose K and V have these strides: the bytes of K and of V, each filled up to words."""
    k, v = (-(-stride // 4) for stride in strides)
    return RowFormat(k, 0 if latent else v, 0, 0)


def tile_words(tile: int, words: int) -> int:
    """Words of a tile of ``tile`` rows of K or V of ``words`` words each: whole pieces of 16 bytes, the widest load."""
    return -(-tile * words // 4) * 4


@lru_cache(maxsize=256)
def row_format(shape: AttnShape, dtype: str) -> RowFormat:
    """The words of a token's row. dtype: a name of ``storage_dtype``. ArgumentError: the type stores no such shape."""
    k, v = storage_types(dtype)
    if shape.latent and k != v:
        raise ArgumentError(
            f"dtype: got {dtype} for the latent shape {shape}, expected one type, since its V is part of its K"
        )
    v_dim = 0 if shape.latent else shape.v_dim
    return RowFormat(k.value_words(shape.k_dim), v.value_words(v_dim), k.scale_words(shape.k_dim), v.scale_words(v_dim))
