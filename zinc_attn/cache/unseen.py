"""The magnitudes of a sequence's rows, of which calls need a bound: where it must be read from the device.

Rows that a host's recording wrote, or that came from another shard, are read where a bound is needed first. Rows that
are there are read anew where the bound may be that of rows which the sequence has given up, or never had, and would
have a call refused.
``SequencePages.unseen`` has, by layer, the first token from which on there may be some. It may be too low, never too
high: a fork takes it over, and whoever moves rows of a sequence to lower positions lowers it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ..errors import ValueRangeError
from .resident import ResidentRows
from .rows import NO_ROWS, Largest, pieces, row_magnitudes
from .sequence_pages import SequencePages

PIECE: Final = 4 << 20  # bytes of rows that are read and examined together


def append_unseen(pages: SequencePages, layer: int, begin: int) -> None:
    """Before the commit of a call: nobody has seen the rows that ``layer`` gets from token ``begin`` on."""
    pages.unseen[layer] = min(begin, pages.unseen.get(layer, begin))


def move_unseen(pages: SequencePages, begin: int) -> None:
    """Before the commit of a call that moves rows of every layer to token ``begin`` and behind."""
    for layer in pages.unseen:
        append_unseen(pages, layer, begin)


def examine(cache: ResidentRows, pages: SequencePages, layer: int) -> None:
    """Read the rows of a layer that nobody has seen, and count them in the sequence's magnitudes.

    ValueRangeError: a value is one that no append takes.
    """
    if layer not in pages.unseen:
        return
    state = pages.state
    found = state.largest
    for begin, largest, fits in _read(cache, pages, layer, pages.unseen[layer], state.lengths[layer]):
        if not fits.all():
            at = begin + int(np.argmin(fits))
            raise ValueRangeError(
                f"rows: got a value that no cache stores in token {at} of layer {layer}, which a recording "
                f"appended, expected 0 or a magnitude from 2**-40 to 2**60; truncate({at}) takes the token back"
            )
        found = found.joined(largest)
    pages.note(found, state.given_up)
    del pages.unseen[layer]


def within(cache: ResidentRows, sequences: Iterable[SequencePages], check: Callable[[Largest], None]) -> None:
    """``check`` the largest magnitudes of the rows of ``sequences``, which ``examine`` has seen.

    Where it refuses those of rows that are gone, those of the rows that are there decide.
    """
    try:
        return check(_joined(sequences))
    except ValueRangeError:
        stale = [one for one in sequences if one.state.given_up]
        if not stale:
            raise
    for one in stale:
        found = NO_ROWS
        for layer, length in enumerate(one.lengths):
            for _, largest, _ in _read(cache, one, layer, 0, min(length, one.unseen.get(layer, length))):
                found = found.joined(largest)
        one.note(found, False)
    return check(_joined(sequences))


def _joined(sequences: Iterable[SequencePages]) -> Largest:
    found = NO_ROWS
    for one in sequences:
        found = one.state.largest.joined(found)
    return found


def _read(
    cache: ResidentRows, pages: SequencePages, layer: int, begin: int, end: int
) -> Iterator[tuple[int, Largest, NDArray[np.bool_]]]:
    """Of pieces of a layer's rows [begin, end): the first row, and what ``row_magnitudes`` says."""
    for part in pieces(max(end - begin, 0), 4 * cache.row_words, PIECE):
        words = cache.read_pages(pages, layer, begin + part.start, begin + part.stop)
        yield begin + part.start, *row_magnitudes(words, cache.shape, cache.dtype, cache.scales_of(layer))
