"""Shared parts of the tools' tables: rows in groups, figures of four digits, and a dash for a missing number."""

from collections.abc import Hashable, Iterable
from typing import Final, TypeVar

MISSING: Final = "–"  # in place of a missing number
K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


def figure(x: float | None) -> str:
    """Four significant digits; all digits of 1,000 and more."""
    if x is None:
        return MISSING
    return f"{x:,.0f}" if abs(x) >= 1000 else f"{x:.4g}"


def grouped(pairs: Iterable[tuple[K, T]]) -> dict[K, list[T]]:
    """The values of each key; keys and values in the order of ``pairs``."""
    groups: dict[K, list[T]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups
