"""A page table's appends as transactions of their own, and everything that a refusal or a rollback must leave."""

from __future__ import annotations

from typing import Any

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
