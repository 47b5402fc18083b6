"""The one bound of scores: MAX_SCORE, for every product that a score is made of, and for the sum of these products.

In log2 units a score is dot * scale * log2(e), perhaps capped, plus slope * term of biases, plus mask * slope of masks.
Below the bound none of these overflows float32, and no score of a key comes near EMPTY_M, the score of an absent key.
The check takes all factors together, since each of them alone may be large.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ValueRangeError
from .constants import LOG2E, MAX_SCORE

LOG2E_MOST = 1.5  # log2(e), with room for roundings


def largest(x: NDArray[Any] | None, default: float = 0.0) -> float:
    """The largest magnitude of an array, 0 for an empty array, ``default`` for None."""
    if x is None:
        return default
    return max(-float(x.min()), float(x.max())) if x.size else 0.0


@dataclass(frozen=True, slots=True)
class ScoreBound:
    """The options that bound the scores of all heads: |scale|, the cap, and the largest slopes in log2 units.

    slope: the sum over all biases; mask_slope: log2(e) where masks have no slopes.
    """

    scale: float
    softcap: float | None
    slope: float
    mask_slope: float

    @classmethod
    def of(
        cls,
        scale: float,
        softcap: float | None,
        biases: Mapping[str, NDArray[np.float32]],
        mask_slopes: NDArray[np.float32] | None,
    ) -> ScoreBound:
        """From a scoring's options; biases, mask_slopes: (q_heads,) in log2 units."""
        return cls(scale, softcap, sum(map(largest, biases.values())), largest(mask_slopes, LOG2E))

    def check(self, q: float, k: float, head_dim: int, tokens: int, mask: float) -> None:
        """ValueRangeError where a score may be beyond the bound.

        q, k, mask: the largest finite magnitudes; tokens: keys or query rows, the larger number.
        """
        dot, scale = q * k * head_dim, abs(self.scale)
        score = dot * max(1.0, LOG2E_MOST * scale, 0.0 if self.softcap is None else scale / self.softcap)
        distance, bias = self.slope * tokens, self.mask_slope * mask
        if score + distance + bias <= MAX_SCORE:
            return
        if bias >= max(score, distance):
            raise ValueRangeError(
                f"mask, mask_slopes: got magnitudes of up to {mask:g} and {self.mask_slope / LOG2E:g}, expected a "
                "product times log2(e) of at most 2**96, with what is added to it"
            )
        cap, over = "", ""
        if self.softcap is not None:
            cap, over = f", softcap = {self.softcap:g}", ", over the softcap where that is less than 1,"
        added = f", {distance + bias:g} of biases and masks included" if distance + bias else ""
        raise ValueRangeError(
            f"q, k: got max|q| = {q:g}, max|k| = {k:g}, scale = {self.scale:g}{cap} at head_dim {head_dim}; expected "
            f"max|q| * max|k| * head_dim * scale{over} of at most 2**96{added}"
        )
