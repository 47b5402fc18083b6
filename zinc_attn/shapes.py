"""Heads and head dimension of attention layers, and the sizes of their rows by storage type."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from .checks import check_int, parse_digits, shown
from .errors import ArgumentError
from .limits import DTYPE_BYTES, HEAD_DIMS, MAX_ACCUMULATORS, MAX_GROUP, MAX_HEADS_PER_WORKGROUP, Q8_BLOCK

_ALIASES: Final = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}  # the names of NumPy and torch


@dataclass(frozen=True)
class AttnShape:
    """Heads and head dimension of one attention layer.

    q_heads: query heads; kv_heads: key/value heads, a divisor of q_heads; head_dim: one of HEAD_DIMS.
    Query head ``h`` reads KV head ``h // group``.
    """

    q_heads: int
    kv_heads: int
    head_dim: int

    def __post_init__(self) -> None:
        for name in ("q_heads", "kv_heads", "head_dim"):
            object.__setattr__(self, name, check_int(f"AttnShape.{name}", getattr(self, name), 1))
        if self.head_dim not in HEAD_DIMS:
            there = ", ".join(map(str, HEAD_DIMS))
            raise ArgumentError(f"head_dim: got {shown(self.head_dim)}, expected one of {there}")
        if self.q_heads % self.kv_heads:
            raise ArgumentError(
                f"q_heads: got {shown(self.q_heads)}, expected a multiple of kv_heads = {shown(self.kv_heads)}"
            )
        if self.group > MAX_GROUP:
            raise ArgumentError(
                f"q_heads / kv_heads: got {shown(self.q_heads)}/{self.kv_heads} = {shown(self.group)}, expected at "
                f"most {MAX_GROUP}"
            )

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.q_heads // self.kv_heads

    @property
    def head_chunks(self) -> int:
        """Workgroups (grid z) that share one KV head, so that the accumulators fit the registers."""
        most = min(MAX_HEADS_PER_WORKGROUP, MAX_ACCUMULATORS // self.head_dim)
        return -(-self.group // most)

    @property
    def heads_per_workgroup(self) -> int:
        """Query heads that one workgroup serves; the last chunk of a group may have fewer."""
        return -(-self.group // self.head_chunks)

    def kv_bytes_per_token(self, dtype: object = "f16") -> int:
        """Bytes of K and V of one token in one layer. dtype: see ``storage_dtype``."""
        dtype = storage_dtype(dtype)
        return 2 * self.kv_heads * 4 * (value_words(self.head_dim, dtype) + scale_words(self.head_dim, dtype))

    def __str__(self) -> str:
        return f"{self.q_heads}/{self.kv_heads}/{self.head_dim}"

    @classmethod
    def parse(cls, text: str) -> AttnShape:
        """``"16/2/256"`` to AttnShape(q_heads=16, kv_heads=2, head_dim=256)."""
        numbers = [parse_digits(part) for part in text.split("/")] if isinstance(text, str) else []
        found = [number for number in numbers if number is not None]
        if len(numbers) != 3 or len(found) != 3:
            raise ArgumentError(f"shape: got {shown(text)}, expected q_heads/kv_heads/head_dim, for example 16/2/256")
        return cls(*found)


def storage_dtype(dtype: object) -> str:
    """The name of a storage dtype of K and V: one of DTYPE_BYTES.

    dtype: that name, the name or the dtype that NumPy, ml_dtypes or torch has for it ("float16", np.float16,
    torch.bfloat16). ArgumentError: anything else.
    """
    if isinstance(dtype, str) and dtype in DTYPE_BYTES:
        return dtype  # nearly always
    name = dtype
    if isinstance(dtype, np.dtype):
        name = dtype.name
    elif isinstance(dtype, type) and issubclass(dtype, np.generic):
        name = np.dtype(dtype).name
    elif type(dtype).__module__ == "torch" and type(dtype).__name__ == "dtype":
        name = str(dtype).removeprefix("torch.")
    if isinstance(name, str):
        name = _ALIASES.get(name, name)
        if name in DTYPE_BYTES:
            return name
    raise ArgumentError(f"dtype: got {shown(dtype)}, expected one of {', '.join(DTYPE_BYTES)}")


def dtype_bytes(dtype: object) -> int:
    """Bytes per stored K or V element. dtype: see ``storage_dtype``."""
    return DTYPE_BYTES[storage_dtype(dtype)]


def value_words(head_dim: int, dtype: str) -> int:
    """uint32 words of one token's K (or V) values of one KV head."""
    size = dtype_bytes(dtype)
    if dtype == "q8_0" and head_dim % Q8_BLOCK:
        raise ArgumentError(f"dtype: got q8_0 at head_dim {head_dim}, expected a head_dim that is a multiple of 32")
    return head_dim * size // 4


def scale_words(head_dim: int, dtype: str) -> int:
    """uint32 words of one token's q8_0 scales of one KV head: float16, two a word, the last word filled up."""
    return -(-head_dim // (2 * Q8_BLOCK)) if dtype == "q8_0" else 0


# --- arguments ----------------------------------------------------------------------------------------------
