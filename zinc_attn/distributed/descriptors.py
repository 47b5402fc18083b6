"""The facts of a call that the ranks exchange, so that ranks that make different calls notice."""

from __future__ import annotations

import json
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from typing import NamedTuple


class SequenceDescriptor(NamedTuple):
    """One sequence of a call; the ranks compare it field by field.

    serial: its number; length, new: all tokens, the new tokens; rows, owners, query: checksums of the new k and v or
    of the numbers of kept rows, of the shards of its nodes, and of q with the scoring options.
    """

    serial: int
    length: int
    new: int = 0
    rows: int = 0
    owners: int = 0
    query: str = ""


class CallDescriptor(NamedTuple):
    """The call that an exchange belongs to; the ranks compare it field by field.

    created: how many sequences the rank has created so far, forks included.
    """

    name: str = "an exchange"
    layer: int = 0
    sequences: Seq[SequenceDescriptor] = ()
    created: int = 0

    def __str__(self) -> str:
        first = [f", sequence {x.serial} ({x.length:,} tokens, {x.new:,} new)" for x in self.sequences[:1]]
        return "".join([f"{self.name} at layer {self.layer}", *first, " and others" * (len(self.sequences) > 1)])

    def to_bytes(self) -> bytes:
        """The descriptor as one line of JSON."""
        return json.dumps(self).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> CallDescriptor:
        """The inverse of ``to_bytes``."""
        name, layer, sequences, created = json.loads(data)
        return cls(name, layer, [SequenceDescriptor(*fields) for fields in sequences], created)


_ALIKE = "make the same calls with the same arguments on every rank"


def differences(rank: int, theirs: CallDescriptor, first: CallDescriptor) -> Iterator[str]:
    """How the call of ``rank`` differs from ``first``, that of rank 0, and what to do. The first text says why."""
    if theirs.name != first.name:
        yield f"rank {rank} is in {theirs.name}, rank 0 in {first.name}; {_ALIKE}"
    if theirs.layer != first.layer:
        yield f"rank {rank} is at layer {theirs.layer}, rank 0 at layer {first.layer}; {_ALIKE}"
    if len(theirs.sequences) != len(first.sequences):
        batches = f"a batch of {len(theirs.sequences)}, rank 0 one of {len(first.sequences)}"
        yield f"rank {rank} was given {batches}; {_ALIKE}"
    hint = ""
    if theirs.created != first.created:
        hint = (
            f"sequences made: {theirs.created} on rank {rank}, {first.created} on rank 0; call new_sequence() and "
            "fork() alike on every rank"
        )
    for sequence, other in zip(theirs.sequences, first.sequences, strict=True):
        yield from _sequence_differences(rank, first.layer, sequence, other, hint)


def _sequence_differences(
    rank: int, layer: int, sequence: SequenceDescriptor, other: SequenceDescriptor, counts_hint: str
) -> Iterator[str]:
    """How ``sequence`` of ``rank`` differs from ``other`` of rank 0. counts_hint: advice if the counts differ."""
    name = f"sequence {sequence.serial}"
    described = f"{name} ({sequence.length:,} tokens, {sequence.new:,} new)"
    if sequence.serial != other.serial:
        yield f"rank {rank} was given {name}, rank 0 sequence {other.serial}; {counts_hint or _ALIKE}"
    if sequence.length != other.length:
        hint = counts_hint or f"truncate({min(sequence.length, other.length)}) or free() it on every rank"
        lengths = f"at length {sequence.length:,} in layer {layer}, rank 0 at {other.length:,}"
        yield f"rank {rank} has {name} {lengths}; {hint}"
    if sequence.new != other.new:
        yield f"rank {rank} was given k, v of length {sequence.new:,} for {name}, rank 0 of {other.new:,}; {_ALIKE}"
    if sequence.rows != other.rows:
        yield f"rank {rank} was given other rows than rank 0 for {described}; {_ALIKE}"
    if sequence.owners != other.owners:
        hint = counts_hint or "free() it on every rank, and fork(), truncate() and free() alike on all of them"
        yield f"rank {rank} has the nodes of {described} on other ranks than rank 0; {hint}"
    if sequence.query != other.query:
        yield f"rank {rank}: other q or mask, or other options of scores, than rank 0 for {described}; {_ALIKE}"
