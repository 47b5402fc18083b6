"""Which page of a pool holds which tokens of which sequence. Host bookkeeping of a paged KV cache; no device.

A page is ``page_size`` token slots, and one page id names the same slots in the K and V buffers of every layer, so
a sequence has one block table for all layers: token ``t`` lies in slot ``t % page_size`` of ``pages[t // page_size]``.
Each layer counts its own tokens. A step appends the same number of tokens to every layer, in any order of layers;
within a step the layers hold at most two different counts, and ``len(seq)`` is the smaller one.

Sequences share pages (``fork``). A page is written only by a sequence that holds it alone: the first layer of a step
replaces a shared, partly filled page by a copy (all layers' K and V), and the other layers find it replaced.

Invariants: a table has ceil(max(lengths) / page_size) pages, no page twice; ``_extra[page]`` is its number of holders
(tables and open reservations) minus one, 0 for a free page. The free list is ordered by rank, so a page that comes
back is allocated again in its place. Calls are not locked here: the owner of the pool serialises them. An interrupt
(Ctrl-C) between two statements leaves every call done or not done, and no page lost.
Source of the idea: PagedAttention (Kwon et al. 2023).
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from heapq import heappop, heappush
from types import TracebackType
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from ..errors import ArgumentError, ClosedError, LimitError, ZincAttnError
from ..shapes import MAX_CONTEXT, check_int, shown

MIN_PAGE_SIZE: Final = 16  # tokens
MAX_PAGE_SIZE: Final = 65536
MAX_PAGES: Final = (1 << 32) - 1  # block tables hold uint32


class StepError(ArgumentError):
    """A layer was asked for out of step with the others, or a sequence while a reservation of it is open."""


class CapacityError(ZincAttnError):
    """The pool has too few free pages; the message says how many tokens fit."""


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
        self._free = list(range(self.num_pages))  # a heap of ranks
        self._extra = np.zeros(self.num_pages, np.int64)
        self._garbage: deque[list[int]] = deque()  # pages of collected objects, released by the next call

    @property
    def capacity(self) -> int:
        """Tokens per layer that all pages hold together."""
        return self.num_pages * self.page_size

    @property
    def free_pages(self) -> int:
        """Pages that nobody holds."""
        while self._garbage:
            self._release(self._garbage[0])
            self._garbage.popleft()
        return len(self._free)

    @property
    def used_pages(self) -> int:
        """Pages in a block table or held by an open reservation; a shared page counts once."""
        return self.num_pages - self.free_pages

    def pages_for(self, tokens: int) -> int:
        """Pages that hold ``tokens`` tokens."""
        return -(-tokens // self.page_size)

    def is_shared(self, page: int) -> bool:
        """Whether more than one holder has a page that is in use."""
        return bool(self._extra[page])

    def check(self, sequences: Iterable[SequencePages]) -> None:
        """AssertionError unless the counts are those of ``sequences``, which are all the live ones of this pool."""
        count_free = self.free_pages
        holders = {self._order[rank]: 0 for rank in self._free}
        free = set(holders)
        if len(free) != count_free:
            raise AssertionError(f"free list: a page is listed twice: ranks {sorted(self._free)}")
        for seq in sequences:
            held = seq._open_reservation()
            if len(set(seq.pages)) != len(seq.pages) or len(seq.pages) != self.pages_for(max(seq.lengths)):
                raise AssertionError(f"block table {seq.pages} does not fit lengths {seq.lengths}")
            for page in [*seq.pages, *(held.new_pages if held else ())]:
                if page in free:
                    raise AssertionError(f"page {page} is in use and in the free list")
                holders[page] = holders.get(page, 0) + 1
        if sorted(holders) != list(range(self.num_pages)):
            raise AssertionError(f"{self.num_pages - len(holders)} pages are neither free nor in use")
        for page, count in holders.items():
            if self._extra[page] != max(count - 1, 0):
                raise AssertionError(f"page {page}: {self._extra[page] + 1} holders counted, {count} found")

    def _take(self, count: int, held: list[int]) -> None:
        """Append ``count`` free pages to ``held``."""
        for _ in range(count):
            held.append(self._order[heappop(self._free)])

    def _release(self, pages: list[int], keep: int = 0) -> None:
        """Give up ``pages[keep:]``, taking each off the list in the statement that gives it up."""
        while len(pages) > keep:
            if self._extra[pages[-1]]:
                self._extra[pages.pop()] -= 1
            else:
                heappush(self._free, self._rank[pages.pop()])


class SequencePages:
    """The block table and the layers' token counts of one sequence.

    pages: page ids in token order; lengths: tokens of each layer. Read them, do not write them.
    A sequence that is garbage collected gives its pages back.
    """

    def __init__(self, pool: PagePool, num_layers: int) -> None:
        self.pages: list[int] = []
        self.pool = pool
        self.lengths = [0] * check_int("num_layers", num_layers, 1)
        self._closed = False
        self._open: weakref.ReferenceType[Reservation] | None = None

    def __len__(self) -> int:
        """Tokens that every layer has."""
        return min(self.lengths)

    def __bool__(self) -> bool:
        """True: an empty sequence is still a sequence."""
        return True

    def __del__(self) -> None:
        if pages := getattr(self, "pages", None):
            self.pool._garbage.append(pages)

    @property
    def num_layers(self) -> int:
        """Layers, each with its own token count."""
        return len(self.lengths)

    @property
    def committed(self) -> int:
        """Tokens that every layer has: ``len(self)``."""
        return min(self.lengths)

    @property
    def in_step(self) -> bool:
        """Whether all layers have the same number of tokens."""
        return min(self.lengths) == max(self.lengths)

    @property
    def block_table(self) -> NDArray[np.uint32]:
        """The page ids as a new array of shape (pages,)."""
        return np.array(self.pages, np.uint32)

    def check_open(self) -> None:
        """ClosedError after ``free``."""
        if self._closed:
            raise ClosedError("sequence: used after free()")

    def reserve(self, layer: int, count: int) -> Reservation:
        """Hold what appending ``count`` tokens (at least 1) to ``layer`` needs; nothing else changes until commit.

        Where all layers have the same length, any layer may append any count. Otherwise a step is under way: the
        layers behind append exactly the count that the layers ahead did, and those wait.
        StepError: out of step, or another reservation is open; CapacityError: too few free pages; LimitError:
        beyond 2**24 tokens; ArgumentError: no such layer; ClosedError: freed.
        Sequences that append in one batch and share a page each need a page for their copy, the last one included.
        """
        self._check_idle()
        layer = check_int("layer", layer, 0, self.num_layers - 1)
        count = check_int("count", count, 1)
        start, low, high = self.lengths[layer], min(self.lengths), max(self.lengths)
        if start == high > low:
            behind = self.lengths.index(low)
            raise StepError(
                f"layer {layer}: got {count} tokens at length {start}, expected none yet, layer {behind} has length "
                f"{low}; append {high - low} to every layer that is behind first, or truncate({low})"
            )
        if start < high and count != high - start:
            raise StepError(
                f"layer {layer}: got {count} tokens at length {start}, expected {high - start}, layer "
                f"{self.lengths.index(high)} has length {high}; append as many as it did, or truncate({low})"
            )
        if start + count > MAX_CONTEXT:
            raise LimitError(f"count: got {count} tokens at length {start}, expected a length of at most {MAX_CONTEXT}")
        pool, table = self.pool, len(self.pages)
        copy = start % pool.page_size > 0 and pool.is_shared(self.pages[-1])  # within a step it is no longer shared
        need, free = pool.pages_for(start + count) - table + copy, pool.free_pages
        if need > free:
            room = max(0, (table - copy + free) * pool.page_size - start)
            raise CapacityError(
                f"count: got {count} tokens at length {start}, expected at most {room}: {free} of {pool.num_pages} "
                f"pages of {pool.page_size} tokens are free (capacity {pool.capacity} tokens); truncate() or free() a "
                "sequence, or make a larger cache"
            )
        reservation = Reservation(self, layer, count, table - copy)
        try:
            pool._take(need, reservation._held)
            reservation.new_pages = tuple(reservation._held)
            self._open = weakref.ref(reservation)
            return reservation
        except BaseException:
            reservation.rollback()
            raise

    def fork(self) -> SequencePages:
        """A second sequence with the same tokens that shares all pages. StepError unless all layers are in step."""
        self._check_idle()
        if not self.in_step:
            low, high = min(self.lengths), max(self.lengths)
            raise StepError(
                f"fork: layer {self.lengths.index(high)} has length {high}, layer {self.lengths.index(low)} has length "
                f"{low}, expected equal lengths; append to every layer first, or truncate({low})"
            )
        child = SequencePages(self.pool, self.num_layers)
        before = self.pool._extra[self.pages]
        child.lengths[:] = self.lengths
        try:
            self.pool._extra[self.pages] = before + 1
            child.pages = list(self.pages)  # last: from here on the child gives them up
            return child
        except BaseException:
            child.pages = []
            self.pool._extra[self.pages] = before
            raise

    def truncate(self, n: int) -> None:
        """Keep the first ``n`` tokens of every layer, 0 <= n <= len(self), and give up the pages beyond them.

        Allowed within a step too: the layers ahead are cut as well, so all layers end in step, with ``n`` tokens.
        """
        self._check_idle()
        n = check_int("n", n, 0, len(self))
        _finish(lambda: self._cut(n))

    def retract(self, layer: int, n: int) -> None:
        """Keep the first ``n`` tokens of one layer, 0 <= n <= its length, and the pages that some layer needs.

        StepError where a page of the tokens given up is shared: they are the other sequence's too, so no append of this
        one alone can be undone, and the layer's next rows would go there.
        """
        self._check_idle()
        n = check_int("n", n, 0, self.lengths[check_int("layer", layer, 0, self.num_layers - 1)])
        given_up = self.pages[n // self.pool.page_size : self.pool.pages_for(self.lengths[layer])]
        if n < self.lengths[layer] and any(self.pool.is_shared(page) for page in given_up):
            raise StepError(
                f"retract: layer {layer} has length {self.lengths[layer]} and shares pages with another sequence from "
                f"token {n} on, expected an append behind what they share; truncate({n}) cuts every layer"
            )

        def cut() -> None:
            self.lengths[layer] = n
            self.pool._release(self.pages, self.pool.pages_for(max(self.lengths)))

        _finish(cut)

    def free(self) -> None:
        """Give up every page and roll an open reservation back; a second call does nothing."""
        _finish(self._close)

    def _open_reservation(self) -> Reservation | None:
        reservation = self._open() if self._open else None
        return reservation if reservation and reservation.state == "open" else None

    def _check_idle(self) -> None:
        self.check_open()
        if other := self._open_reservation():
            raise StepError(
                f"sequence: a reservation of {other.count} tokens of layer {other.layer} is open; commit() or "
                "rollback() it first"
            )

    def _cut(self, n: int) -> None:
        self.lengths[:] = [n] * self.num_layers
        self.pool._release(self.pages, self.pool.pages_for(n))

    def _close(self) -> None:
        if reservation := self._open_reservation():
            reservation.rollback()
        self._closed = True
        self._cut(0)


class Reservation:
    """What appending ``count`` tokens to ``layer`` of ``sequence`` needs; from ``SequencePages.reserve``.

    start: position of the first new token; new_pages: page ids held for it, in token order, the target of a copy
    included; table_start: the first entry of the block table that changes, from there on it is ``new_pages``.
    As a context manager it commits on success and rolls back on any exception. One that is garbage collected while
    open counts as rolled back. state: "open", "committing", "committed" or "rolled back".
    """

    def __init__(self, sequence: SequencePages, layer: int, count: int, table_start: int) -> None:
        self.state: Literal["open", "committing", "committed", "rolled back"] = "open"
        self.sequence, self.layer, self.count, self.table_start = sequence, layer, count, table_start
        self.start = sequence.lengths[layer]
        self.new_pages: tuple[int, ...] = ()
        self._held: list[int] = []
        self._source = tuple(sequence.pages[table_start:])  # the shared page that a copy replaces, or nothing
        self._replaced = list(self._source)

    def __del__(self) -> None:
        if getattr(self, "_held", None) and self.state == "open":
            self.sequence.pool._garbage.append(self._held)

    @property
    def copies(self) -> list[tuple[int, int, int]]:
        """(source page, target page, tokens to keep): copy K and V of every layer before the rows are written."""
        keep = self.start % self.sequence.pool.page_size
        return [(source, self.new_pages[0], keep) for source in self._source]

    @property
    def block_table(self) -> NDArray[np.uint32]:
        """The page ids after the append, shape (pages,). Valid until the sequence changes after commit."""
        return np.array([*self.sequence.pages[: self.table_start], *self.new_pages], np.uint32)

    def writes(self) -> list[tuple[int, int, int, int]]:
        """(page, first slot, first row, rows): where the rows of this append go, in order."""
        size, row, found = self.sequence.pool.page_size, 0, []
        while row < self.count:
            index, slot = divmod(self.start + row, size)
            old = index < self.table_start
            page = self.sequence.pages[index] if old else self.new_pages[index - self.table_start]
            rows = min(size - slot, self.count - row)
            found.append((page, slot, row, rows))
            row += rows
        return found

    def commit(self) -> None:
        """The tokens are the sequence's. A second call does nothing; ClosedError after a rollback."""
        if self.state == "rolled back":
            raise ClosedError("reservation: commit() after rollback(); reserve() again")
        commit_all([self])

    def rollback(self) -> None:
        """The pool and the sequence are as before ``reserve``. After a commit, or a second time, it does nothing."""
        if self.state == "open":
            _finish(self._undo)

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

    def _apply(self) -> None:
        if self.state not in ("committed", "rolled back"):
            self.state = "committing"
            self.sequence.pages[self.table_start :] = self.new_pages
            self.sequence.lengths[self.layer] = self.start + self.count
            self.sequence.pool._release(self._replaced)
            self.state = "committed"

    def _undo(self) -> None:
        self.sequence.pool._release(self._held)
        self.state = "rolled back"


def commit_all(reservations: Sequence[Reservation]) -> None:
    """Commit the reservations of a batch, all of them even where an interrupt comes between two.

    ClosedError, with none committed, where one was rolled back.
    """
    for reservation in reservations:
        if reservation.state == "rolled back":
            raise ClosedError("reservation: commit() after rollback(); reserve() again")

    def apply() -> None:
        for reservation in reservations:
            reservation._apply()

    _finish(apply)


def _finish(step: Callable[[], None]) -> None:
    """Run ``step``, which can be run again from any statement; where an interrupt cuts it short, end it first."""
    try:
        step()
    except BaseException:
        step()
        raise
