"""The output of attention calls, what the oracle says it must be, and how two outputs differ in their bits."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ... import reference
from ...cache.rows import stored
from .inputs import NUMPY_DTYPES

F32 = NDArray[np.float32]
ORACLE_PRODUCTS: Final = 1 << 30  # rows * context * q_heads * head_dim up to which a tool computes every head


class Output(NamedTuple):
    """out (..., q_heads, head_dim) and lse (..., q_heads), float32."""

    out: F32
    lse: F32

    def digest(self) -> str:
        """SHA-256 of the bytes of out, then those of lse, as little-endian float32."""
        return hashlib.sha256(b"".join(np.ascontiguousarray(x, "<f4").tobytes() for x in self)).hexdigest()


def oracle(
    q: F32,
    k: NDArray[Any],
    v: NDArray[Any],
    dtype: str,
    kv_heads: int | None = None,
    masking: Mapping[str, Any] | None = None,
) -> Output:
    """The oracle's output for the query heads of the last ``kv_heads`` KV heads (None: of all of them).

    q: (q_heads, head_dim) or (q_len, q_heads, head_dim); k, v: (tokens, kv_heads, head_dim) as a cache of ``dtype``
    takes them; masking: keyword arguments of ``reference.emulate``. The last heads are those whose buffer offsets are
    the largest. KV heads are computed one after the other, so that only one is held as float32.
    """
    held = k.shape[1]
    group, options = q.shape[-2] // held, dict(masking or {})
    by_head = {name: options[name] for name in ("sinks", "alibi") if options.get(name) is not None}
    parts = []
    for head in range(held - (held if kv_heads is None else kv_heads), held):
        served = slice(head * group, (head + 1) * group)
        keys, values = k[:, head : head + 1], v[:, head : head + 1]
        if dtype not in NUMPY_DTYPES:
            keys, values = stored(keys, values, dtype)
        options |= {name: x[served] for name, x in by_head.items()}
        parts.append(reference.emulate(q[..., served, :], keys, values, **options))
    out, lse = zip(*parts, strict=True)
    return Output(np.concatenate(out, axis=-2), np.concatenate(lse, axis=-1))


@dataclass(frozen=True)
class Difference:
    """The first element whose bits differ, and how many do."""

    array: str
    index: tuple[int, ...]
    got: np.float32
    expected: np.float32
    count: int
    size: int

    @property
    def ulp(self) -> int | None:
        """How many float32 numbers the two values lie apart; None where one of them is not a number."""
        if np.isnan(self.got) or np.isnan(self.expected):
            return None
        places = (int(x.view(np.uint32)) for x in (self.got, self.expected))
        got, expected = (int(x & 0x7FFFFFFF) * (-1 if x >> 31 else 1) for x in places)
        return abs(got - expected)

    def text(self, ulp: bool = False) -> str:
        """The element with both values and their bits; with ``ulp`` also the distance between them."""
        got, expected = (f"{x:.9g} (0x{int(x.view(np.uint32)):08x})" for x in (self.got, self.expected))
        distance = "" if not ulp else ", not a number" if self.ulp is None else f", {self.ulp:,} ulp apart"
        place = ", ".join(map(str, self.index))
        return (
            f"{self.array}[{place}]: got {got}, expected {expected}{distance}; "
            f"{self.count:,} of {self.size:,} elements differ"
        )


def first_difference(array: str, got: F32, want: F32) -> Difference | None:
    """The first element of ``got`` whose bits are not those of ``want``, None where all are equal.

    ``want`` may be smaller: it is compared with the last elements of every axis. The index counts in ``got``.
    """
    first = tuple(size - wanted for size, wanted in zip(got.shape, want.shape, strict=True))
    got = got[tuple(slice(begin, None) for begin in first)]
    differs = np.ascontiguousarray(got).view(np.uint32) != np.ascontiguousarray(want).view(np.uint32)
    if not differs.any():
        return None
    at = np.unravel_index(int(differs.argmax()), differs.shape)
    index = tuple(int(i) + begin for i, begin in zip(at, first, strict=True))
    return Difference(array, index, got[at], want[at], int(differs.sum()), differs.size)


def compare(got: Output, want: Output) -> Difference | None:
    """``first_difference`` of out, then of lse. ``want`` may be of the last rows and heads alone."""
    return first_difference("out", got.out, want.out) or first_difference("lse", got.lse, want.lse)
