"""Rows that a host's recording wrote to the cache: the package sees them where a bound on their values is needed first.

``SequencePages.unseen`` has, by layer, the first token from which on there may be some. It may be too low, never too
high: a fork takes it over, and whoever moves rows of a sequence to lower positions lowers it.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from ..errors import ValueRangeError
from .resident import ResidentRows
from .rows import pieces, row_magnitudes
from .sequence_pages import SequencePages

PIECE: Final = 4 << 20  # bytes of rows that are read and examined together


def append_unseen(pages: SequencePages, layer: int) -> None:
    """Before the commit of a recording's step: nobody has seen the rows that ``layer`` gets next."""
    length = pages.length(layer)
    pages.unseen[layer] = min(length, pages.unseen.get(layer, length))


def examine(cache: ResidentRows, pages: SequencePages, layer: int) -> None:
    """Read the rows of a layer that nobody has seen, and count them in ``KVCache.largest``.

    ValueRangeError: a value is one that no append takes.
    """
    if layer not in pages.unseen:
        return
    begin, end = pages.unseen[layer], pages.length(layer)
    for part in pieces(max(end - begin, 0), 4 * cache.row_words, PIECE):
        words = cache.read_pages(pages, layer, begin + part.start, begin + part.stop)
        largest, fits = row_magnitudes(words, cache.shape, cache.dtype, cache.scales_of(layer))
        if not fits.all():
            at = begin + part.start + int(np.argmin(fits))
            raise ValueRangeError(
                f"rows: got a value that no cache stores in token {at} of layer {layer}, which a recording "
                f"appended, expected 0 or a magnitude from 2**-40 to 2**60; truncate({at}) takes the token back"
            )
        cache.largest = cache.largest.joined(largest)
    del pages.unseen[layer]
