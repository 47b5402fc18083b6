"""A page table's appends as transactions of their own, and everything that a refusal, a rollback or a Ctrl-C leaves."""

from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import reduce
from itertools import chain
from typing import Any

from interrupts import Interrupter, moments, opcodes

from zinc_attn.cache.kv_cache import KVCache
from zinc_attn.cache.pages import PagePool
from zinc_attn.cache.rows import NO_ROWS, Largest
from zinc_attn.cache.sequence_pages import SequencePages
from zinc_attn.cache.transaction import Transaction


class Append(Transaction):
    """A transaction with one reservation, ``place``."""

    def __init__(self, seq: SequencePages, layer: int, count: int, also: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.place = self.reserve(seq, layer, count, also)


def append(seq: SequencePages, count: int, layers: int | None = None) -> None:
    """``count`` tokens to the first ``layers`` layers, default all."""
    for layer in range(layers or seq.num_layers):
        Append(seq, layer, count).commit()


def state(pool: PagePool, *seqs: SequencePages) -> Any:
    """Everything that must be as before after a refusal or a rollback."""
    tables = [(seq.table, seq.lengths) for seq in seqs]
    counts = pool.counts()
    return pool.free_pages, sorted(counts.free), counts.extra, tables


def check_counts(pool: PagePool, seqs: Iterable[SequencePages]) -> None:
    """A pool counts the holders of its pages rightly: ``seqs`` are all of its live sequences."""
    counts, holders = pool.counts(), Counter[int]()
    for seq in seqs:
        table, *_ = held = seq.held()
        assert len(set(table)) == len(table) == pool.pages_for(max(seq.lengths)), (table, seq.lengths)
        holders.update(chain(*held))
    free = [pool._order[rank] for rank in counts.free]
    assert sorted([*free, *holders]) == list(range(pool.num_pages)), "a page is lost, or free and in use"
    assert counts.extra == {page: count - 1 for page, count in holders.items() if count > 1}


def largest(cache: KVCache) -> Largest:
    """Magnitudes of K and V that no row of a live sequence exceeds, as far as rows were examined."""
    return reduce(Largest.maximum, (sequence.pages.state.largest for sequence in cache.living), NO_ROWS)


def interrupt_everywhere(
    where: frozenset[str],
    world: Callable[[], list[Any]],
    call: Callable[..., object],
    seen: Callable[[list[Any]], Any],
    check: Callable[[list[Any]], None],
    pairs: int = 10**9,
) -> int:
    """An interrupt before any bytecode of ``call``, and ``pairs`` times two of them, leaves it done or not done.

    world: makes the sequences that ``call`` takes; seen: their state; check: that nothing is lost, and they go on.
    Returns how often an interrupt came.
    """
    seqs = world()
    ends = [seen(seqs)]
    count = opcodes(lambda: call(*seqs), where)
    ends.append(seen(seqs))
    hits = 0
    for moment in moments(count, 10**9, seed=1)[: count + pairs]:
        seqs = world()
        interrupter = Interrupter(where, *moment)
        with suppress(KeyboardInterrupt):
            interrupter.run(lambda seqs=seqs: call(*seqs))
        hits += bool(interrupter.raised)
        assert seen(seqs) in ends, (moment, interrupter.raised)
        check(seqs)
    return hits
