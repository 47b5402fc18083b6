"""The common state of a sharded cache, its sequences and its calls, and how a failed call is undone."""

import weakref
from threading import RLock
from typing import Any, Protocol

import numpy as np

from ..cache.kv_cache import KVCache
from ..cache.transaction import Transaction
from ..canonical.constants import KEYS_PER_NODE
from ..checks import Uncopied
from ..errors import ClosedError
from ..shapes import AttnShape
from .descriptors import CallDescriptor
from .nodes import Holding, NodeAllocator, deal
from .ranks import Ranks


class Changing(Protocol):
    """A sequence that a call changes."""

    @property
    def closed(self) -> bool: ...

    def settle(self) -> None: ...


class Shards(Uncopied, instead="make one on each rank"):
    """The local shards of a sharded cache, the nodes of its sequences, and which of these the current call changes.

    shards: the local ones, by number; owners: the shards of a sequence that fills the cache; created: how many
    sequences were created, which are numbered in this order; ranks: None where all shards are local; capacity: tokens
    over all sequences, as the cache was asked for, which holds whole nodes of 512; touched: the sequences that the call
    changes. A call holds ``lock``, looks at sequences after ``settle``, names each that it changes (``touch``), and
    calls ``end`` unless it was committed.
    """

    def __init__(
        self, shape: AttnShape, num_layers: int, capacity: int, shares: list[float], ranks: Ranks | None
    ) -> None:
        self.shape, self.num_layers, self.ranks, self.capacity = shape, num_layers, ranks, capacity
        self.allocator = NodeAllocator(shares, deferred=ranks is not None)
        self.owners = deal(-(-capacity // KEYS_PER_NODE), shares)
        self.allocator.capacity[:] = np.maximum(np.bincount(self.owners, minlength=len(shares)), 1)
        self.shards: dict[int, KVCache] = {}
        self.created = 0
        self.lock, self._open = RLock(), True
        self.touched: tuple[weakref.ReferenceType[Changing], ...] = ()
        # of a call that moves rows: after the commit, shared nodes of the holding from this number on are replaced
        self.moving: tuple[Transaction, Holding, int] | None = None

    def check_open(self) -> None:
        """ClosedError after ``close``."""
        if not self._open:
            raise ClosedError("ShardedKVCache: used after close()")

    def touch(self, seq: Changing) -> None:
        """Note, under the lock, that the current call is going to change ``seq``."""
        self.touched = (*self.touched, weakref.ref(seq))

    def settle(self) -> None:
        """Settle, under the lock and before a call looks at sequences, what an interrupted call left."""
        if self.touched:
            self.end()

    def end(self) -> None:
        """Settle the sequences that the current call touched. An interrupt leaves it to the next call."""
        if self.moving and self.moving[0].state == "committed":
            self.allocator.replace_shared(*self.moving[1:])
        self.moving = None
        for reference in self.touched:
            seq = reference()
            if seq is not None and (self._open or seq.closed):
                seq.settle()
        self.touched = ()

    def keep_rows(self, seq: Any, rows: Any, last: int) -> None:
        """See ``ShardedSequence.keep``; ShardedKVCache has the call."""
        raise NotImplementedError

    def exchange(self, data: bytes, call: CallDescriptor) -> list[bytes]:
        """Return the ``data`` of every rank, by rank; see ``Ranks.exchange``.

        The exchange also tells which sequences were garbage collected on each rank. Every rank discards all of them.
        """
        if self.ranks is None:
            return [data]
        serials = " ".join(map(str, self.allocator.collected()))
        answers = [answer.split(b"\n", 1) for answer in self.ranks.exchange(serials.encode() + b"\n" + data, call)]
        self.allocator.discard(set.intersection(*(set(map(int, numbers.split())) for numbers, _ in answers)))
        return [payload for _, payload in answers]
