"""The room of a ZincCache: how many tokens it has memory for, and refusals in the words that it was asked for in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ...cache.pages import CapacityError
from ...checks import check_int
from ...errors import ArgumentError, LimitError
from ...limits import MAX_CONTEXT


@dataclass(frozen=True)
class BatchRoom:
    """``max_cache_len`` tokens for each of ``max_batch`` batch rows, in pages of ``page_size`` tokens."""

    max_cache_len: int
    max_batch: int
    page_size: int

    @classmethod
    def checked(cls, max_cache_len: int | None, capacity: int | None, max_batch: int, page_size: int) -> BatchRoom:
        """The room that was asked for. LimitError: too many tokens. capacity: the earlier name of max_cache_len."""
        if (max_cache_len is None) == (capacity is None):
            both = "none" if capacity is None else "both it and capacity, its earlier name"
            raise ArgumentError(f"max_cache_len: got {both}, expected tokens per batch row, for example 4096")
        room = cls(
            check_int("max_cache_len", capacity if max_cache_len is None else max_cache_len, 1, MAX_CONTEXT),
            check_int("max_batch", max_batch, 1, MAX_CONTEXT),
            page_size,
        )
        if room.tokens > MAX_CONTEXT:
            raise LimitError(f"{room}, expected at most {MAX_CONTEXT:,} tokens together, in whole pages")
        return room

    @property
    def tokens(self) -> int:
        """Tokens of all rows in whole pages; of several rows each has one more: beams copy a partly filled page."""
        pages = -(-self.max_cache_len // self.page_size) + int(self.max_batch > 1)
        return pages * self.max_batch * self.page_size

    def __str__(self) -> str:
        return f"max_cache_len, max_batch: got {self.max_cache_len:,} tokens for each of {self.max_batch:,} batch rows"

    def check_row(self, tokens: int, grown: int) -> None:
        """Refuse to let a batch row of ``tokens`` tokens grow to ``grown`` where these are too many."""
        if grown > self.max_cache_len:
            raise CapacityError(
                f"ZincCache: got {grown - tokens:,} new tokens for a batch row of {tokens:,}, expected at most "
                f"{max(self.max_cache_len - tokens, 0):,} (max_cache_len = {self.max_cache_len:,} tokens per batch "
                "row); make the ZincCache with a larger max_cache_len, or crop() or reset() it"
            )

    @contextmanager
    def named(self) -> Iterator[None]:
        """Name the request where the memory is full though no row is, because forks have taken it."""
        try:
            yield
        except CapacityError as error:
            raise CapacityError(
                f"ZincCache: this cache and its forks have memory for max_batch = {self.max_batch:,} rows of "
                f"max_cache_len = {self.max_cache_len:,} tokens together, which is full; reset() forks, or make the "
                "ZincCache with a larger max_batch"
            ) from error
