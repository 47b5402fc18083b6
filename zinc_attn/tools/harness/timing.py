"""Calls that are timed in turns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Final, TypeVar

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
