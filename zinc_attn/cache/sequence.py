"""A token sequence of a KVCache."""

from __future__ import annotations

import itertools
import os
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ..checks import check_int, described
from .files import save
from .sequence_pages import SequencePages
from .transaction import Reservation

if TYPE_CHECKING:
    from .kv_cache import KVCache

_serials = itertools.count()
_stamps = itertools.count()


def sequence_text(serial: int, pages: SequencePages) -> str:
    """What the repr of a sequence says: its number, and its tokens, least and most of a layer within a step."""
    least, most = min(pages.lengths), max(pages.lengths)
    tokens = f"{least:,}" if least == most else f"{least:,} to {most:,}"
    return f"serial={serial}, {tokens} tokens{', freed' * pages.closed}"


class Sequence:
    """One token sequence of a KVCache, from ``new_sequence``. ``len`` counts the tokens that all layers have."""

    def __init__(self, cache: KVCache, pages: SequencePages) -> None:
        """See the class."""
        self.cache, self.pages = cache, pages
        self.serial = next(_serials)
        # (page ids, the same as an array, a number that no other table has); replaced by one store
        self._table: tuple[tuple[int, ...], NDArray[np.uint32], int] = (), np.zeros(0, np.uint32), next(_stamps)
        self.unseen: dict[int, int] = {}  # by layer, see ``unseen``

    def __repr__(self) -> str:
        return described(self, lambda: sequence_text(self.serial, self.pages))

    def __len__(self) -> int:
        return len(self.pages)

    def __bool__(self) -> bool:
        return True

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each layer; they differ only while a step goes through the layers."""
        return tuple(self.pages.lengths)

    def fork(self) -> Sequence:
        """A second sequence with the same tokens. Full pages stay shared; the partial one is copied when written."""
        with self.cache.lock:
            self.cache.check_open()
            self.cache.begin()
            child = self.cache.adopt(self.pages.fork())
            child.unseen = dict(self.unseen)
            return child

    def truncate(self, n: int) -> None:
        """Keep the first ``n`` tokens, 0 <= n <= len(self), of every layer. ArgumentError: another n."""
        with self.cache.lock:
            self.cache.check_open()
            self.cache.begin()
            self.pages.truncate(n)

    def drop_last(self, n: int) -> None:
        """Take the last ``n`` tokens back, 0 <= n <= len(self): the rollback of speculative tokens.

        Within a step the layers that are ahead lose what the others do not have yet, too. ArgumentError: another n;
        ClosedError: the sequence was freed.
        """
        with self.cache.lock:
            self.cache.check_open()
            self.pages.check_open()
            self.cache.begin()
            self.truncate(len(self) - check_int("n", n, 0, len(self)))

    def retract(self, layer: int, n: int) -> None:
        """Keep the first ``n`` tokens of one layer, whatever the others have: undoes an append of that layer."""
        with self.cache.lock:
            self.cache.begin()
            self.pages.retract(layer, n)

    def free(self) -> None:
        """Give the pages back. The sequence cannot be used any more."""
        with self.cache.lock:
            self.cache.begin()
            self.pages.free()
            self.cache.forget(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the tokens to a file that ``KVCache.load`` reads; not in the middle of a step. See ``files.save``."""
        save(self, path)

    @property
    def stamp(self) -> int:
        """Of what ``table`` returned last: tables of different contents have different stamps."""
        return self._table[2]

    def table(self, reservation: Reservation | None = None) -> NDArray[np.uint32]:
        """The block table (pages,), with a reservation's pages where one is given. Read it, do not write it."""
        pages = self.pages.table if reservation is None else reservation.table
        known, array, _ = self._table
        if known is not pages:
            if reservation is not None and known is self.pages.table:  # a copy of memory, but for the new pages
                array = np.concatenate([array[: reservation.table_start], np.array(reservation.new_pages, np.uint32)])
            else:
                array = np.array(pages, np.uint32)
            self._table = pages, array, next(_stamps)
        return array
