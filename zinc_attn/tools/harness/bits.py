"""The output of attention calls, and how two of them differ in their bits. There is no tolerance anywhere."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from itertools import zip_longest
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]


class Output(NamedTuple):
    """out (..., q_heads, head_dim) and lse (..., q_heads), float32."""

    out: F32
    lse: F32

    def digest(self) -> str:
        """SHA-256 of the bytes of out, then those of lse, as little-endian float32."""
        return hashlib.sha256(b"".join(np.ascontiguousarray(x, "<f4").tobytes() for x in self)).hexdigest()


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


def first_difference(array: str, got: F32, want: F32, first: tuple[int, ...] = ()) -> Difference | None:
    """The first element whose bits differ, None where all are equal. The leading axes count from ``first``."""
    differs = np.ascontiguousarray(got).view(np.uint32) != np.ascontiguousarray(want).view(np.uint32)
    if not differs.any():
        return None
    at = np.unravel_index(int(differs.argmax()), differs.shape)
    index = tuple(int(i) + origin for i, origin in zip_longest(at, first[: len(at)], fillvalue=0))
    return Difference(array, index, got[at], want[at], int(differs.sum()), differs.size)


def compare(got: tuple[F32, F32], want: tuple[F32, F32], first: tuple[int, ...] = ()) -> Difference | None:
    """``first_difference`` of two pairs of out and lse, out before lse."""
    pairs = zip(Output._fields, got, want, strict=True)
    return next(filter(None, (first_difference(*pair, first) for pair in pairs)), None)
