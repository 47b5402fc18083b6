"""Calls that are timed in turns, and the figures that a tool takes from the times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Final, NamedTuple, TypeVar

import numpy as np

FEWEST_REPEATS: Final = 5
MOST_REPEATS: Final = 50
T = TypeVar("T")


def in_turns(calls: Sequence[Callable[[], T]], repeats: int | None, budget_s: float, warm_up: int) -> list[list[T]]:
    """What each of ``calls`` returns, the calls in turns, after ``warm_up`` rounds whose results do not count.

    ``repeats`` rounds; None: FEWEST_REPEATS to MOST_REPEATS, as many as begin within ``budget_s`` seconds.
    """
    for _ in range(warm_up):
        for call in calls:
            call()
    taken: list[list[T]] = []
    fewest, most = (FEWEST_REPEATS, MOST_REPEATS) if repeats is None else (repeats, repeats)
    begin = perf_counter()
    while len(taken) < fewest or (len(taken) < most and perf_counter() - begin < budget_s):
        taken.append([call() for call in calls])
    return [list(mine) for mine in zip(*taken, strict=True)]


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
