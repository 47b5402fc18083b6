"""A page table's appends as transactions of their own, and everything that a refusal, a rollback or a Ctrl-C leaves."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from interrupts import Interrupter, moments, opcodes

from zinc_attn.cache.pages import PagePool
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
    tables = [(list(seq.pages), list(seq.lengths)) for seq in seqs]
    counts = pool.counts()
    return pool.free_pages, sorted(counts.free), counts.extra, tables


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
    for at in moments(count, 10**9, seed=1)[: count + pairs]:
        seqs = world()
        interrupter = Interrupter(where, *at)
        with suppress(KeyboardInterrupt):
            interrupter.run(lambda seqs=seqs: call(*seqs))
        hits += bool(interrupter.raised)
        assert seen(seqs) in ends, (at, interrupter.raised)
        check(seqs)
    return hits
