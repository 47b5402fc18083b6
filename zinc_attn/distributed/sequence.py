"""A sequence whose nodes lie on several shards.

The layer lengths of a sequence are the only truth about its tokens. They change by one store: by the commit of an
append, or by a truncation. The tokens of each shard, and the nodes, follow from them. A call therefore names the
sequences that it is going to change (``Shards.touch``). After a failure, or an interrupt between any two bytecodes,
``settle`` makes the shards and the nodes agree with the lengths.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..cache.pages import PagePool
from ..cache.sequence import Sequence, sequence_text
from ..cache.sequence_pages import SequencePages
from ..cache.transaction import Transaction
from ..canonical.constants import KEYS_PER_NODE
from ..checks import Uncopied, check_int, described
from ..limits import MAX_CONTEXT, MAX_PAGE_SIZE
from .nodes import Node
from .shards import Shards


class LayerLengths(SequencePages):
    """The lengths of a sequence's layers, with the step rule and the errors of a Sequence.

    The pages stand for no memory: the pool of each sequence is its own, and holds the longest context.
    """

    def __init__(self, num_layers: int, length: int = 0) -> None:
        super().__init__(PagePool(2 * MAX_CONTEXT // MAX_PAGE_SIZE, MAX_PAGE_SIZE), num_layers)  # twice, for ``keep``
        if length:
            with Transaction() as transaction:
                transaction.reserve(self, 0, length, tuple(range(1, num_layers)))


class ShardedSequence(Uncopied, instead="fork() shares its tokens"):
    """A sequence whose nodes lie on several shards, from ``ShardedKVCache.new_sequence``.

    serial: its number among the sequences of the cache. A sequence that is garbage collected gives its pages back.
    """

    def __init__(self, cache: Shards, parent: ShardedSequence | None = None) -> None:
        self.cache, self.serial = cache, cache.created
        length = len(parent) if parent else 0
        self.lengths_of = LayerLengths(cache.num_layers, length)
        self.shards: dict[int, Sequence] = {
            i: parent.shards[i].fork() if parent else shard_cache.new_sequence()
            for i, shard_cache in cache.shards.items()
        }
        self.holding = cache.allocator.hold(self.serial, self)
        if parent:
            cache.allocator.share_nodes(self.holding, parent.holding, length // KEYS_PER_NODE)
        self._owners: tuple[tuple[Node, ...], NDArray[np.int64]] = (), np.zeros(0, np.int64)
        cache.created = self.serial + 1  # assigned last, so that a failed constructor uses up no serial number

    def __repr__(self) -> str:
        return described(self, lambda: sequence_text(self.serial, self.lengths_of))

    def __len__(self) -> int:
        return len(self.lengths_of)

    def __bool__(self) -> bool:
        return True

    @property
    def lengths(self) -> list[int]:
        """The tokens of each layer. They differ only while a step goes through the layers."""
        return self.lengths_of.lengths

    @property
    def closed(self) -> bool:
        """Whether ``free`` was called."""
        return self.lengths_of.closed

    @property
    def held(self) -> tuple[Node, ...]:
        """The nodes of this sequence, in token order."""
        return self.holding.nodes

    @property
    def owners(self) -> NDArray[np.int64]:
        """(nodes,) The shard of each node. Read it, do not write it."""
        nodes = self.holding.nodes
        known, owners = self._owners
        if known is not nodes:
            owners = np.array([node.shard for node in nodes], np.int64)
            self._owners = nodes, owners
        return owners

    def nodes(self, shard: int, tokens: int) -> NDArray[np.int64]:
        """The numbers of the nodes that ``shard`` holds of the first ``tokens`` tokens."""
        return np.flatnonzero(self.owners[: -(-tokens // KEYS_PER_NODE)] == shard)

    def tokens(self, shard: int, tokens: int) -> int:
        """How many of the first ``tokens`` tokens ``shard`` holds."""
        begins = self.nodes(shard, tokens) * KEYS_PER_NODE
        return int(np.minimum(tokens - begins, KEYS_PER_NODE).sum())

    def positions_on(self, shard: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """The places of the tokens at ``positions``, all of which ``shard`` holds, in its own sequence."""
        nodes, offsets = np.divmod(positions, KEYS_PER_NODE)
        return np.asarray(np.searchsorted(np.flatnonzero(self.owners == shard), nodes) * KEYS_PER_NODE + offsets)

    def fork(self) -> ShardedSequence:
        """Return a second sequence with the same tokens, which shares pages as ``Sequence.fork`` does.

        Every rank calls it. StepError unless all layers have the same length; ClosedError after ``free``.
        """
        with self.cache.lock:
            self.cache.check_open()
            self.cache.settle()
            self.lengths_of.fork().free()  # raises where it cannot be
            return ShardedSequence(self.cache, self)

    def truncate(self, n: int) -> None:
        """Keep the first ``n`` tokens, at most len(self). Every rank calls it."""
        with self.cache.lock:
            self.cache.check_open()
            self.cache.settle()
            self.lengths_of.check_open()
            n = check_int("n", n, 0, len(self))
            self.cache.touch(self)
            self.lengths_of.truncate(n)  # from here on it is truncated
            self.cache.end()

    def drop_last(self, n: int) -> None:
        """Take the last ``n`` tokens back, at most len(self). Every rank calls it."""
        with self.cache.lock:
            self.cache.check_open()
            self.lengths_of.check_open()
            self.truncate(len(self) - check_int("n", n, 0, len(self)))

    def keep(self, rows: Any, last: int) -> None:
        """Keep ``rows`` of the ``last`` tokens, as ``Sequence.keep`` does. Every rank calls it.

        A row that moves to a node of another shard travels through the host.
        """
        self.cache.keep_rows(self, rows, last)

    def free(self) -> None:
        """Give the pages back. Every rank calls it. The sequence cannot be used any more."""
        with self.cache.lock:
            self.cache.touch(self)
            self.lengths_of.free()
            self.cache.end()

    def settle(self) -> None:
        """Give up the tokens and nodes beyond the layer lengths.

        It can be cut short and done again. Nothing happens if the shards already have these lengths.
        """
        if transaction := self.lengths_of.open_transaction():
            for cache in self.cache.shards.values():
                cache.device.flush()  # submissions that may write to its pages
            transaction.rollback()
        lengths = self.lengths
        for shard, sequence in self.shards.items():
            if self.lengths_of.closed:
                sequence.free()
                continue
            counts = {n: self.tokens(shard, n) for n in set(lengths)}
            if len(set(counts.values())) == 1:
                sequence.truncate(counts[lengths[0]])
                continue
            for layer, n in enumerate(lengths):
                if sequence.lengths[layer] > counts[n]:
                    sequence.retract(layer, counts[n])
        full, rest = divmod(max(lengths), KEYS_PER_NODE)
        self.cache.allocator.truncate(self.holding, full + (rest > 0), rest > 0)
