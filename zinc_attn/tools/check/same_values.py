"""Property 7: the values of a case in other storage types that hold them, too."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from ...errors import ArgumentError
from .cases import Case
from .data import Data

_TYPES: Final = ("f16", "bf16", "q8_0")


def same_values(case: Case, data: Data) -> Iterator[tuple[str, Case, Data]]:
    """Each other type that gives the same bits, in words, as a case, with the values as a cache of it takes them.

    The canonical arithmetic sees the stored numbers, which f32 holds. Matrix units are fed with float16: types count
    that hold the same numbers, all of which float16 holds, since a device may round others to either side.
    """
    held = data.stored_as(case.dtype)
    if case.arithmetic == "canonical":
        if case.dtype != "f32":
            yield "stored as f32", case._replace(dtype="f32"), held
        return
    half = held._replace(k=held.k.astype(np.float16), v=held.v.astype(np.float16))
    if not (np.array_equal(half.k, held.k) and np.array_equal(half.v, held.v)):
        return
    for dtype in _TYPES:
        if dtype != case.dtype and _holds(dtype, held):
            yield f"stored as {dtype}", case._replace(dtype=dtype), half if dtype == "f16" else held


def _holds(dtype: str, data: Data) -> bool:
    """Whether a cache of ``dtype`` gives back every value, all of which float16 holds."""
    try:
        stored = data if dtype == "f16" else data.stored_as(dtype)
    except ArgumentError:  # a value that bf16 does not hold
        return False
    return np.array_equal(stored.k, data.k) and np.array_equal(stored.v, data.v)
