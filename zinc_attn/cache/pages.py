"""Which page of a pool holds which tokens of which sequence. Host bookkeeping of a paged KV cache; no device.

A page is ``page_size`` token slots, and one page id names the same slots in the K and V buffers of every layer, so
a sequence has one block table for all layers: token ``t`` lies in slot ``t % page_size`` of ``pages[t // page_size]``.
Each layer counts its own tokens. A step appends the same number of tokens to every layer, in any order of layers;
within a step the layers hold at most two different counts, and ``len(seq)`` is the smaller one.

Sequences share pages (``fork``). A page is written only by a sequence that holds it alone: the first layer of a step
replaces a shared, partly filled page by a copy (all layers' K and V), and the other layers find it replaced.

Invariants: a table has ceil(max(lengths) / page_size) pages, no page twice; a free page has no holder (table or open
reservation). Free pages are ordered by rank, so a page that comes back is allocated again in its place. Calls are not
locked here: the owner of the pool serialises them, but for plain reads.

An interrupt (Ctrl-C) between any two bytecodes leaves every call done or not done, and no page lost:

- Only the holders know who holds what. A sequence has one immutable state, an open reservation a tuple of pages, and
  either changes by one store. Several reservations count together by one store, too: that of their ``Commit``.
- The free list and the numbers of holders follow from that. A call that changes them takes them off the pool first and
  puts them back at its end. Where they are missing, or a holder was collected, the next call counts the holders again.

Source of the idea: PagedAttention (Kwon et al. 2023).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heappush
from types import TracebackType
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from ..checks import check_int, shown
from ..errors import ArgumentError, ClosedError, LimitError, ZincAttnError
from ..limits import MAX_CONTEXT
from .registry import Registry

MIN_PAGE_SIZE: Final = 16  # tokens
MAX_PAGE_SIZE: Final = 65536
MAX_PAGES: Final = (1 << 32) - 1  # block tables hold uint32

State = tuple[tuple[int, ...], tuple[int, ...], bool]  # page ids in token order, tokens of each layer, whether freed


class StepError(ArgumentError):
    """A layer was asked for out of step with the others, or a sequence while a reservation of it is open."""


class CapacityError(ZincAttnError):
    """The pool has too few free pages; the message says how many tokens fit."""


class _Books:
    """What follows from who holds which page. Changed only while it is off the pool.

    free: a heap of the ranks of the pages that nobody holds; extra: of each page with several holders, their number
    minus one.
    """

    __slots__ = ("extra", "free", "order", "rank")

    def __init__(self, order: list[int], rank: list[int], holders: NDArray[np.int64]) -> None:
        self.order, self.rank = order, rank
        self.free = [rank[page] for page in np.flatnonzero(holders == 0).tolist()]
        heapify(self.free)
        self.extra = {page: int(holders[page]) - 1 for page in np.flatnonzero(holders > 1).tolist()}

    def take(self, count: int) -> tuple[int, ...]:
        """``count`` free pages, the lowest ranks first."""
        return tuple([self.order[heappop(self.free)] for _ in range(count)])

    def share(self, pages: Iterable[int]) -> None:
        """One holder more for each of ``pages``."""
        for page in pages:
            self.extra[page] = self.extra.get(page, 0) + 1

    def release(self, pages: Iterable[int]) -> None:
        """One holder less for each of ``pages``."""
        for page in pages:
            extra = self.extra.pop(page, 0)
            if extra > 1:
                self.extra[page] = extra - 1
            elif not extra:
                heappush(self.free, self.rank[page])


class PagePool:
    """``num_pages`` pages of ``page_size`` tokens (a power of two from 16 to 65536), with reference counts.

    order: a permutation of the page ids, the order in which free pages are taken; default: lowest id first.
    """

    def __init__(self, num_pages: int, page_size: int, order: Sequence[int] | None = None) -> None:
        self.num_pages = check_int("num_pages", num_pages, 1, MAX_PAGES)
        self.page_size = check_int("page_size", page_size, MIN_PAGE_SIZE, MAX_PAGE_SIZE)
        if self.page_size & (self.page_size - 1):
            raise ArgumentError(
                f"page_size: got {page_size}, expected a power of two from {MIN_PAGE_SIZE} to {MAX_PAGE_SIZE}"
            )
        if order is not None and (not isinstance(order, (Sequence, np.ndarray)) or getattr(order, "ndim", 1) != 1):
            raise ArgumentError(f"order: got {shown(order)}, expected a list of page ids, or None")
        self._order = list(range(self.num_pages)) if order is None else [check_int("order", page, 0) for page in order]
        if sorted(self._order) != list(range(self.num_pages)):
            raise ArgumentError(
                f"order: got {len(self._order)} ids, expected each of 0 to {self.num_pages - 1} exactly once"
            )
        self._rank = [0] * self.num_pages
        for rank, page in enumerate(self._order):
            self._rank[page] = rank
        # a sequence that dies, or a reservation that dies with pages, is noted in ``_sequences.dead``
        self._sequences: Registry[SequencePages] = Registry()
        self._books: _Books | None = None

    @property
    def capacity(self) -> int:
        """Tokens per layer that all pages hold together."""
        return self.num_pages * self.page_size

    @property
    def free_pages(self) -> int:
        """Pages that nobody holds. Changes nothing, so any thread may ask."""
        books = self._books
        return len((self._count() if books is None or self._sequences.dead else books).free)

    @property
    def used_pages(self) -> int:
        """Pages in a block table or held by an open reservation; a shared page counts once."""
        return self.num_pages - self.free_pages

    def pages_for(self, tokens: int) -> int:
        """Pages that hold ``tokens`` tokens."""
        return -(-tokens // self.page_size)

    def is_shared(self, page: int) -> bool:
        """Whether more than one holder has a page that is in use."""
        return page in self._counted().extra

    def check(self, sequences: Iterable[SequencePages]) -> None:
        """AssertionError unless the counts are those of ``sequences``, which are all the live ones of this pool."""
        books = self._counted()
        holders = {self._order[rank]: 0 for rank in books.free}
        free = set(holders)
        if len(free) != len(books.free):
            raise AssertionError(f"free list: a page is listed twice: ranks {sorted(books.free)}")
        for seq in sequences:
            held = seq.open_reservation()
            if len(set(seq.pages)) != len(seq.pages) or len(seq.pages) != self.pages_for(max(seq.lengths)):
                raise AssertionError(f"block table {seq.pages} does not fit lengths {seq.lengths}")
            for page in [*seq.pages, *(held.new_pages if held else ())]:
                if page in free:
                    raise AssertionError(f"page {page} is in use and in the free list")
                holders[page] = holders.get(page, 0) + 1
        if sorted(holders) != list(range(self.num_pages)):
            raise AssertionError(f"{self.num_pages - len(holders)} pages are neither free nor in use")
        for page, count in holders.items():
            if books.extra.get(page, 0) != max(count - 1, 0):
                raise AssertionError(f"page {page}: {books.extra.get(page, 0) + 1} holders counted, {count} found")

    def _counted(self) -> _Books:
        """The books, counted anew after an interrupted call or the death of a holder."""
        if self._sequences.dead:
            self._books = None
            self._sequences.purge()
        if self._books is None:
            self._books = self._count()
        return self._books

    def _count(self) -> _Books:
        holders = np.zeros(self.num_pages, np.int64)
        for sequence in self._sequences:
            reservation = sequence.open_reservation()
            for pages in (sequence.table, reservation.new_pages if reservation else ()):
                holders[np.array(pages, np.int64)] += 1  # no page is twice in one of them
        return _Books(self._order, self._rank, holders)

    def _take_books(self) -> _Books:
        """The books, off the pool: from here on an interrupt makes the next call count again."""
        books = self._counted()
        self._books = None
        return books

    def _put_books(self, books: _Books) -> None:
        """The books are right again, unless a finalizer that ran meanwhile used the pool: then nobody's are."""
        self._books = books if self._books is None else None


