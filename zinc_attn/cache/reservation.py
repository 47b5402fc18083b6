"""What an append holds from its reservation to its commit or rollback, and the commit of a whole batch.

See ``pages`` for the invariants, and for how an interrupt between any two bytecodes leaves a call done or not done.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Literal

from ..errors import ClosedError

if TYPE_CHECKING:
    from .pages import Books, PagePool
    from .sequence_pages import SequencePages


class Commit:
    """Whether the reservations of a batch count; ``made`` is stored once, and with it all of them do."""

    __slots__ = ("made",)

    def __init__(self) -> None:
        self.made = False


class Reservation:
    """What appending ``count`` tokens to ``layer`` of ``sequence`` needs; from ``SequencePages.reserve``.

    also: layers to which it appends as many, too; start: position of the first new token; new_pages: page ids held for
    it, in token order, the target of a copy included; table_start: the first entry of the block table that changes,
    from there on it is ``new_pages``; table: the page ids after the append, the same object as the sequence's from the
    commit on.
    As a context manager it commits on success and rolls back on any exception. One that is garbage collected while
    open counts as rolled back.
    """

    def __init__(
        self, sequence: SequencePages, layer: int, count: int, table_start: int, also: tuple[int, ...] = ()
    ) -> None:
        self.sequence, self.layer, self.count, self.table_start = sequence, layer, count, table_start
        self.also = also
        self.table, lengths, _ = sequence.state
        self.start = lengths[layer]
        self.new_pages: tuple[int, ...] = ()
        self._source = self.table[table_start:]  # the shared page that a copy replaces, or nothing
        self._commit: Commit | None = None
        self._rolled_back = False

    def hold(self, new_pages: tuple[int, ...]) -> None:
        """Take ``new_pages``, which are off the free list."""
        self.new_pages = new_pages
        self.table = self.table[: self.table_start] + new_pages

    @property
    def state(self) -> Literal["open", "committed", "rolled back"]:
        """Whether the tokens count already, or never will."""
        if self._commit is not None and self._commit.made:
            return "committed"
        return "rolled back" if self._rolled_back else "open"

    @property
    def copies(self) -> list[tuple[int, int, int]]:
        """(source page, target page, tokens to keep): copy K and V of every layer before the rows are written."""
        keep = self.start % self.sequence.pool.page_size
        return [(source, self.new_pages[0], keep) for source in self._source]

    def writes(self) -> list[tuple[int, int, int, int]]:
        """(page, first slot, first row, rows): where the rows of this append go, in order."""
        size, row, found = self.sequence.pool.page_size, 0, []
        while row < self.count:
            index, slot = divmod(self.start + row, size)
            rows = min(size - slot, self.count - row)
            found.append((self.table[index], slot, row, rows))
            row += rows
        return found

    def commit(self) -> None:
        """The tokens are the sequence's. A second call does nothing; ClosedError after a rollback."""
        commit_all([self])

    def give_up(self) -> None:
        """Count as rolled back. The caller sees to it that the books no longer have ``new_pages`` as held."""
        self._rolled_back = True

    def rollback(self) -> None:
        """The pool and the sequence are as before ``reserve``. After a commit, or a second time, it does nothing."""
        if self.state != "open":
            return
        if not self.new_pages:
            self._rolled_back = True
            return
        pool = self.sequence.pool
        books = pool.take_books()
        self._rolled_back = True
        books.release(reversed(self.new_pages))
        pool.put_books(books)

    def __enter__(self) -> Reservation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None and self.state != "rolled back":
                self.commit()
        finally:
            self.rollback()


def commit_all(reservations: Sequence[Reservation], commit: Commit | None = None) -> None:
    """Commit the reservations of a batch by one store, that of ``commit.made``: all of them or, interrupted, none.

    ClosedError, with none committed, where one was rolled back. commit: a new one that others look at, too.
    """
    for reservation in reservations:
        if reservation.state == "rolled back":
            raise ClosedError("reservation: commit() after rollback(); reserve() again")
    commit = Commit() if commit is None else commit
    held: list[Reservation] = []
    taken: dict[PagePool, Books] = {}
    for one in reservations:
        if one.state == "committed" or one in held:
            continue
        held.append(one)
        one._commit = commit
        lengths = list(one.sequence.state[1])
        for layer in (one.layer, *one.also):
            lengths[layer] = one.start + one.count
        one.sequence.prepare((one.table, tuple(lengths), False), commit)
        if one._source and one.sequence.pool not in taken:
            taken[one.sequence.pool] = one.sequence.pool.take_books()
    commit.made = True
    for one in held:
        one.sequence.end_commit()
        if one._source:
            taken[one.sequence.pool].release(one._source)
    for pool, books in taken.items():
        pool.put_books(books)
