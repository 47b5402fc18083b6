"""A token sequence of a KVCache."""

from __future__ import annotations

import itertools
import os
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..checks import Uncopied, check_array, check_int, described
from ..errors import ArgumentError
from .files import save
from .resident import ResidentRows
from .sequence_pages import SequencePages
from .transaction import Reservation
from .unseen import move_unseen


class Kept(NamedTuple):
    """The rows of a sequence that stay: all before ``start``, and ``sources``, which move to ``start``, start + 1, …"""

    start: int
    sources: NDArray[np.int64]

    @property
    def targets(self) -> NDArray[np.int64]:
        """The new positions of ``sources``."""
        return self.start + np.arange(len(self.sources))


def check_kept(pages: SequencePages, rows: Any, last: int) -> Kept:
    """The arguments of ``Sequence.keep``, for a sequence of one device or of several."""
    pages.check_idle()
    pages.check_in_step("keep")
    last = check_int("last", last, 0, len(pages))
    numbers = check_array("rows", rows)
    if numbers.ndim != 1 or (numbers.size and numbers.dtype.kind not in "iu"):
        raise ArgumentError(f"rows: got {numbers.dtype} of shape {numbers.shape}, expected a list of row numbers")
    if np.any(wrong := (numbers < 0) | (numbers >= last)):
        raise ArgumentError(f"rows: got {numbers[wrong][0]}, expected numbers of the last {last} rows, from 0 on")
    numbers = numbers.astype(np.int64)
    if np.any(wrong := numbers[1:] <= numbers[:-1]):
        index = int(np.argmax(wrong))
        pair = f"{numbers[index + 1]} after {numbers[index]}"
        raise ArgumentError(f"rows: got {pair}, expected ascending numbers, each once")
    stay = int(np.argmin(np.append(numbers, -1) == np.arange(len(numbers) + 1)))  # the first one that moves
    first = len(pages) - last
    return Kept(first + stay, first + numbers[stay:])


_serials = itertools.count()
_stamps = itertools.count()


def sequence_text(serial: int, pages: SequencePages) -> str:
    """The text of a sequence's repr: its number, and its tokens, in a step the least and the most of a layer."""
    least, most = min(pages.lengths), max(pages.lengths)
    tokens = f"{least:,}" if least == most else f"{least:,} to {most:,}"
    return f"serial={serial}, {tokens} tokens{', freed' * pages.closed}"


class Sequence(Uncopied, instead="fork() shares its tokens, save() writes them to a file"):
    """One token sequence of a KVCache, from ``new_sequence``. ``len`` counts the tokens that all layers have."""

    def __init__(self, cache: ResidentRows, pages: SequencePages) -> None:
        """See the class. LimitError: max_sequences are live."""
        self.cache, self.pages = cache, pages
        self.serial = next(_serials)
        # (page ids, the same as an array, its stamp); replaced by one store
        self._table: tuple[tuple[int, ...], NDArray[np.uint32], int] = (), np.zeros(0, np.uint32), next(_stamps)
        cache.admit(self)

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
            self.cache.settle()
            return Sequence(self.cache, self.pages.fork())

    def truncate(self, n: int) -> None:
        """Keep the first ``n`` tokens, 0 <= n <= len(self), of every layer. ArgumentError: another n."""
        with self.cache.lock:
            self.cache.check_open()
            self.cache.settle()
            self.pages.truncate(n)

    def drop_last(self, n: int) -> None:
        """Take the last ``n`` tokens back, 0 <= n <= len(self): the rollback of speculative tokens.

        Within a step the rows that other layers lack are lost, too. ArgumentError: another n; ClosedError: freed.
        """
        with self.cache.lock:
            self.cache.check_open()
            self.pages.check_open()
            self.cache.settle()
            self.truncate(len(self) - check_int("n", n, 0, len(self)))

    def keep(self, rows: Any, last: int) -> None:
        """Keep ``rows`` of the ``last`` tokens, as if only these had been appended: the accepted path of a tree.

        rows: a list or an array of numbers from 0 to last - 1, ascending, each once; 0 is the first of these tokens.
        The tokens before them stay. K and V move on the device, as they are stored, in all layers: a K that depends on
        the position must have been made for its new position. Forks keep what they have.
        Rows that move go to free pages, in place of those that the sequence has, so that a failed call changes nothing:
        CapacityError where there are too few (a few tokens need one). ArgumentError: other rows; StepError: the layers
        have different lengths; ClosedError: the sequence was freed.
        """
        cache, pages = self.cache, self.pages
        with cache.lock:
            cache.check_pages(pages)
            kept = check_kept(pages, rows, last)
            try:
                transaction = cache.transaction()
                reservation = transaction.rewrite(pages, kept.start, len(kept.sources))
                if reservation.count:
                    cache.copy_pages(reservation.copies)
                    cache.mover.move(kept.sources, self.table(), kept.targets, self.table(reservation))
                move_unseen(pages, kept.start)
                transaction.commit()
            finally:
                cache.end()

    def retract(self, layer: int, n: int) -> None:
        """Keep the first ``n`` tokens of one layer, which undoes an append to that layer alone."""
        with self.cache.lock:
            self.cache.settle()
            self.pages.retract(layer, n)

    def free(self) -> None:
        """Give the pages back. The sequence cannot be used any more."""
        with self.cache.lock:
            self.cache.settle()
            self.pages.free()
            self.cache.forget(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the tokens to a file that ``KVCache.load`` reads; not in the middle of a step. See ``files.save``."""
        save(self.cache, self.pages, path)

    @property
    def stamp(self) -> int:
        """The stamp of the last ``table``. Of two tables with the same stamp the longer one begins with the shorter."""
        return self._table[2]

    def table(self, reservation: Reservation | None = None) -> NDArray[np.uint32]:
        """The block table (pages,), with a reservation's pages where one is given. Read it, do not write it."""
        pages = self.pages.table if reservation is None else reservation.table
        known, array, stamp = self._table
        if known is not pages:
            if reservation is not None and known is self.pages.table:  # only the new pages are converted
                grows = reservation.table_start == len(known)
                array = np.concatenate([array[: reservation.table_start], np.array(reservation.new_pages, np.uint32)])
            else:
                grows, array = False, np.array(pages, np.uint32)
            self._table = pages, array, stamp if grows else next(_stamps)
        return array