class SequencePages:
    """The block table and the layers' token counts of one sequence.

    pages: page ids in token order; lengths: tokens of each layer; both are copies.
    A sequence that is garbage collected gives its pages back.
    """

    def __init__(self, pool: PagePool, num_layers: int) -> None:
        self.pool = pool
        self._settled: State = (), (0,) * check_int("num_layers", num_layers, 1), False
        self._next: tuple[State, Commit] | None = None  # the state from when on the commit is made
        self._open: weakref.ReferenceType[Reservation] | None = None
        pool._sequences.add(self)

    def __len__(self) -> int:
        """Tokens that every layer has."""
        return min(self._state[1])

    def __bool__(self) -> bool:
        """True: an empty sequence is still a sequence."""
        return True

    @property
    def _state(self) -> State:
        following = self._next  # read before _settled: whoever settles writes them in the other order
        return following[0] if following is not None and following[1].made else self._settled

    @property
    def table(self) -> tuple[int, ...]:
        """The page ids in token order. The same object as long as the table does not change."""
        return self._state[0]

    @property
    def pages(self) -> list[int]:
        """The page ids in token order."""
        return list(self._state[0])

    @property
    def lengths(self) -> list[int]:
        """Tokens of each layer."""
        return list(self._state[1])

    def length(self, layer: int) -> int:
        """Tokens of one layer."""
        return self._state[1][layer]

    @property
    def closed(self) -> bool:
        """Whether ``free`` was called."""
        return self._settled[2]

    @property
    def num_layers(self) -> int:
        """Layers, each with its own token count."""
        return len(self._settled[1])

    @property
    def committed(self) -> int:
        """Tokens that every layer has: ``len(self)``."""
        return min(self._state[1])

    @property
    def in_step(self) -> bool:
        """Whether all layers have the same number of tokens."""
        lengths = self._state[1]
        return min(lengths) == max(lengths)

    @property
    def block_table(self) -> NDArray[np.uint32]:
        """The page ids as a new array of shape (pages,)."""
        return np.array(self._state[0], np.uint32)

    def check_open(self) -> None:
        """ClosedError after ``free``."""
        if self._settled[2]:
            raise ClosedError("sequence: used after free()")

    def check_idle(self) -> None:
        """ClosedError after ``free``, StepError while a reservation is open."""
        self.check_open()
        if other := self.open_reservation():
            raise StepError(
                f"sequence: a reservation of {other.count} tokens of layer {other.layer} is open; commit() or "
                "rollback() it first"
            )

    def reserve(self, layer: int, count: int, also: tuple[int, ...] = ()) -> Reservation:
        """Hold what appending ``count`` tokens (at least 1) to ``layer`` needs; nothing else changes until commit.

        also: further layers, of the same length, to which the same commit appends as many.
        Where all layers have the same length, any layer may append any count. Otherwise a step is under way: the
        layers behind append exactly the count that the layers ahead did, and those wait.
        StepError: out of step, or another reservation is open; CapacityError: too few free pages; LimitError:
        beyond 2**24 tokens; ArgumentError: no such layer; ClosedError: freed.
        Sequences that append in one batch and share a page each need a page for their copy, the last one included.
        """
        self.check_idle()
        pages, lengths, _ = self._state
        layer = check_int("layer", layer, 0, len(lengths) - 1)
        count = check_int("count", count, 1)
        start = self._check_step(lengths, layer, count, also)
        pool = self.pool
        copy = start % pool.page_size > 0 and pool.is_shared(pages[-1])  # within a step it is no longer shared
        reservation = Reservation(self, layer, count, len(pages) - copy, also)
        need = pool.pages_for(start + count) - len(pages) + copy
        if need == 0:
            self._open = weakref.ref(reservation)
            return reservation
        free = len(pool._counted().free)
        if need > free:
            room = max(0, (len(pages) - copy + free) * pool.page_size - start)
            raise CapacityError(
                f"count: got {count} tokens at length {start}, expected at most {room}: {free} of {pool.num_pages} "
                f"pages of {pool.page_size} tokens are free (capacity {pool.capacity} tokens); truncate() or free() a "
                "sequence, or make a larger cache"
            )
        try:
            books = pool._take_books()
            reservation._hold(books.take(need))
            self._open = weakref.ref(reservation, pool._sequences.dead.append)  # from here on they are held
            pool._put_books(books)
            return reservation
        except BaseException:
            pool._books = None
            reservation._rolled_back = True
            raise

    @staticmethod
    def _check_step(lengths: tuple[int, ...], layer: int, count: int, also: tuple[int, ...]) -> int:
        """Where ``count`` tokens of ``layer`` begin; StepError, LimitError: see ``reserve``."""
        start, low, high = lengths[layer], min(lengths), max(lengths)
        for at, other in enumerate(also):
            if lengths[check_int("also", other, 0, len(lengths) - 1)] != start or other in (layer, *also[:at]):
                raise StepError(
                    f"also: got layer {other} at length {lengths[other]}, expected layers other than {layer} of its "
                    f"length {start}, each once; append to every layer first, or truncate({low})"
                )
        if start == high > low:
            behind = lengths.index(low)
            raise StepError(
                f"layer {layer}: got {count} tokens at length {start}, expected none yet, layer {behind} has length "
                f"{low}; append {high - low} to every layer that is behind first, or truncate({low})"
            )
        if start < high and count != high - start:
            raise StepError(
                f"layer {layer}: got {count} tokens at length {start}, expected {high - start}, layer "
                f"{lengths.index(high)} has length {high}; append as many as it did, or truncate({low})"
            )
        if start + count > MAX_CONTEXT:
            raise LimitError(f"count: got {count} tokens at length {start}, expected a length of at most {MAX_CONTEXT}")
        return start

    def fork(self) -> SequencePages:
        """A second sequence with the same tokens that shares all pages. StepError unless all layers are in step."""
        self.check_idle()
        if not self.in_step:
            lengths = self._state[1]
            low, high = min(lengths), max(lengths)
            raise StepError(
                f"fork: layer {lengths.index(high)} has length {high}, layer {lengths.index(low)} has length "
                f"{low}, expected equal lengths; append to every layer first, or truncate({low})"
            )
        child = SequencePages(self.pool, self.num_layers)
        try:
            books = self.pool._take_books()
            child._settled = self._state  # from here on it holds them
            books.share(child._settled[0])
            self.pool._put_books(books)
            return child
        except BaseException:
            child.free()
            raise

    def truncate(self, n: int) -> None:
        """Keep the first ``n`` tokens of every layer, 0 <= n <= len(self), and give up the pages beyond them.

        Allowed within a step too: the layers ahead are cut as well, so all layers end in step, with ``n`` tokens.
        """
        self.check_idle()
        n = check_int("n", n, 0, len(self))
        self._shrink((n,) * self.num_layers)

    def retract(self, layer: int, n: int) -> None:
        """Keep the first ``n`` tokens of one layer, 0 <= n <= its length, and the pages that some layer needs.

        StepError where a page of the tokens given up is shared: they are the other sequence's too, so no append of this
        one alone can be undone, and the layer's next rows would go there.
        """
        self.check_idle()
        pages, lengths, _ = self._state
        n = check_int("n", n, 0, lengths[check_int("layer", layer, 0, self.num_layers - 1)])
        given_up = pages[n // self.pool.page_size : self.pool.pages_for(lengths[layer])]
        if n < lengths[layer] and any(self.pool.is_shared(page) for page in given_up):
            raise StepError(
                f"retract: layer {layer} has length {lengths[layer]} and shares pages with another sequence from "
                f"token {n} on, expected an append behind what they share; truncate({n}) cuts every layer"
            )
        self._shrink((*lengths[:layer], n, *lengths[layer + 1 :]))

    def free(self) -> None:
        """Give up every page and roll an open reservation back; a second call does nothing."""
        if reservation := self.open_reservation():
            reservation.rollback()
        self._shrink((0,) * self.num_layers, True)

    def open_reservation(self) -> Reservation | None:
        """The reservation that is neither committed nor rolled back, where there is one."""
        reservation = self._open() if self._open else None
        return reservation if reservation and reservation.state == "open" else None

    def _settle(self) -> None:
        """Forget a commit that was made, or was given up, under the lock; reading needs no such step."""
        if self._next is not None:
            self._settled = self._state
            self._next = None

    def _shrink(self, lengths: tuple[int, ...], closed: bool = False) -> None:
        """Give up the tokens beyond ``lengths`` and the pages that no layer needs any more."""
        self._settle()
        pages = self._settled[0]
        kept = self.pool.pages_for(max(lengths))
        if kept == len(pages):
            self._settled = pages, lengths, closed
            return
        books = self.pool._take_books()
        self._settled = pages[:kept], lengths, closed
        books.release(reversed(pages[kept:]))
        self.pool._put_books(books)


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
        self.table, lengths, _ = sequence._state
        self.start = lengths[layer]
        self.new_pages: tuple[int, ...] = ()
        self._source = self.table[table_start:]  # the shared page that a copy replaces, or nothing
        self._commit: Commit | None = None
        self._rolled_back = False

    def _hold(self, new_pages: tuple[int, ...]) -> None:
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

    @property
    def block_table(self) -> NDArray[np.uint32]:
        """The page ids after the append, shape (pages,)."""
        return np.array(self.table, np.uint32)

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

    def rollback(self) -> None:
        """The pool and the sequence are as before ``reserve``. After a commit, or a second time, it does nothing."""
        if self.state != "open":
            return
        if not self.new_pages:
            self._rolled_back = True
            return
        pool = self.sequence.pool
        books = pool._take_books()
        self._rolled_back = True
        books.release(reversed(self.new_pages))
        pool._put_books(books)

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
    taken: dict[PagePool, _Books] = {}
    for one in reservations:
        if one.state == "committed" or one in held:
            continue
        held.append(one)
        one._commit = commit
        lengths = list(one.sequence._state[1])
        for layer in (one.layer, *one.also):
            lengths[layer] = one.start + one.count
        one.sequence._next = (one.table, tuple(lengths), False), commit
        if one._source and one.sequence.pool not in taken:
            taken[one.sequence.pool] = one.sequence.pool._take_books()
    commit.made = True
    for one in held:
        one.sequence._settle()
        one.sequence._open = None
        if one._source:
            taken[one.sequence.pool].release(one._source)
    for pool, books in taken.items():
        pool._put_books(books)
