"""ROPE: the table of a kind of layer, in plain double arithmetic without libm, and the operation in NumPy.

Pair k of dimensions turns by position * (its fraction of a turn). The fraction has 64 bits, so that the phase is exact
for every position. native/graph/rope_table.cpp makes the same words; shaders/graph/rope.comp turns the pairs.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from ..canonical.state import flush
from .elementwise import encoded, widened
from .floats import cos_sin_of_turns, quietly

Mode = Literal["normal", "neox", "mrope", "imrope", "vision"]
LN2: Final = 0.6931471805599453
INVERSE_TURN: Final = 0.15915494309189535  # 1 / (2 pi)
SQRT_HALF: Final = 0.7071067811865476


def log2(x: float) -> float:
    """For x > 0: 2 atanh((m - 1) / (m + 1)) / ln 2 and the exponent; each operation rounded, as in C++."""
    m, exponent = math.frexp(x)
    if m < SQRT_HALF:
        m, exponent = m * 2.0, exponent - 1
    t = (m - 1.0) / (m + 1.0)
    square, total = t * t, 0.0
    for odd in range(23, 0, -2):
        total = total * square + 1.0 / odd
    return exponent + 2.0 * t * total / LN2


def exp2(x: float) -> float:
    """2**x by Taylor's series on half a unit around an integer."""
    whole = math.floor(x + 0.5)
    z, total = (x - whole) * LN2, 1.0
    for n in range(15, 0, -1):
        total = 1.0 + total * z / n
    return math.ldexp(total, int(whole))


@dataclass(frozen=True)
class Rope:
    """ggml's parameters of ROPE; factors: of frequencies, one a pair; backward: ROPE_BACK."""

    n_dims: int
    mode: Mode = "normal"
    freq_base: float = 10000.0
    freq_scale: float = 1.0
    ext_factor: float = 0.0
    attn_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    n_ctx_orig: int = 0
    sections: tuple[int, int, int, int] = (0, 0, 0, 0)
    backward: bool = False

    @property
    def pairs(self) -> int:
        return self.n_dims if self.mode == "vision" else self.n_dims // 2

    @property
    def step(self) -> int:
        """Elements from a pair's first to its second."""
        return 1 if self.mode == "normal" else self.pairs

    def _section(self, pair: int) -> tuple[int, int]:
        """(which of a token's positions turns a pair, the power of the pair's frequency)."""
        if self.mode in ("normal", "neox"):
            return 0, pair
        s0, s1, s2, s3 = self.sections
        sector, begins = pair % (s0 + s1 + s2 + s3), (0, s0, s0 + s1, s0 + s1 + s2)
        if self.mode == "imrope":
            which = sector % 3
            return which if sector < 3 * self.sections[which] else 3, pair
        which = sum(sector >= begin for begin in begins[1:])
        return which, sector - begins[which] if self.mode == "vision" else pair

    def _corrected(self, rotations: float) -> float:
        """YaRN: the pair that turns so many times in the original context."""
        return self.n_dims * log2(self.n_ctx_orig / rotations * INVERSE_TURN) / (2.0 * log2(self.freq_base))

    def _mixes(self) -> list[float]:
        """YaRN: how much of each pair's frequency is not scaled."""
        if self.ext_factor == 0.0:
            return [0.0] * self.pairs
        low, high = 0.0, 0.0
        if self.n_ctx_orig > 0:
            low = max(0.0, math.floor(self._corrected(self.beta_fast)))
            high = min(self.n_dims - 1.0, math.ceil(self._corrected(self.beta_slow)))
        width = max(0.001, high - low)
        return [(1.0 - min(1.0, max(0.0, (pair - low) / width))) * self.ext_factor for pair in range(self.pairs)]

    def table(self, factors: Sequence[float] | None = None) -> NDArray[np.uint32]:
        """(pairs, 4) words: the fraction of a turn, low word first; which position; the factor as float32."""
        scale = self.attn_factor
        if self.ext_factor != 0.0:
            scale *= 1.0 - 0.1 * (log2(self.freq_scale) * LN2)
        words = np.zeros((self.pairs, 4), np.uint32)
        base, mixes = log2(self.freq_base), self._mixes()
        for pair in range(self.pairs):
            which, power = self._section(pair)
            frequency = exp2(-2.0 * power / self.n_dims * base) / (float(factors[pair]) if factors is not None else 1.0)
            turns = frequency * (self.freq_scale * (1.0 - mixes[pair]) + mixes[pair]) * INVERSE_TURN
            fraction = int((turns - math.floor(turns)) * 2.0**64)
            fraction = -fraction % 2**64 if self.backward else fraction
            words[pair, :3] = fraction & 0xFFFFFFFF, fraction >> 32, which
        words[:, 3] = np.float32(scale).view(np.uint32)
        return words


@quietly
def rope(x: NDArray[Any], positions: NDArray[np.int32], table: NDArray[np.uint32], step: int, first: int = 0) -> Any:
    """x (batch, tokens, heads, n), float32 or float16, turned; positions: (1 or 4, tokens); table: of ``Rope``."""
    kind, pairs = "f32" if x.dtype == np.float32 else "f16", len(table)
    fraction = table[:, 0].astype(np.uint64) | table[:, 1].astype(np.uint64) << np.uint64(32)
    position = positions[table[:, 2]].astype(np.int64).view(np.uint64)  # (pairs, tokens)
    cos, sin = cos_sin_of_turns(position.T * fraction)
    cos, sin = ((part * table[:, 3].view(np.float32))[:, None, :] for part in (cos, sin))
    index = first + np.arange(pairs) * (2 if step == 1 else 1)
    numbers = flush(widened(x, kind))
    x0, x1 = numbers[..., index], numbers[..., index + step]
    y: NDArray[Any] = x.copy()
    y[..., index] = encoded(flush(x0 * cos - x1 * sin), kind)
    y[..., index + step] = encoded(flush(x0 * sin + x1 * cos), kind)
    return y
