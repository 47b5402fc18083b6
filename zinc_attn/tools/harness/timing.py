"""How often a tool times something, and the figures that it takes from the times."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
from time import perf_counter
from typing import Final, NamedTuple

import numpy as np

FEWEST_REPEATS: Final = 5
MOST_REPEATS: Final = 50


def rounds(repeats: int | None, budget_s: float) -> Iterator[int]:
    """Numbers of rounds: ``repeats`` of them, or FEWEST_REPEATS to MOST_REPEATS, as fit into ``budget_s`` seconds."""
    begin = perf_counter()
    for done in count():
        if done >= (FEWEST_REPEATS if repeats is None else repeats) and (
            repeats is not None or done >= MOST_REPEATS or perf_counter() - begin >= budget_s
        ):
            return
        yield done


class Spread(NamedTuple):
    """Quartiles and extremes of some times, in microseconds."""

    low: float
    q1: float
    median: float
    q3: float
    high: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Spread:
        """The spread of times in seconds."""
        return cls(*(1e6 * float(x) for x in np.percentile(seconds, (0, 25, 50, 75, 100))))
