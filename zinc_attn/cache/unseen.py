"""The magnitudes of a sequence's rows, of which calls need a bound, where they must be read from the device.

Rows from a host's recording or from another shard are read when a call first needs a bound. All rows are read again
where the bound refuses a call but may come from rows that the sequence gave up or never had. ``SequencePages.unseen``
has, by layer, the first token that may be unread, never too high: a fork takes it over, a move of rows may lower it.
"""

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
    """Note, before a call's commit, that the magnitudes of ``layer``'s rows from token ``begin`` on are unknown."""
    pages.unseen[layer] = min(begin, pages.unseen.get(layer, begin))


def move_unseen(pages: SequencePages, begin: int) -> None:
    """``append_unseen`` for a call that moves rows of every layer to tokens from ``begin`` on."""
    for layer in pages.unseen:
        append_unseen(pages, layer, begin)


def examine(cache: ResidentRows, pages: SequencePages, layer: int) -> None:
    """Read the unseen rows of a layer, and count them in the sequence's magnitudes.

    ValueRangeError: a value is one that no append takes.
    """
    if layer not in pages.unseen:
        return
    state = pages.state
    top = state.largest
    for begin, largest, fits in _magnitudes(cache, pages, layer, pages.unseen[layer], state.lengths[layer]):
        if not fits.all():
            token = begin + int(np.argmin(fits))
            raise ValueRangeError(
                f"rows: got a value that no cache stores in token {token} of layer {layer}, which a recording "
                f"appended, expected 0 or a magnitude from 2**-40 to 2**60; truncate({token}) takes the token back"
            )
        top = top.maximum(largest)
    pages.note(top, state.given_up)
    del pages.unseen[layer]


def within(cache: ResidentRows, sequences: Iterable[SequencePages], check: Callable[[Largest], None]) -> None:
    """``check`` the largest magnitudes of the rows of ``sequences``, which ``examine`` has seen.

    If ``check`` refuses and the magnitudes may come from rows that are gone, the present rows decide.
    """
    try:
        return check(_largest(sequences))
    except ValueRangeError:
        stale = [pages for pages in sequences if pages.state.given_up]
        if not stale:
            raise
    for pages in stale:
        top = NO_ROWS
        for layer, length in enumerate(pages.lengths):
            end = min(length, pages.unseen.get(layer, length))
            for _, largest, _ in _magnitudes(cache, pages, layer, 0, end):
                top = top.maximum(largest)
        pages.note(top, False)
    return check(_largest(sequences))


def _largest(sequences: Iterable[SequencePages]) -> Largest:
    top = NO_ROWS
    for pages in sequences:
        top = pages.state.largest.maximum(top)
    return top


def _magnitudes(
    cache: ResidentRows, pages: SequencePages, layer: int, begin: int, end: int
) -> Iterator[tuple[int, Largest, NDArray[np.bool_]]]:
    """(first row, ``row_magnitudes``) of pieces of a layer's rows [begin, end)."""
    for part in pieces(max(end - begin, 0), 4 * cache.row_words, PIECE):
        words = cache.read_pages(pages, layer, begin + part.start, begin + part.stop)
        yield begin + part.start, *row_magnitudes(words, cache.shape, cache.dtype, cache.scales_of(layer))
