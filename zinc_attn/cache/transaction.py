"""The reservations of a call, in one sequence or in several, from the first to the commit or rollback.

See ``pages`` for the invariants, and for how an interrupt between any two bytecodes leaves a call done or not done.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType
from typing import Literal

from ..errors import ClosedError
from .pages import CapacityError, PageCounts, PagePool
from .rows import NO_ROWS, Largest
from .sequence_pages import Commit, SequencePages, State


@dataclass(eq=False, slots=True)
class Reservation:
    """The places of the rows of one sequence that a transaction writes.

    start: position of the first row; count: rows of each layer that is written; lengths: tokens of each layer from the
    commit on; table_start: the first entry of the block table that changes; new_pages: the page ids from that entry on,
    in token order, the target of a copy included; table: the page ids from the commit on, which become the sequence's
    own tuple; replaced: the page ids that the sequence gives up by the commit.
    """

    sequence: SequencePages
    start: int
    count: int
    lengths: tuple[int, ...]
    table_start: int
    table: tuple[int, ...]
    new_pages: tuple[int, ...]
    replaced: tuple[int, ...]

    @property
    def copies(self) -> list[tuple[int, int]]:
        """(source page, target page): copy K and V of every layer before any row is written."""
        keeps = self.start % self.sequence.pool.page_size
        return [(self.replaced[0], self.new_pages[0])] if keeps and self.new_pages and self.replaced else []


class Transaction:
    """The reservations of a call: all of them count from ``commit`` on, or none of them ever does.

    A sequence has a reservation in one open transaction at most, and changes in no other way until its end.
    reservations: so far, in order; mark: the object in which the commit makes its store. As a context manager a
    transaction commits on success and rolls back on any exception. Garbage collection rolls an open one back.
    """

    def __init__(self) -> None:
        self.mark = Commit()
        self.reservations: tuple[Reservation, ...] = ()
        self._rolled_back = False

    @property
    def state(self) -> Literal["open", "committed", "rolled back"]:
        """Whether the rows count already, or never will."""
        if self.mark.done:
            return "committed"
        return "rolled back" if self._rolled_back else "open"

    def new_pages(self, sequence: SequencePages) -> tuple[int, ...]:
        """The pages that are held for ``sequence``, without its table's."""
        return next((held.new_pages for held in self.reservations if held.sequence is sequence), ())

    def reserve(self, sequence: SequencePages, layer: int, count: int, also: tuple[int, ...] = ()) -> Reservation:
        """Hold the pages to append ``count`` tokens (at least 1) to ``layer``; nothing else changes until the commit.

        also: further layers, of the same length, to which the same commit appends as many. A shared, partly filled page
        is copied. The last holder writes in place if this transaction has replaced the page for all other holders, none
        of them longer. So reserve for short sequences first, and make all ``copies`` before any row is written.
        CapacityError: too few free pages; also the errors of ``SequencePages.check_append``.
        """
        start = sequence.check_append(layer, count, also)
        pages, lengths, *_ = sequence.state
        pool = sequence.pool
        copy = start % pool.page_size > 0 and self._is_needed(pool, pages[-1], start)  # not within a step: alone there
        table_start = len(pages) - copy
        need, free = pool.pages_for(start + count) - table_start, len(pool.counts().free)
        if need > free:
            room = max(0, (table_start + free) * pool.page_size - start)
            raise CapacityError(
                f"k: got {count:,} tokens at length {start:,}, expected at most {room:,}: {self._free(pool, free)}"
            )
        grown = (layer, *also)
        after = tuple(start + count if i in grown else length for i, length in enumerate(lengths))
        return self._hold(sequence, start, count, after, table_start, need)

    def rewrite(self, sequence: SequencePages, start: int, count: int) -> Reservation:
        """Hold pages for ``count`` tokens of every layer in place of all tokens from ``start`` on.

        No page of the sequence, which must be in step, is written: a rollback restores it. Errors: ``reserve``'s.
        """
        sequence.check_idle()
        pool, pages = sequence.pool, sequence.table
        end = start + count
        table_start = start // pool.page_size if count else pool.pages_for(start)
        need, free = pool.pages_for(end) - table_start, len(pool.counts().free)
        if need > free:
            raise CapacityError(
                f"keep: got {count:,} rows that move to token {start:,} and behind, expected {need:,} free pages for "
                f"them: {self._free(pool, free)}"
            )
        assert end <= len(sequence) and table_start <= len(pages)
        return self._hold(sequence, start, count, (end,) * sequence.num_layers, table_start, need)

    def _free(self, pool: PagePool, free: int) -> str:
        """The end of an error: the free pages, without those that this transaction holds."""
        held = sum(len(reservation.new_pages) for reservation in self.reservations)
        beside = f" beside {held:,} that this call takes for other sequences" if held else ""
        return (
            f"{free:,} of {pool.num_pages:,} pages of {pool.page_size:,} tokens are free{beside} (capacity = "
            f"{pool.asked:,}, in whole pages); truncate() or free() a sequence, or make the cache with a larger "
            "capacity"
        )

    def commit(self, largest: Largest = NO_ROWS) -> None:
        """Let all reservations count by one store, and no new row exceed ``largest``.

        A second call does nothing; ClosedError after a rollback.
        """
        if self.state == "rolled back":
            raise ClosedError("transaction: commit() after rollback(); reserve() in a new one")
        if self.state == "committed":
            return
        taken: dict[PagePool, PageCounts] = {}
        for reservation in self.reservations:
            before = reservation.sequence.state
            combined = before.largest.maximum(largest)
            others = len(self.reservations) > 1 and combined != before.largest  # it may be another sequence's
            shrunk = reservation.lengths[0] < before.lengths[0]  # by ``rewrite``, in every layer
            given_up = before.given_up or others or shrunk
            after = State(reservation.table, reservation.lengths, False, combined, given_up)
            reservation.sequence.prepare(after, self.mark)
            if reservation.replaced and reservation.sequence.pool not in taken:
                taken[reservation.sequence.pool] = reservation.sequence.pool.begin_update()
        self.mark.done = True
        for reservation in self.reservations:
            reservation.sequence.end_commit()
            if reservation.replaced:
                taken[reservation.sequence.pool].release(reversed(reservation.replaced))
        for pool, counts in taken.items():
            pool.end_update(counts)

    def rollback(self) -> None:
        """Make pools and sequences as before. After a commit, or a second time, it does nothing."""
        if self.state != "open":
            return
        pools = {reservation.sequence.pool for reservation in self.reservations if reservation.new_pages}
        for pool in pools:  # an interrupt after the next store then makes the pool count again
            pool.drop_counts()
        self._rolled_back = True
        for pool in pools:  # a count that was made before the store is stale
            pool.drop_counts()

    def __enter__(self) -> Transaction:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None and self.state != "rolled back":
                self.commit()
        finally:
            self.rollback()

    def _is_needed(self, pool: PagePool, page: int, start: int) -> bool:
        """Whether another holder of a page must not see rows written from token ``start`` on.

        After the commit: a holder to which this transaction gives no other page. After a rollback: a longer holder.
        """
        others = pool.counts().extra.get(page, 0)
        if not others:
            return False
        held = (reservation for reservation in self.reservations if page in reservation.replaced)
        leaving = [reservation.sequence for reservation in held if reservation.sequence.pool is pool]
        return others > sum(max(sequence.lengths) <= start for sequence in leaving)

    def _hold(
        self, sequence: SequencePages, start: int, count: int, lengths: tuple[int, ...], table_start: int, need: int
    ) -> Reservation:
        """Take ``need`` pages, in place of those from ``table_start`` on."""
        if self.state != "open":
            raise ClosedError(f"transaction: reserve() in one that is {self.state}; make a new one")
        table, pool = sequence.table, sequence.pool
        counts = pool.begin_update() if need else None
        new_pages = counts.take(need) if counts else ()
        kept = table if table_start == len(table) and not need else table[:table_start] + new_pages
        reservation = Reservation(sequence, start, count, lengths, table_start, kept, new_pages, table[table_start:])
        sequence.enter(self)
        self.reservations = (*self.reservations, reservation)  # from here on the pages are held
        if counts:
            pool.end_update(counts)
        return reservation
