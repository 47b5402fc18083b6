"""Which shard holds which node: the deal, the counts, and that no interrupt loses a node or leaves a call half done."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cache_rows import check_books
from interrupts import files
from page_tables import interrupt_everywhere
from support import FULL

import zinc_attn as za
from zinc_attn.cache.pages import PagePool
from zinc_attn.cache.sequence_pages import SequencePages
from zinc_attn.cache.transaction import Transaction
from zinc_attn.distributed.nodes import NodeAllocator, deal
from zinc_attn.errors import ArgumentError


class Owner:
    """Whatever holds nodes."""


def test_dealing_keeps_the_shares():
    owners = deal(1000, [3.0, 1.0, 4.0])
    for n in range(1, 1000, 37):
        counts = np.bincount(owners[:n], minlength=3)
        assert np.all(np.abs(counts - n * np.array([3, 1, 4]) / 8) <= 1.5)
    for bad in ([], [1.0, 0.0], [float("nan")], [2.0**513]):
        with pytest.raises(ArgumentError, match=r"^weights: got .*, expected positive numbers of at most 2\*\*512"):
            deal(5, bad)


@pytest.mark.parametrize("seed", range(5))
def test_no_shard_is_filled_beyond_its_capacity_before_all_are_full(seed):
    rng = np.random.default_rng(seed)
    for _ in range(40):
        weights, nodes = rng.uniform(1, 3, rng.integers(1, 6)), int(rng.integers(1, 30))
        allocator = NodeAllocator(list(weights))
        allocator.capacity[:] = np.bincount(deal(nodes, list(weights)), minlength=len(weights))
        owner, held = Owner(), []
        for serial in range(100):
            if len(held) < nodes and (not held or rng.random() < 0.7):
                held.append(allocator.hold(serial, owner))
                allocator.allocate(held[-1], 1)
            else:
                allocator.truncate(held.pop(int(rng.integers(len(held)))), 0, False)
            used = allocator.used
            assert np.all(used <= allocator.capacity) and used.sum() == len(held)
        allocator.allocate(allocator.hold(100, owner), nodes - len(held) + 1)
        assert allocator.used.sum() == nodes + 1


def test_what_an_owner_leaves_counts_until_every_rank_has_collected_it():
    for deferred in (False, True):
        allocator = NodeAllocator([1.0, 1.0], deferred=deferred)
        owners = [Owner(), Owner(), Owner()]
        for serial, owner in enumerate(owners[:2]):
            allocator.allocate(allocator.hold(serial, owner), 4)
        allocator.hold(2, owners[2])  # has no nodes, so nobody waits for it
        del owner, owners[1:]
        gc.collect()
        assert allocator.used.tolist() == ([4, 4] if deferred else [2, 2])
        assert allocator.collected() == ([1] if deferred else [])
        allocator.discard(allocator.collected())
        assert (allocator.used.tolist(), allocator.collected()) == ([2, 2], [])


# --- an interrupt at every bytecode -------------------------------------------------------------------------


class HostSequence:
    """A Sequence of a HostShard."""

    def __init__(self, pages: SequencePages) -> None:
        self.pages = pages
        self.truncate, self.retract, self.free = pages.truncate, pages.retract, pages.free

    @property
    def lengths(self) -> list[int]:
        return self.pages.lengths

    def fork(self) -> HostSequence:
        return HostSequence(self.pages.fork())


class HostShard:
    """The cache of a shard, as far as books go: rows are counted, and stored nowhere."""

    def __init__(
        self, device: Any, shape: Any, num_layers: int, tokens: int, dtype: str, page_size: int, **_: Any
    ) -> None:
        self.pool, self.num_layers = PagePool(tokens // page_size, page_size), num_layers
        self.device = SimpleNamespace(flush=lambda: None)  # nothing is under way

    def new_sequence(self) -> HostSequence:
        return HostSequence(SequencePages(self.pool, self.num_layers))

    def check_rows(self, k: Any, v: Any, layer: int) -> tuple[Any, Any, float]:
        return k, v, 0.0

    def append(self, seq: HostSequence, layer: int, k: Any, v: Any) -> None:
        with Transaction() as transaction:
            transaction.reserve(seq.pages, layer, len(k))

    def close(self) -> None:
        pass


class HostCache(za.ShardedKVCache):
    """A sharded cache without devices."""

    make_shard = HostShard  # type: ignore[assignment]


NODES = 12
ROWS = np.zeros((NODES * 512, 1))


def host_cache() -> HostCache:
    devices = [za.Device.__new__(za.Device) for _ in range(2)]
    return HostCache(devices, za.AttnShape(1, 1, 64), 2, NODES * 512, "f32", 512, weights=[1.0, 1.0])


def append(cache: HostCache, seq: za.ShardedSequence, count: int, layers: tuple[int, ...] = (0, 1)) -> None:
    for layer in layers:
        cache.append(seq, layer, ROWS[:count], ROWS[:count])


def check(cache: HostCache, live: list[za.ShardedSequence]) -> None:
    """The lengths of ``live``, all sequences of the cache, are those of the shards, and all have counted the same."""
    check_books(cache, live, collect=False)
    for seq in live:
        full, rest = divmod(max(seq.lengths), 512)
        assert len(seq.held) == full + (rest > 0)
        assert not rest or not cache.allocator.is_shared(seq.held[-1]), "a partly filled node is shared"
        for i, shard in seq.shards.items():
            assert list(shard.lengths) == [seq.tokens(i, n) for n in seq.lengths]


def dropped(cache: HostCache, seq: za.ShardedSequence) -> None:
    """A fork that dies with a node of its own, and the next call that must notice."""
    seq.fork()
    assert cache.free_tokens


Action = Callable[[HostCache, za.ShardedSequence, za.ShardedSequence], object]
ACTIONS: dict[str, Action] = {
    "append": lambda cache, seq, fork: append(cache, fork, 600, (0,)),
    "append, end of a step": lambda cache, seq, fork: append(cache, seq, 300, (1,)),
    "truncate": lambda cache, seq, fork: fork.truncate(700),
    "truncate within a step": lambda cache, seq, fork: seq.truncate(1000),
    "fork": lambda cache, seq, fork: fork.fork(),
    "new": lambda cache, seq, fork: cache.new_sequence(),
    "free": lambda cache, seq, fork: seq.free(),
    "dropped": lambda cache, seq, fork: dropped(cache, fork),
}
BOOKS = files("distributed/nodes.py", "distributed/sequence.py", "runtime/registry.py")
WHERE = {name: BOOKS for name in ACTIONS} | {
    "append": BOOKS | files("distributed/cache.py", "distributed/call.py", "distributed/shards.py")
}


@pytest.mark.parametrize("name", ACTIONS)
def test_an_interrupt_at_any_bytecode_leaves_a_call_done_or_not_done(name):
    cache = host_cache()

    def world() -> list[za.ShardedSequence]:
        seq = cache.new_sequence()
        append(cache, seq, 1200)
        fork = seq.fork()
        append(cache, seq, 300, (0,))
        return [seq, fork]

    def seen(live: list[za.ShardedSequence]) -> Any:
        return [(seq.lengths, seq.lengths_of.closed) for seq in live]

    def check_and_free(live: list[za.ShardedSequence]) -> None:
        live[:] = [seq for seq in live if not seq.lengths_of.closed]  # a freed one may die before the next call
        check(cache, live)
        for seq in live:  # and it goes on: back in step, then a token
            seq.truncate(len(seq))
            append(cache, seq, 1, (0,))
        check(cache, live)
        for seq in live:
            seq.free()
        assert cache.free_tokens == NODES * 512

    call, pairs = partial(ACTIONS[name], cache), 10**9 if FULL else 20
    assert interrupt_everywhere(WHERE[name], world, call, seen, check_and_free, pairs) > 20
