"""The recordings that sequences need while they grow by a step at a time, up to a last length."""

from dataclasses import dataclass, field
from itertools import groupby, pairwise
from operator import itemgetter
from typing import Final

import numpy as np

from ..canonical.constants import KEYS_PER_LEAF, LEAVES_PER_NODE
from .call import plan_call
from .inputs import CallFacts, CallOptions, Request
from .splits import first_seen
from .submission import RecordingKey, Submission

Keys = list[RecordingKey]  # of the submissions of a call, in order
TURNS: Final = (-1, 0, 1, 2)  # keys beyond whole leaves that the row before a cut sees at the planned lengths


def growth_keys(
    tokens: int, batch: int, q_len: int, options: CallOptions, facts: CallFacts, *, by_rule: bool = False
) -> set[RecordingKey]:
    """The key of every submission of calls on ``batch`` sequences that share nothing and grow together to ``tokens``
    keys, ``q_len`` (at most ``tokens``) new rows a call. by_rule: by the split rule; else each leaf's ends are planned.
    """
    growth = _Growth(tokens, batch, q_len, options, facts)
    leaves = range((q_len - 1) // KEYS_PER_LEAF, -(-tokens // KEYS_PER_LEAF))
    if by_rule and q_len == 1:
        growth.by_runs(leaves)
    else:  # several rows of a sequence share nodes, and how many is not monotone
        for leaf in leaves:
            growth.leaf(leaf)
    return growth.known


@dataclass(eq=False)
class _Growth:
    """A search for the lengths at which keys change. known: the keys of all lengths that were planned."""

    tokens: int
    batch: int
    q_len: int
    options: CallOptions
    facts: CallFacts
    known: set[RecordingKey] = field(default_factory=set)

    def submissions_at(self, length: int) -> tuple[Submission, ...]:
        """The submissions of a call after which the sequences have ``length`` keys."""
        pages = -(-length // self.facts.page_size)
        tables = np.arange(self.batch * pages, dtype=np.uint32).reshape(self.batch, pages)
        requests = [Request(self.q_len, length, self.q_len, table) for table in tables]
        submissions = plan_call(requests, self.options, self.facts).submissions
        self.known.update(submission.key for submission in submissions)
        return submissions

    def keys_at(self, length: int) -> Keys:
        """The keys of ``submissions_at(length)``."""
        return [submission.key for submission in self.submissions_at(length)]

    def ends(self, leaf: int) -> tuple[int, int]:
        """The first and the last of the lengths that end in a leaf."""
        return max(leaf * KEYS_PER_LEAF + 1, self.q_len), min((leaf + 1) * KEYS_PER_LEAF, self.tokens)

    def leaf(self, leaf: int) -> list[Keys]:
        """The keys at both ends of a leaf; the keys of all lengths between them are recorded, too.

        Within a leaf sizes only grow or only shrink, so lengths between two ends of equal keys have the same keys. A
        call that is cut into submissions is the exception: a submission has other sizes as soon as its last row sees a
        new leaf. So the lengths around that length are planned, too.
        """

        def search(begin: int, begin_keys: Keys, end: int, end_keys: Keys) -> None:
            if begin_keys != end_keys and end - begin > 1:
                middle = (begin + end) // 2
                keys = self.keys_at(middle)
                search(begin, begin_keys, middle, keys)
                search(middle, keys, end, end_keys)

        begin, end = self.ends(leaf)
        first = self.submissions_at(begin)
        cuts = {piece.begin for submission in first for piece in submission.slices if piece.begin}
        turns = {begin + (self.q_len - cut + turn - begin) % KEYS_PER_LEAF for cut in cuts for turn in TURNS}
        lengths = [begin, *sorted(length for length in turns if begin < length < end), end]
        planned = [[submission.key for submission in first], *(self.keys_at(length) for length in lengths[1:])]
        for here, there in pairwise(zip(lengths, planned, strict=True)):
            search(*here, *there)
        return [planned[0], planned[-1]]

    def by_runs(self, leaves: range) -> None:
        """Find the keys of one query row under the split rule, for which few leaves stand for all.

        A block is a leaf, or, with a window, a node, whose leaves stand for those of equal numbers in other nodes. In a
        run of blocks the window has begun to move in all or in none. From block to block of a run sizes only grow. So
        blocks between two blocks of equal keys have the same keys, if each call is one submission, or parts of one row.
        """
        size = 1 if self.options.window is None else LEAVES_PER_NODE
        blocks = range(leaves.start // size, -(-leaves.stop // size))

        def block_keys(block: int) -> list[Keys]:
            return [keys for leaf in _within(leaves, block * size, size) for keys in self.leaf(leaf)]

        def run_of(block: int) -> object:
            if block in (blocks[0], blocks[-1]):  # these may be parts of blocks
                return block
            lengths = [length for leaf in _within(leaves, block * size, size) for length in self.ends(leaf)]
            return [first_seen(n, self.q_len, self.options.window) > 0 for n in lengths]

        def search(begin: int, begin_keys: list[Keys], end: int, end_keys: list[Keys]) -> None:
            alike = begin_keys == end_keys and (self.batch == 1 or all(len(keys) == 1 for keys in end_keys))
            if not alike and end - begin > 1:
                middle = (begin + end) // 2
                keys = block_keys(middle)
                search(begin, begin_keys, middle, keys)
                search(middle, keys, end, end_keys)

        for _, run in groupby(blocks, run_of):
            first, last = itemgetter(0, -1)(list(run))
            search(first, block_keys(first), last, block_keys(last))


def _within(leaves: range, begin: int, size: int) -> range:
    """The part of ``leaves`` within the ``size`` leaves from ``begin`` on."""
    return range(max(begin, leaves.start), min(begin + size, leaves.stop))
