"""The shard of each node of 512 tokens. Host bookkeeping of sharded sequences: no device and no rank.

Invariants: a node lies on one shard for as long as any holding has it; several holdings share full nodes only. Calls
are not locked here: the owner of the allocator serializes them.

An interrupt leaves every call done or not done, as in ``cache.pages``: each holding has one immutable tuple of nodes,
which changes by one store, and the counts of nodes follow from the holdings.
"""

import math
import weakref
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ..checks import shown
from ..errors import ArgumentError
from ..runtime.registry import Registry

MAX_WEIGHT: Final = 2.0**512  # of a shard, so that sums of weights stay finite


class Node:
    """A node of 512 tokens on ``shard``."""

    __slots__ = ("shard",)

    def __init__(self, shard: int) -> None:
        self.shard = shard


class Holding:
    """The nodes of one sequence, in token order. The allocator keeps it when its owner is garbage collected."""

    __slots__ = ("nodes", "owner")

    def __init__(self, owner: Any) -> None:
        self.owner: weakref.ReferenceType[Any] = weakref.ref(owner)
        self.nodes: tuple[Node, ...] = ()


class _Counts:
    """Numbers that follow from the holdings; changed only while they are off the allocator.

    used: (shards,) the nodes on each shard, where a shared node counts once; holders: the holdings of each node.
    """

    __slots__ = ("holders", "used")

    def __init__(self, shards: int) -> None:
        self.used = np.zeros(shards, np.int64)
        self.holders: dict[Node, int] = {}

    def add(self, nodes: Iterable[Node]) -> None:
        """Count one holder more for each of ``nodes``."""
        for node in nodes:
            holders = self.holders.get(node, 0)
            self.holders[node] = holders + 1
            self.used[node.shard] += holders == 0

    def release(self, nodes: Iterable[Node]) -> None:
        """Count one holder less for each of ``nodes``."""
        for node in nodes:
            holders = self.holders.pop(node) - 1
            if holders:
                self.holders[node] = holders
            else:
                self.used[node.shard] -= 1


class NodeAllocator:
    """Gives each new node to the shard that lacks most of its weight's share of all nodes that are held.

    A shard that holds its ``capacity``, in nodes, is passed over while another shard has room. Equal calls allocate
    equal shards. An owner that is garbage collected gives its nodes back at once, or, with ``deferred``, when
    ``discard`` is called with its serial number: ranks collect a sequence at different times.
    """

    def __init__(self, weights: Seq[float], *, deferred: bool = False) -> None:
        self.share = _shares(weights)
        self.capacity = np.full(self.share.size, np.inf)
        self.deferred = deferred
        self._holdings: dict[int, Holding] = {}  # by the serial number of the owner
        self._owners: Registry[Any] = Registry()
        self._counts: _Counts | None = None

    @property
    def used(self) -> NDArray[np.int64]:
        """(shards,) The nodes that each shard holds, as a copy."""
        return self._counted().used.copy()

    def is_shared(self, node: Node) -> bool:
        """Whether more than one holding has ``node``."""
        return self._counted().holders.get(node, 0) > 1

    def hold(self, serial: int, owner: Any) -> Holding:
        """Return an empty holding for ``owner``, whose number ``serial`` no other live owner has."""
        self._owners.add(owner)
        holding = Holding(owner)
        self._holdings[serial] = holding
        return holding

    def allocate(self, holding: Holding, count: int) -> None:
        used = self.used
        shards = [_next_shard(self.share, used, self.capacity) for _ in range(count)]
        self._change(holding, len(holding.nodes), map(Node, shards))

    def share_nodes(self, holding: Holding, other: Holding, full: int) -> None:
        """Let the empty ``holding`` share the first ``full`` nodes of ``other``.

        If a partly filled node follows them, it gets a node of its own on the same shard.
        """
        partly = [Node(node.shard) for node in other.nodes[full:]]
        self._change(holding, 0, (*other.nodes[:full], *partly))

    def truncate(self, holding: Holding, count: int, partial: bool) -> None:
        """Keep the first ``count`` nodes of ``holding``; ``partial`` says that the last of them is partly filled.

        If that node is shared, a new node on the same shard replaces it, since later tokens come into it.
        """
        last = holding.nodes[count - 1] if partial else None
        if last is not None and self.is_shared(last):
            self._change(holding, count - 1, [Node(last.shard)])
        elif len(holding.nodes) > count:
            self._change(holding, count)

    def replace_shared(self, holding: Holding, first: int) -> None:
        """Replace shared nodes of ``holding``, from number ``first`` on, by nodes of its own on the same shards."""
        nodes = [Node(node.shard) if self.is_shared(node) else node for node in holding.nodes[first:]]
        self._change(holding, first, nodes)

    def collected(self) -> list[int]:
        """Return the serial numbers of the owners that were garbage collected and whose nodes still count."""
        holdings = tuple(self._holdings.items())
        return [serial for serial, holding in holdings if holding.nodes and holding.owner() is None]

    def discard(self, serials: Iterable[int]) -> None:
        """Release the nodes of owners that every rank has collected."""
        gone = set(serials)
        if gone:
            self._counts = None
            self._holdings = {serial: holding for serial, holding in self._holdings.items() if serial not in gone}

    def _change(self, holding: Holding, kept: int, new: Iterable[Node] = ()) -> None:
        """Replace the nodes of ``holding`` from number ``kept`` on by ``new``."""
        old, new = holding.nodes, tuple(new)
        counts = self._counted()
        self._counts = None  # from here on an interrupt makes the next call count again
        holding.nodes = old[:kept] + new
        counts.add(new)
        counts.release(old[kept:])
        self._counts = counts

    def _counted(self) -> _Counts:
        """The counts, made anew after an interrupted call or the death of an owner."""
        if self._owners.dead:
            self._counts = None
            self._owners.purge()
        if self._counts is None:
            self._counts = self._count()
        return self._counts

    def _count(self) -> _Counts:
        counts = _Counts(self.share.size)
        for serial, holding in tuple(self._holdings.items()):
            if holding.owner() is None and not (self.deferred and holding.nodes):
                self._holdings.pop(serial, None)
            else:
                counts.add(holding.nodes)
        return counts


def deal(nodes: int, weights: Seq[float]) -> NDArray[np.int64]:
    """Return the shard of each of ``nodes`` nodes, (nodes,).

    Each shard has its weight's share of any number of nodes, within one node. A node's shard changes no output bit.
    """
    share = _shares(weights)
    used, capacity = np.zeros(share.size, np.int64), np.full(share.size, np.inf)
    return np.array([_next_shard(share, used, capacity) for _ in range(nodes)], np.int64)


def _next_shard(share: NDArray[np.float64], used: NDArray[np.int64], capacity: NDArray[np.float64]) -> int:
    """Return the shard that gets the next node, and count the node in ``used``."""
    lack = share * (used.sum() + 1) - used
    if np.any(used < capacity):
        lack[used >= capacity] = -np.inf
    shard = int(np.argmax(lack))
    used[shard] += 1
    return shard


def _shares(weights: Seq[float]) -> NDArray[np.float64]:
    """``weights`` divided by their sum, (shards,)."""
    numbers = np.asarray(weights, np.float64)
    if numbers.ndim != 1 or not numbers.size or not np.all(numbers <= MAX_WEIGHT) or np.any(numbers <= 0):
        raise ArgumentError(
            f"weights: got {shown(list(weights))}, expected positive numbers of at most 2**512, one per shard"
        )
    return np.asarray(numbers / math.fsum(numbers))
