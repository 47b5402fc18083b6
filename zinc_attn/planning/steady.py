"""The key of the calls that a plan serves, and the words of the plan's records that such a steady call writes."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from ..canonical.constants import KEYS_PER_LEAF
from ..kernels.records import Records, Words
from .inputs import CallFacts, CallOptions, Request
from .submission import Submission

SteadyKey = tuple[Hashable, ...]


def pages_per_leaf(page_size: int) -> int:
    """Pages that a leaf lies in."""
    return max(KEYS_PER_LEAF // page_size, 1)


def steady_key(requests: Sequence[Request], options: CallOptions, facts: CallFacts) -> SteadyKey | None:
    """The facts that calls of one plan share: decode steps, of one query row and at most one new row each.

    The calls differ in ``tokens`` and in the pages of their last leaf alone, and agree in the leaf of each sequence's
    last key, with a window also in the leaf of the first key seen, and, where nothing is appended, in the number of
    whole leaves, since only those are shared (a page that gets a new row is no other request's). All other fields of
    the requests, the options and the device belong to the key. A layout that is not the split rule's may be made for
    another of these lengths; no bit depends on it. None for calls that are planned one by one.
    """
    key: list[Hashable] = [options, facts]
    for request in requests:
        q_len, tokens, new_rows, _, stamp, causal, mask, visible, end, shifts = request  # all of its fields
        if q_len != 1 or new_rows > 1 or stamp is None:
            return None
        if visible is not None or mask is not None or shifts is not None:
            return None
        first = 0 if options.window is None else max(tokens - options.window, 0) // KEYS_PER_LEAF
        whole = 0 if new_rows else tokens // KEYS_PER_LEAF
        key.append((-(-tokens // KEYS_PER_LEAF), first, whole, new_rows, stamp, causal, end))
    return tuple(key)


@dataclass(slots=True, eq=False)
class SteadyWords:
    """Views of the words of a submission that a steady call sets: of each slice's items, of the new rows, of the query
    rows wherever they are kept, and of the page tables. firsts: None without a window; lengths: of the call for which
    they were set last; leaf_pages: of a leaf."""

    submission: Submission
    window: int | None
    limits: list[Words]
    firsts: list[Words] | None
    appends: Words
    rows: list[Words]
    tables: Words
    leaf_pages: int
    lengths: list[int] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        submission: Submission,
        window: int | None,
        items: Records,
        appends: Records,
        rows: Sequence[Records],
        tables: Words,
        page_size: int,
    ) -> SteadyWords:
        """The words of records that hold the submission's. window: the options'."""

        def words(name: str) -> list[Words]:
            return [items[name][span] for span in submission.spans]

        firsts, positions = None if window is None else words("first"), [records["position"] for records in rows]
        leaf_pages = pages_per_leaf(page_size)
        return cls(submission, window, words("limit"), firsts, appends["position"], positions, tables, leaf_pages)

    def set(self, requests: Sequence[Request]) -> None:
        """Set the words for requests with the plan's ``steady_key``, from their lengths and page tables."""
        lengths = [request.tokens for request in requests]
        for index, piece in enumerate(self.submission.slices):
            length = lengths[piece.request]
            if self.leaf_pages > 1:  # others have the pages of the plan
                begin = max(length - 1, 0) // KEYS_PER_LEAF * self.leaf_pages
                pages = requests[piece.request].table[begin : begin + self.leaf_pages]
                first = self.submission.tables_at[index] + begin
                self.tables[first : first + len(pages)] = pages
            self.limits[index][...] = length
            for positions in self.rows:
                positions[index] = (length - 1) % 2**32  # -1 of an empty sequence
            if self.firsts is not None and self.window is not None:
                self.firsts[index][...] = max(length - self.window, 0)
        for index, request in enumerate(self.submission.uploads):
            self.appends[index] = lengths[request] - 1
        self.lengths = lengths
