"""Rows that a host's recording wrote to the cache: the package sees them where a bound on their values is needed first.

``Sequence.unseen`` has, by layer, the first token from which on there may be some. It may be too low, never too high: a
fork takes it over, and whoever moves rows of a sequence to lower positions lowers it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from ..errors import ValueRangeError
from .rows import pieces, row_magnitudes

if TYPE_CHECKING:
    from .sequence import Sequence

PIECE: Final = 4 << 20  # bytes of rows that are read and examined together


def append_unseen(sequence: Sequence, layer: int) -> None:
    """Before the commit of a recording's step: nobody has seen the rows that ``layer`` gets next."""
    length = sequence.pages.length(layer)
    sequence.unseen[layer] = min(length, sequence.unseen.get(layer, length))


def examine(sequence: Sequence, layer: int) -> None:
    """Read the rows of a layer that nobody has seen, and count them in ``KVCache.largest``.

    ValueRangeError: a value is one that no append takes.
    """
    if layer not in sequence.unseen:
        return
    cache, begin, end = sequence.cache, sequence.unseen[layer], sequence.pages.length(layer)
    for part in pieces(max(end - begin, 0), 4 * cache.row_words, PIECE):
        words = cache.read_rows(sequence, layer, begin + part.start, begin + part.stop)
        largest, fits = row_magnitudes(words, cache.shape, cache.dtype, cache.scales_of(layer))
        if not fits.all():
            at = begin + part.start + int(np.argmin(fits))
            raise ValueRangeError(
                f"rows: got a value that no cache stores in token {at} of layer {layer}, which a recording "
                f"appended, expected 0 or a magnitude from 2**-40 to 2**60; truncate({at}) takes the token back"
            )
        cache.largest = cache.largest.joined(largest)
    del sequence.unseen[layer]
