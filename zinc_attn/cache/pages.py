"""The pages of a pool by sequence and token: host bookkeeping of a paged KV cache; no device.

A page is ``page_size`` token slots, and one page id names the same slots in the K and V buffers of every layer, so
a sequence has one block table for all layers: token ``t`` lies in slot ``t % page_size`` of ``pages[t // page_size]``.
Each layer counts its own tokens. A step appends the same number of tokens to every layer, in any order of layers;
within a step the layers hold at most two different counts, and ``len(seq)`` is the smaller one.

Sequences share pages (``fork``). A page is written only by a sequence that holds it alone: the first layer of a step
replaces a shared, partly filled page by a copy (all layers' K and V), and the other layers find it replaced. Where a
transaction replaces a page in all tables but one, the sequence of that table may write to the page: its new rows come
after the tokens that any holder has before the commit.

Invariants: a table has ceil(max(lengths) / page_size) pages, no page twice; a free page has no holder (table or open
transaction). Free pages are ordered by rank, so a page that comes back is allocated again in its place. Calls are not
locked here: the owner of the pool serializes them, but for plain reads.

An interrupt (Ctrl-C) between any two bytecodes leaves every call done or not done, and no page lost:

- Only the holders know who holds what. A sequence (``sequence_pages``) has one immutable state, and an open transaction
  (``transaction``) a tuple of reservations with their pages; either changes by one store. All reservations of a
  transaction count by one store, too: that of its ``Commit``.
- The free list and the numbers of holders follow from these: the pool's ``PageCounts``. A call that changes them
  takes them off the pool first and puts them back at its end. Without them, or when a holder dies, calls count anew.

Source of the idea: PagedAttention (Kwon et al. 2023).
"""

from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heappush
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from ..checks import check_int, shown
from ..errors import ArgumentError, ZincAttnError
from ..limits import MAX_PAGE_SIZE
from ..runtime.registry import Registry

MIN_PAGE_SIZE: Final = 1  # tokens
MAX_PAGES: Final = (1 << 32) - 1  # block tables hold uint32


class StepError(ArgumentError):
    """A layer was asked for out of step with the others, or a sequence while a reservation of it is open."""


class CapacityError(ZincAttnError):
    """The pool has too few free pages; the message says how many tokens fit."""


class PageHolder(Protocol):
    """A sequence, as the pool sees it."""

    def held(self) -> tuple[tuple[int, ...], ...]:
        """Its block table, and what an open transaction holds for it; no page is in both."""


class PageCounts:
    """Numbers that follow from the holders of pages; changed only while they are off the pool.

    free: a heap of the ranks of the pages that nobody holds; extra: the holders minus one of each page with several.
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
    """``num_pages`` pages of ``page_size`` tokens (a power of two from 1 to 65536), with reference counts.

    order: a permutation of the page ids, in which free pages are taken; default: lowest id first. asked: the capacity
    that the owner was asked for, in tokens, which errors name; default: all tokens of the pages.
    """

    def __init__(
        self, num_pages: int, page_size: int, order: Sequence[int] | None = None, asked: int | None = None
    ) -> None:
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
        self.asked = self.capacity if asked is None else asked
        # a sequence or an open transaction that dies is noted in ``sequences.dead``
        self.sequences: Registry[PageHolder] = Registry()
        self._counts: PageCounts | None = None

    @property
    def capacity(self) -> int:
        """Tokens per layer that all pages hold together."""
        return self.num_pages * self.page_size

    @property
    def free_pages(self) -> int:
        """Pages that nobody holds. Changes nothing, so any thread may ask."""
        counts = self._counts
        return len((self._count() if counts is None or self.sequences.dead else counts).free)

    def pages_for(self, tokens: int) -> int:
        """Pages that hold ``tokens`` tokens."""
        return -(-tokens // self.page_size)

    def is_shared(self, page: int) -> bool:
        """Whether more than one holder has a page that is in use."""
        return page in self.counts().extra

    def counts(self) -> PageCounts:
        """The counts, made anew after an interrupted call or the death of a holder."""
        if self.sequences.dead:
            self._counts = None
            self.sequences.purge()
        if self._counts is None:
            self._counts = self._count()
        return self._counts

    def begin_update(self) -> PageCounts:
        """The counts, off the pool: from here on an interrupt makes the next call count again."""
        counts = self.counts()
        self._counts = None
        return counts

    def end_update(self, counts: PageCounts) -> None:
        """Put the counts back, unless a finalizer used the pool meanwhile: then the next call counts again."""
        self._counts = counts if self._counts is None else None

    def drop_counts(self) -> None:
        """Count again in the next call, because the counts are in doubt."""
        self._counts = None

    def _count(self) -> PageCounts:
        holders = np.zeros(self.num_pages, np.int64)
        for sequence in self.sequences:
            for pages in sequence.held():
                holders[np.array(pages, np.int64)] += 1  # no page is twice in a tuple
        return PageCounts(self._order, self._rank, holders)
