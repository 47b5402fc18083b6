"""The output of attention calls, what the oracle says it must be, and how two outputs differ in their bits."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import cycle
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ... import reference
from ...cache.rows import stored
from .inputs import NUMPY_DTYPES

F32 = NDArray[np.float32]
Rows = NDArray[Any]  # K or V, as a cache takes them
Place = tuple[int, ...]
ORACLE_PRODUCTS: Final = 1 << 30  # rows * context * q_heads * head_dim up to which a tool computes every head


class Output(NamedTuple):
    """out (..., q_heads, head_dim) and lse (..., q_heads), float32."""

    out: F32
    lse: F32

    def digest(self) -> str:
        """SHA-256 of the bytes of out, then those of lse, as little-endian float32."""
        return hashlib.sha256(b"".join(np.ascontiguousarray(x, "<f4").tobytes() for x in self)).hexdigest()


def oracle(
    q: F32, k: Rows, v: Rows, dtype: str, kv_heads: int | None = None, masking: Mapping[str, Any] | None = None
) -> Output:
    """The oracle's output for the query heads of the last ``kv_heads`` KV heads (None: of all of them).

    q: (q_heads, head_dim) or (q_len, q_heads, head_dim); k, v: (tokens, kv_heads, head_dim) as a cache of ``dtype``
    takes them; masking: keyword arguments of ``reference.emulate``. The last heads are those whose buffer offsets are
    the largest.
    """
    return Output(*by_kv_head(reference.emulate, q, k, v, dtype, kv_heads, masking))


def by_kv_head(
    attend: Callable[..., Iterable[Rows]],
    q: F32,
    k: Rows,
    v: Rows,
    dtype: str,
    kv_heads: int | None,
    masking: Mapping[str, Any] | None,
) -> Iterator[Rows]:
    """What a reference gives, arrays like out and like lse by turns, made for each KV head and joined.

    Arguments as in ``oracle``. KV heads come one after the other, so that only one is held as float32.
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
        mine = {name: x[served] for name, x in by_head.items()}
        parts.append(attend(q[..., served, :], keys, values, **options | mine))
    for arrays, heads_axis in zip(zip(*parts, strict=True), cycle((-2, -1))):
        yield np.concatenate(arrays, heads_axis)


@dataclass(frozen=True)
class Difference:
    """The first element whose bits differ, and how many do."""

    array: str
    index: Place
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
    last = last_elements(got, want.shape)
    differs = np.ascontiguousarray(last).view(np.uint32) != np.ascontiguousarray(want).view(np.uint32)
    if not differs.any():
        return None
    at, index = first_place(differs, got.shape)
    return Difference(array, index, last[at], want[at], int(differs.sum()), differs.size)


def last_elements(x: F32, shape: Place) -> F32:
    """The last elements of every axis, as many as ``shape`` has."""
    return x[tuple(slice(size - wanted, None) for size, wanted in zip(x.shape, shape, strict=True))]


def first_place(wrong: NDArray[np.bool_], shape: Place) -> tuple[Place, Place]:
    """The index of the first True, and that of its element in an array of ``shape``, whose last elements these are."""
    at = tuple(int(i) for i in np.unravel_index(int(wrong.argmax()), wrong.shape))
    return at, tuple(i + size - part for i, size, part in zip(at, shape, wrong.shape, strict=True))


def compare(got: Output, want: Output) -> Difference | None:
    """``first_difference`` of out, then of lse. ``want`` may be of the last rows and heads alone."""
    return first_difference("out", got.out, want.out) or first_difference("lse", got.lse, want.lse)
