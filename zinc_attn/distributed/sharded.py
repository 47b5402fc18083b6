"""One sequence on several devices, of one process or of MPI ranks, with the bits of one device holding it all.

A sequence's nodes of 512 keys are dealt to the shards in proportion to their weights. Each shard attends its own
nodes (``Attention.partial``), and the partial states are folded once, in the canonical order. Nothing but the partial
states travels: (head_dim + 2) float32 per node, query row and head.

Source of the idea: attention states merge (Ye et al. 2024, FlashInfer; Liu et al. 2023, ring attention).
"""

from __future__ import annotations

import atexit
import ctypes
import importlib.util
import json
import math
import os
import signal
import sys
import time
import weakref
import zlib
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from threading import Event, RLock, Thread, current_thread, main_thread
from types import TracebackType
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..cache.kv_cache import MAX_LAYERS, KVCache
from ..cache.pages import MAX_PAGE_SIZE, CapacityError, PagePool, Reservation, SequencePages, commit_all
from ..cache.sequence import Sequence
from ..canonical.constants import KEYS_PER_NODE, NODE
from ..canonical.partial import PartialState, gather
from ..checks import check_bool, check_float, check_int, shown
from ..decode.attention import Attention
from ..errors import ArgumentError, ClosedError, ShapeError, ZincAttnError
from ..kernels.contract import SCRATCH_BYTES
from ..kernels.dispatches import merge_call
from ..kernels.records import WorkBuffer
from ..limits import MAX_CONTEXT
from ..planning.sizes import padded
from ..runtime.device import Device
from ..runtime.protocol import Buffer, Recording, Use, memory_budget
from ..shapes import AttnShape

F32 = NDArray[np.float32]
T = TypeVar("T")
TIMEOUT_S: Final = 60.0  # that a rank waits for the others in an exchange
FINE, FAILED, FULL, LEFT = b"\0", b"\1", b"\2", b"\3"  # what a rank's part of an exchange starts with
NOTE_BYTES: Final = 512  # of what a rank that gives an exchange up tells the others
GRACE_S: Final = 5.0  # between a rank's error and the end of all, for the others' errors to be printed
MAX_WEIGHT: Final = 2.0**512  # of a shard: sums of weights stay finite
LOST_STATUS: Final = 2  # of a process whose MPI cannot be finalised, for a rank is lost
NO_MPI: Final = (
    "several ranks need mpi4py and an MPI: pip install 'zinc-attn[mpi]', and MPICH or Open MPI from the system or "
    "pip install mpich"
)


class RankError(ZincAttnError):
    """Another rank failed, was lost, or is set up otherwise; the message says which and what."""


class OtherFullError(RankError):
    """A shard of another rank is full; what calls of a ShardedKVCache raise as a CapacityError."""


# --- the fold on a device ----------------------------------------------------------------------------------


class Fold:
    """``fold`` on ``device``, the kernels' pass 2, for partial states from anywhere; ``fold`` itself is NumPy's.

    Buffers and command buffers are kept between calls.
    """

    def __init__(self, device: Device, shape: AttnShape) -> None:
        if not isinstance(device, Device):
            raise ArgumentError(f"device: got {type(device).__name__}, expected a Device")
        if not isinstance(shape, AttnShape):
            raise ArgumentError(f"shape: got {type(shape).__name__}, expected an AttnShape")
        self.device, self.shape, self._open = device, shape, True
        self._made: dict[tuple[int, int, bool], tuple[WorkBuffer, dict[str, Buffer], Recording]] = {}

    def __call__(self, parts: Seq[PartialState]) -> tuple[F32, F32]:
        """out (q_len, q_heads, head_dim) and lse (q_len, q_heads): the bits of ``fold``, and its errors.

        ClosedError after ``close``.
        """
        if not self._open:
            raise ClosedError("Fold: used after close()")
        if not isinstance(parts, (Seq, PartialState)):
            raise ArgumentError(f"parts: got {type(parts).__name__}, expected a list of the PartialStates of one call")
        whole = gather(parts)
        q_len, n, heads, dim = whole.o.shape
        if (heads, dim) != (self.shape.q_heads, self.shape.head_dim):
            raise ShapeError(f"partial states: got {heads} heads of {dim}, expected those of {self.shape}")
        info = self.device.info
        most = min(SCRATCH_BYTES, info.max_buffer_bytes) // (4 * heads * (dim + 2))
        rows = min(max(most // max(n, 1), 1), info.max_workgroups[2])
        with self.device.lock:
            found = [self._rows(whole, at, min(at + rows, q_len), most) for at in range(0, q_len, rows)]
        return np.concatenate([out for out, _ in found]), np.concatenate([lse for _, lse in found])

    def _rows(self, whole: PartialState, begin: int, end: int, most: int) -> tuple[F32, F32]:
        """out and lse of rows [begin, end): one submission."""
        runtime, (_, n, heads, dim), count = self.device.runtime, whole.o.shape, end - begin
        rows = padded(count, self.device.info.max_workgroups[2])
        states_room = padded(n * count, most)
        work, bound, recording = self._made_for(rows, states_room, whole.sinks is not None)
        records = work.rows[:count]
        work.rows["count"][count:] = 0  # surplus rows have no states
        records["state"], records["count"] = np.arange(count) * n, n
        records["unit"], records["unit_leaves"] = whole.span[0], NODE
        if whole.sinks is not None:
            work.sinks[:] = whole.sinks.view(np.uint32)
        runtime.write(bound["work"], work.words)
        runtime.write(bound["states"], np.ascontiguousarray(whole.o[begin:end]).reshape(-1).view(np.uint32))
        pairs = np.stack([whole.m[begin:end], whole.l[begin:end]], axis=-1)
        behind = states_room * heads * dim
        runtime.write(bound["states"], np.ascontiguousarray(pairs).reshape(-1).view(np.uint32), behind)
        runtime.run(recording)
        found, size = runtime.read(bound["out"]).view(np.float32), rows * heads * dim
        return found[:size].reshape(rows, heads, dim)[:count], found[size:].reshape(rows, heads)[:count]

    def _made_for(self, rows: int, states: int, sinks: bool) -> tuple[WorkBuffer, dict[str, Buffer], Recording]:
        """Work words, buffers and the recording for sizes, made once."""
        key = rows, states, sinks
        if key not in self._made:
            runtime, shape = self.device.runtime, self.shape
            work = WorkBuffer(0, rows, 0, 0, np.zeros(shape.q_heads, np.float32) if sinks else None)
            work.set_shape(shape, shape.kv_heads)
            work.set(rows=rows, state_stride=states)
            made: dict[str, Buffer] = {}
            try:
                made["work"] = runtime.buffer(4 * work.words.size, Use.INPUT)
                made["states"] = runtime.buffer(4 * states * shape.q_heads * (shape.head_dim + 2), Use.INPUT)
                made["out"] = runtime.buffer(4 * rows * shape.q_heads * (shape.head_dim + 1), Use.OUTPUT)
                call = merge_call(shape, self.device.info.kind, rows)
                recording = runtime.record([self.device.dispatch(call, made)])
            except BaseException:
                for buffer in made.values():
                    buffer.close()
                raise
            self._made[key] = work, made, recording
        return self._made[key]

    def close(self) -> None:
        """Free the buffers."""
        self._open = False
        for _, buffers, recording in self._made.values():
            recording.close()
            for buffer in buffers.values():
                buffer.close()
        self._made.clear()


# --- who holds what ----------------------------------------------------------------------------------------


@dataclass(eq=False)
class Node:
    """A node of 512 tokens on ``shard``. Sequences share full ones only; ``holders`` of them have it."""

    shard: int
    holders: int = 1


class Dealer:
    """Deals nodes: each goes to the shard that lacks most of its weight's share of the nodes that are held.

    A shard whose ``room``, in nodes, is taken is passed over while another has some. The same calls give the same deal.
    """

    def __init__(self, weights: Seq[float]) -> None:
        share = np.asarray(weights, np.float64)
        if share.ndim != 1 or not share.size or not np.all(share <= MAX_WEIGHT) or np.any(share <= 0):
            raise ArgumentError(
                f"weights: got {shown(list(weights))}, expected positive numbers of at most 2**512, one per shard"
            )
        self.share = share / math.fsum(share)
        self.have, self.room = np.zeros(share.size, np.int64), np.full(share.size, np.inf)

    def take(self) -> Node:
        """A new node."""
        lack = self.share * (self.have.sum() + 1) - self.have
        if np.any(self.have < self.room):
            lack[self.have >= self.room] = -np.inf
        return self.split(int(np.argmax(lack)))

    def split(self, shard: int) -> Node:
        """A new node on ``shard``, where what it starts with lies."""
        self.have[shard] += 1
        return Node(shard)

    def release(self, nodes: Seq[Node]) -> None:
        """One holder less of each of ``nodes``."""
        for node in nodes:
            node.holders -= 1
            self.have[node.shard] -= node.holders == 0


def deal(nodes: int, weights: Seq[float]) -> NDArray[np.int64]:
    """The shard of each of ``nodes`` nodes, (nodes,): after any number of them each has its weight's share, within one.

    Which shard holds a node never shows in the bits.
    """
    dealer = Dealer(weights)
    return np.array([dealer.take().shard for _ in range(nodes)], np.int64)


def _books(num_layers: int, length: int = 0) -> SequencePages:
    """The lengths of a sequence's layers and their step rule, as a Sequence's; the pages stand for no memory."""
    books = SequencePages(PagePool(MAX_CONTEXT // MAX_PAGE_SIZE, MAX_PAGE_SIZE), num_layers)
    for layer in range(num_layers if length else 0):
        books.reserve(layer, length).commit()
    return books


class ShardedSequence:
    """A sequence whose nodes lie on several shards, from ``ShardedKVCache.new_sequence``.

    serial: its number among the cache's sequences; owners: (nodes,) the shard of each of its nodes. One that is garbage
    collected gives its pages back.
    """

    def __init__(self, cache: ShardedKVCache, parent: ShardedSequence | None = None) -> None:
        self.cache, self.held = cache, list[Node]()
        self.owners = np.zeros(0, np.int64)
        self.books = _books(cache.num_layers, len(parent) if parent else 0)
        self.shards: dict[int, Sequence] = {
            i: parent.shards[i].fork() if parent else one.new_sequence() for i, one in cache.shards.items()
        }
        self.serial, cache.made = cache.made, cache.made + 1  # last: what fails takes none

    def __len__(self) -> int:
        return len(self.books)

    def __bool__(self) -> bool:
        return True

    def __del__(self) -> None:
        if held := getattr(self, "held", None):
            self.cache.dropped[self.serial] = held

    @property
    def lengths(self) -> list[int]:
        """Tokens of each layer; they differ only while a step goes through the layers."""
        return self.books.lengths

    def nodes(self, shard: int, tokens: int) -> NDArray[np.int64]:
        """The numbers of the nodes that ``shard`` holds of the first ``tokens`` tokens."""
        return np.flatnonzero(self.owners[: -(-tokens // KEYS_PER_NODE)] == shard)

    def hold(self, held: list[Node]) -> None:
        """``held`` are the nodes of this sequence from now on."""
        self.held, self.owners = held, np.array([node.shard for node in held], np.int64)

    def cut(self, nodes: int) -> None:
        """Give up the nodes from number ``nodes`` on."""
        given_up = self.held[nodes:]
        if given_up:
            self.hold(self.held[:nodes])
            self.cache.dealer.release(given_up)

    def own_tail(self) -> None:
        """A partly filled last node that is shared counts once more: what comes into it is this sequence's own."""
        if len(self) % KEYS_PER_NODE and self.held[-1].holders > 1:
            shared = self.held[-1]
            self.hold([*self.held[:-1], self.cache.dealer.split(shared.shard)])
            self.cache.dealer.release([shared])

    def fork(self) -> ShardedSequence:
        """A second sequence with the same tokens, which shares its pages as ``Sequence.fork``; every rank calls it.

        StepError unless all layers have the same length; ClosedError after ``free``.
        """
        with self.cache.lock:
            self.cache.check_open()
            self.books.fork().free()  # its errors
            child = ShardedSequence(self.cache, self)
            for node in self.held:
                node.holders += 1
            child.hold(list(self.held))
            child.own_tail()
            return child

    def truncate(self, n: int) -> None:
        """Keep the first ``n`` tokens, at most len(self); every rank calls it."""
        with self.cache.lock:
            self.cache.check_open()
            self.books.check_open()
            n = check_int("n", n, 0, len(self))
            try:
                self._truncate(n)
            except BaseException:  # an interrupt between two shards: each step can be done again
                self._truncate(n)
                raise

    def _truncate(self, n: int) -> None:
        for shard, sequence in self.shards.items():
            sequence.truncate(int(np.clip(n - self.nodes(shard, n) * KEYS_PER_NODE, 0, KEYS_PER_NODE).sum()))
        self.books.truncate(n)
        self.cut(-(-n // KEYS_PER_NODE))
        self.own_tail()

    def free(self) -> None:
        """Give the pages back; every rank calls it. The sequence cannot be used any more."""
        with self.cache.lock:
            for sequence in self.shards.values():
                sequence.free()
            self.books.free()
            self.cut(0)


class Item(NamedTuple):
    """What a call gets for a sequence; the ranks compare it field by field.

    serial, length, new: the sequence's number, tokens and new ones; rows, deal, q: checksums of the new k and v, of the
    shards of its nodes, and of q with the scoring.
    """

    serial: int
    length: int
    new: int = 0
    rows: int = 0
    deal: int = 0
    q: str = ""


class Said(NamedTuple):
    """What call an exchange is of, which the ranks compare: its name, layer and items; made: sequences so far."""

    name: str = "an exchange"
    layer: int = 0
    items: Seq[Item] = ()
    made: int = 0

    def __str__(self) -> str:
        one = [f", sequence {item.serial} ({item.length:,} tokens, {item.new:,} new)" for item in self.items[:1]]
        return "".join([f"{self.name} at layer {self.layer}", *one, " and others" * (len(self.items) > 1)])

    def to_bytes(self) -> bytes:
        """One line."""
        return json.dumps(self).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Said:
        """The inverse of ``to_bytes``."""
        name, layer, items, made = json.loads(data)
        return cls(name, layer, [Item(*item) for item in items], made)


def differences(rank: int, theirs: Said, first: Said) -> Iterator[str]:
    """How the call of ``rank`` differs from ``first``, that of rank 0, and what to do; the first one says why."""
    alike = "make the same calls with the same arguments on every rank"
    made = (
        f"sequences made: {theirs.made} on rank {rank}, {first.made} on rank 0; call new_sequence() and fork() alike "
        "on every rank"
    )
    if theirs.name != first.name:
        yield f"rank {rank} is in {theirs.name}, rank 0 in {first.name}; {alike}"
    if theirs.layer != first.layer:
        yield f"rank {rank} is at layer {theirs.layer}, rank 0 at layer {first.layer}; {alike}"
    if len(theirs.items) != len(first.items):
        yield f"rank {rank} was given a batch of {len(theirs.items)}, rank 0 one of {len(first.items)}; {alike}"
    for one, other in zip(theirs.items, first.items, strict=True):
        name = f"sequence {one.serial}"
        of = f"{name} ({one.length:,} tokens, {one.new:,} new)"
        if one.serial != other.serial:
            hint = alike if theirs.made == first.made else made
            yield f"rank {rank} was given {name}, rank 0 sequence {other.serial}; {hint}"
        if one.length != other.length:
            hint = f"truncate({min(one.length, other.length)}) or free() it on every rank"
            hint = hint if theirs.made == first.made else made
            lengths = f"at length {one.length:,} in layer {first.layer}, rank 0 at {other.length:,}"
            yield f"rank {rank} has {name} {lengths}; {hint}"
        if one.new != other.new:
            yield f"rank {rank} was given k, v of length {one.new:,} for {name}, rank 0 of {other.new:,}; {alike}"
        if one.rows != other.rows:
            yield f"rank {rank} was given other k, v than rank 0 for {of}; {alike}"
        if one.deal != other.deal:
            hint = "free() it on every rank, and fork(), truncate() and free() alike on all of them"
            hint = hint if theirs.made == first.made else made
            yield f"rank {rank} has the nodes of {of} on other ranks than rank 0; {hint}"
        if one.q != other.q:
            yield f"rank {rank}: other q, or other scale, window, softcap or sinks than rank 0 for {of}; {alike}"


Rows = tuple[NDArray[Any], NDArray[Any]] | tuple[None, None]


class Call:
    """Rows on their way to the shards: all of them or none, in the same call on every rank.

    From ``ShardedKVCache.call``. pieces: the new rows of each sequence for each local shard, (None, None) where it gets
    none; items: what the ranks compare of each sequence; ends: the layer's lengths with the new rows.
    """

    def __init__(self, cache: ShardedKVCache, name: str) -> None:
        self.cache, self.name, self.exchanged = cache, name, False
        self.layer, self.pieces, self.items, self.ends = 0, list[dict[int, Rows]](), list[Item](), list[int]()
        self.reservations: list[Reservation] = []
        self._before: list[tuple[ShardedSequence, dict[int, int], int]] = []

    def __str__(self) -> str:
        return str(self.said())

    def said(self) -> Said:
        """What the ranks compare."""
        return Said(self.name, self.layer, self.items, self.cache.made)

    def append(self, sequences: Seq[Any], layer: int, k: Seq[Any] | None, v: Seq[Any] | None) -> None:
        """Hold places for the rows k, v of each sequence, None for no rows.

        Every rank checks all rows, so that an error names a row as the caller counts them. CapacityError beyond the
        capacity; StepError as for a Sequence.
        """
        self.layer = layer = check_int("layer", layer, 0, self.cache.num_layers - 1)
        for i, sequence in enumerate(sequences):
            self.cache.check_sequence(sequence)
            if k is not None and sequence in sequences[:i]:
                raise ArgumentError(
                    f"seq: items {sequences.index(sequence)} and {i} are the same sequence, expected each once where k "
                    "and v are given; fork() it"
                )
        for i, sequence in enumerate(sequences):
            self._append(sequence, None if k is None or v is None else (k[i], v[i]))

    def _append(self, seq: ShardedSequence, given: tuple[Any, Any] | None) -> None:
        cache, begin = self.cache, seq.lengths[self.layer]
        if given is None:
            self.pieces.append(dict.fromkeys(cache.shards, (None, None)))
            self.items.append(Item(seq.serial, begin))
            self.ends.append(begin)
            return
        keys, values, _ = next(iter(cache.shards.values())).check_rows(*given)
        end = begin + len(keys)
        lengths = {shard: sequence.lengths[self.layer] for shard, sequence in seq.shards.items()}
        self._before.append((seq, lengths, len(seq.held)))
        self.reservations.append(seq.books.reserve(self.layer, len(keys)))
        if end > cache.capacity:
            raise CapacityError(
                f"k: got {len(keys):,} tokens at length {begin:,}, expected at most {cache.capacity - begin:,}, the "
                f"cache's capacity is {cache.capacity:,}; truncate() the sequence, or make a larger cache"
            )
        cache.collect()
        new = -(-end // KEYS_PER_NODE) - len(seq.held)
        if new > 0:
            seq.hold(seq.held + [cache.dealer.take() for _ in range(new)])
        owner = seq.owners[np.arange(begin, end) // KEYS_PER_NODE]
        mine = {shard: owner == shard for shard in cache.shards}
        self.pieces.append({i: (keys[one], values[one]) if one.any() else (None, None) for i, one in mine.items()})
        self.ends.append(end)
        rows = deal = 0
        if cache.ranks is not None:
            rows = zlib.crc32(np.ascontiguousarray(values).data, zlib.crc32(np.ascontiguousarray(keys).data))
            deal = zlib.crc32(seq.owners.data)
        self.items.append(Item(seq.serial, begin, len(keys), rows, deal))

    def together(self, one: Callable[[int], T]) -> dict[int, T]:
        """``one`` on every local shard at a time; where one fails, its error. CapacityError names the full shard."""
        shards = self.cache.shards
        free = {shard: cache.pool.free_pages for shard, cache in shards.items()}

        def named(shard: int) -> T:
            try:
                return one(shard)
            except CapacityError as error:
                raise CapacityError(self._full(shard, free[shard])) from error

        with ThreadPoolExecutor(len(shards)) as pool:
            waiting = {shard: pool.submit(named, shard) for shard in shards}
        return {shard: f.result() for shard, f in waiting.items()}

    def _full(self, shard: int, free: int) -> str:
        pool, keys = self.cache.shards[shard].pool, [rows[shard][0] for rows in self.pieces]
        mine, new = sum(len(one) for one in keys if one is not None), sum(item.new for item in self.items)
        shards = len(self.cache.dealer.share)
        return (
            f"shard {shard} of {shards}: got {mine:,} of the {new:,} new tokens, expected what it has room for: {free} "
            f"of its {pool.num_pages} pages of {pool.page_size} tokens are free, and a sequence takes whole pages; "
            "truncate() or free() sequences, or make a larger cache"
        )

    def exchange(self, data: bytes = b"") -> list[bytes]:
        """Every rank's ``data``, by rank. RankError, on every rank, unless all of them are in this call."""
        found = self.cache.exchange(data, self.said())
        self.exchanged = True
        return found

    def undo(self) -> None:
        """The sequences as they were before ``append``, on every local shard; nothing once the rows count."""
        if any(reservation.state == "committed" for reservation in self.reservations):
            return
        for reservation in self.reservations:
            reservation.rollback()
        for seq, lengths, nodes in self._before:
            for shard, n in lengths.items():
                seq.shards[shard].retract(self.layer, n)
            seq.cut(nodes)


class ShardedKVCache:
    """A KVCache whose sequences lie on several devices.

    devices: open Devices, of one vendor or of several; weights: shares of the nodes, None for the devices' free memory
    (a bandwidth per device balances the time instead); capacity: tokens over all sequences, see below; the rest as in
    ``KVCache``, page_size at most 512.

    A node goes, when its first token comes, to the shard that lacks most of its share of all sequences' nodes, so that
    short sequences fill the shards as a long one does. A sequence of n tokens has ceil(n / 512) nodes; a full one that
    forks share counts once, a partly filled one once for each of them, on one shard. No append finds a shard full as
    long as the sequences have never had more than ``capacity`` / 512 nodes at a time, and were forked, and cut within
    what forks share, at multiples of 512. Else appends go on while the shard of the node has free pages; then
    CapacityError names the shard, on every rank.

    With ``comm``, an mpi4py communicator or Ranks, the shards are the ranks: each gives one device and its own weight,
    and every rank makes the same calls with the same arguments. ``append`` and a call of ShardedAttention exchange what
    call it is: RankError on every rank, and nothing appended, where they differ or one fails before; the one that
    failed gets its own error. One that fails behind the exchange, in the fold, has not appended what the others have:
    they get the RankError in their next call, and so does every rank in any call that finds their lengths to differ.
    One that leaves the ``with`` block by an error ends the others, too, and waits at most ``timeout_s`` for them.

    A rank that is lost or late is noticed after ``timeout_s`` (that of Ranks where ``comm`` is one): RankError, which
    cannot say which of several it is, and the same in every later call, for then the ranks are no longer in step.
    """

    def __init__(
        self,
        devices: Seq[Device],
        shape: AttnShape,
        num_layers: int,
        capacity: int,
        dtype: str = "f16",
        page_size: int = 256,
        *,
        weights: Seq[float] | None = None,
        comm: Any = None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        listed = isinstance(devices, Seq) and len(devices) > 0
        if not listed or not all(isinstance(device, Device) for device in devices):
            raise ArgumentError(f"devices: got {shown(devices)}, expected a list of open Devices")
        if not isinstance(shape, AttnShape):
            raise ArgumentError(f"shape: got {type(shape).__name__}, expected an AttnShape")
        given: Seq[Any] | NDArray[Any] = [] if weights is None else weights
        if not isinstance(given, (Seq, np.ndarray)) or getattr(given, "ndim", 1) != 1:
            raise ArgumentError(f"weights: got {shown(weights)}, expected a list of positive numbers, one per device")
        given = [check_float("weights", weight, "a positive number per device") for weight in given]
        timeout_s = check_timeout(timeout_s)
        if comm is not None and len(devices) != 1:
            raise ArgumentError(f"devices: got {len(devices)} with a communicator, expected this rank's one")
        self.devices, self.shape, self.dtype = list(devices), shape, dtype
        self.num_layers = check_int("num_layers", num_layers, 1, MAX_LAYERS)
        capacity = check_int("capacity", capacity, 1, MAX_CONTEXT)
        page_size = check_int("page_size", page_size, 16, KEYS_PER_NODE)
        memory = [float(memory_budget(device.info.index)[1]) for device in devices]
        shares = memory if weights is None else given
        if len(shares) != len(devices):
            raise ArgumentError(f"weights: got {len(shares)}, expected one per device ({len(devices)})")
        self.ranks = comm if comm is None or isinstance(comm, Ranks) else Ranks(comm, timeout_s)
        if self.ranks is not None:
            setup = f"{shape} layers={num_layers} capacity={capacity} {dtype} page_size={page_size}"
            shares = self.ranks.agree(setup, shares[0])
        self.dealer = Dealer(shares)
        self.owners = deal(-(-capacity // KEYS_PER_NODE), shares)  # of a sequence that has the cache to itself
        self.dealer.room[:] = np.maximum(np.bincount(self.owners, minlength=len(shares)), 1)
        self.made = 0  # sequences, which are numbered in this order
        self.dropped: dict[int, list[Node]] = {}  # by serial, what collected sequences held
        mine = range(len(shares)) if self.ranks is None else [self.ranks.rank]
        self.shards: dict[int, KVCache] = {}
        self.lock, self._open = RLock(), True
        self.users: weakref.WeakSet[Any] = weakref.WeakSet()  # what close() must close first
        try:
            with self.call("ShardedKVCache()") as call:
                for device, shard in zip(devices, mine, strict=True):
                    tokens = int(self.dealer.room[shard]) * KEYS_PER_NODE
                    self.shards[shard] = KVCache(device, shape, num_layers, tokens, dtype, page_size)
                call.exchange()
        except BaseException:
            self.close()
            raise

    @property
    def capacity(self) -> int:
        """Tokens over all sequences, in whole nodes."""
        return len(self.owners) * KEYS_PER_NODE

    @property
    def free_tokens(self) -> int:
        """Tokens for which nodes are free, the same on every rank; beyond them, an append may find a shard full."""
        with self.lock:
            self.collect()
            return max(len(self.owners) - int(self.dealer.have.sum()), 0) * KEYS_PER_NODE

    @property
    def nbytes(self) -> int:
        """Device memory of K and V on the local shards, bytes."""
        return sum(cache.nbytes for cache in self.shards.values())

    def new_sequence(self) -> ShardedSequence:
        """An empty sequence; every rank calls it."""
        with self.lock:
            self.check_open()
            return ShardedSequence(self)

    def check_open(self) -> None:
        """ClosedError after ``close``."""
        if not self._open:
            raise ClosedError("ShardedKVCache: used after close()")

    def check_sequence(self, seq: Any) -> None:
        """ArgumentError unless ``seq`` is a sequence of this cache; ClosedError after its ``free``."""
        if not isinstance(seq, ShardedSequence) or seq.cache is not self:
            raise ArgumentError(f"seq: got {type(seq).__name__}, expected a ShardedSequence of this cache")
        seq.books.check_open()

    def append(self, seq: ShardedSequence, layer: int, k: Any, v: Any) -> None:
        """Append tokens to one layer, as ``KVCache.append``; each shard takes those of its nodes.

        A failed call changes nothing.
        """
        with self.call("append") as call:
            call.append([seq], layer, [k], [v])

            def one(shard: int) -> None:
                rows_k, rows_v = call.pieces[0][shard]
                if rows_k is not None:
                    self.shards[shard].append(seq.shards[shard], layer, rows_k, rows_v)

            call.together(one)
            call.exchange()

    @contextmanager
    def call(self, name: str) -> Iterator[Call]:
        """A call of every rank. Where the block fails, the sequences are as before, and the other ranks are told."""
        with self.lock:
            call = Call(self, name)
            try:
                self.check_open()
                yield call
                commit_all(call.reservations)
            except BaseException as error:
                call.undo()
                if isinstance(error, OtherFullError):
                    raise CapacityError(str(error)) from None
                if self.ranks is not None and isinstance(error, CapacityError):
                    self.ranks.full(error)
                elif self.ranks is not None and not isinstance(error, RankError):
                    self.ranks.fail(error, str(call) if call.exchanged else "")
                raise

    def exchange(self, data: bytes, call: Said) -> list[bytes]:
        """Every rank's ``data``, by rank; see ``Ranks.exchange``. What all ranks have collected counts no longer."""
        if self.ranks is None:
            return [data]
        serials = " ".join(map(str, list(self.dropped)))
        found = [one.split(b"\n", 1) for one in self.ranks.exchange(serials.encode() + b"\n" + data, call)]
        for serial in set.intersection(*(set(map(int, one.split())) for one, _ in found)):
            self.dealer.release(self.dropped.pop(serial))
        return [one for _, one in found]

    def collect(self) -> None:
        """What collected sequences held counts no longer; ranks, of which each collects at its time, ``exchange``."""
        while self.dropped and self.ranks is None:
            self.dealer.release(self.dropped.popitem()[1])

    def close(self) -> None:
        """Free the device memory of the local shards, and every sequence."""
        self._open = False
        for user in list(self.users):
            user.close()
        for cache in self.shards.values():
            cache.close()

    def __enter__(self) -> ShardedKVCache:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        """Close it. Ranks that are in a call, or make one, end with the error of one that leaves by an error."""
        try:
            if error is not None and self.ranks is not None:
                self.ranks.leave(error)
        finally:
            self.close()


class ShardedAttention:
    """Attention of query rows over sequences of a ShardedKVCache: the bits of ``Attention`` over a KVCache.

    scale, window, softcap, sinks as in ``Attention``. sent_bytes: partial states that this rank gave to the others.
    """

    def __init__(
        self,
        cache: ShardedKVCache,
        *,
        scale: float | None = None,
        window: int | Seq[int | None] | None = None,
        softcap: float | None = None,
        sinks: Any = None,
    ) -> None:
        if not isinstance(cache, ShardedKVCache):
            hint = "; Attention attends over a KVCache" if isinstance(cache, KVCache) else ""
            raise ArgumentError(f"cache: got {type(cache).__name__}, expected a ShardedKVCache{hint}")
        cache.check_open()
        self.cache = cache
        options = {"scale": scale, "window": window, "softcap": softcap, "sinks": sinks}
        self._attention = {i: Attention(one, **options) for i, one in cache.shards.items()}
        self._fold = Fold(cache.devices[0], cache.shape)
        self.sent_bytes = 0
        cache.users.add(self)

    def __call__(
        self,
        q: Any,
        seq: ShardedSequence | Seq[ShardedSequence],
        layer: int,
        k: Any = None,
        v: Any = None,
        *,
        return_lse: bool = False,
    ) -> Any:
        """Append k, v to ``seq``, then attend, as ``Attention``: arguments, results and errors are the same.

        A batch: ``seq`` a list, and q, k, v lists of arrays, one per sequence, lengths may differ; returns lists. The
        partial states of all of them travel in one exchange. A failed call leaves the cache as it was.
        """
        batch, return_lse = isinstance(seq, (list, tuple)), check_bool("return_lse", return_lse)
        with self.cache.call("attend") as call:
            sequences: Seq[Any] = seq if isinstance(seq, (list, tuple)) else [seq]
            columns: list[Any] = [q, k, v] if batch else [[q], None if k is None else [k], None if v is None else [v]]
            for name, column in zip("qkv", columns, strict=True):
                if column is not None and (not isinstance(column, (list, tuple)) or len(column) != len(sequences)):
                    raise ArgumentError(f"{name}: expected a list of {len(sequences)} arrays, one per sequence")
            if (k is None) != (v is None):
                raise ArgumentError(f"{'v' if v is None else 'k'}: got None, expected both k and v, or neither")
            call.append(sequences, layer, columns[1], columns[2])
            found = self._attend(call, columns[0], sequences)
        outs = [out.reshape(np.shape(x)) for (out, _), x in zip(found, columns[0], strict=True)]
        lses = [lse.reshape(np.shape(x)[:-1]) for (_, lse), x in zip(found, columns[0], strict=True)]
        if not batch:
            return (outs[0], lses[0]) if return_lse else outs[0]
        return (outs, lses) if return_lse else outs

    def _attend(self, call: Call, q: Seq[Any], sequences: Seq[ShardedSequence]) -> list[tuple[F32, F32]]:
        """out and lse of each sequence."""
        batch = list(zip(q, sequences, call.pieces, call.ends, strict=True))

        def one(shard: int) -> list[PartialState]:
            partial = self._attention[shard].partial
            return [
                partial(rows, seq.shards[shard], call.layer, *new[shard], nodes=seq.nodes(shard, end), tokens=end)
                for rows, seq, new, end in batch
            ]

        parts = list(call.together(one).values())
        if self.cache.ranks is not None:
            call.items = [item._replace(q=state.call) for item, state in zip(call.items, parts[0], strict=True)]
            self.sent_bytes += sum(state.nbytes for state in parts[0])
            parts = [_unpack(data, len(batch)) for data in call.exchange(_pack(parts[0]))]
        return [self._fold([states[i] for states in parts]) for i in range(len(batch))]

    def close(self) -> None:
        """Free the command buffers and tensors; ShardedKVCache.close does it. A later call makes them anew."""
        self._fold.close()
        self._fold = Fold(self.cache.devices[0], self.cache.shape)
        for attention in self._attention.values():
            attention.close()


def _pack(states: Seq[PartialState]) -> bytes:
    """The states of a batch: the bytes of each, int64, and the bytes."""
    data = [state.to_bytes() for state in states]
    return b"".join([np.array([len(one) for one in data], "<i8").tobytes(), *data])


def _unpack(data: bytes, count: int) -> list[PartialState]:
    ends = 8 * count + np.cumsum(np.frombuffer(data, "<i8", count))
    starts = [8 * count, *ends[:-1]]
    return [PartialState.from_bytes(data[a:b]) for a, b in zip(starts, ends, strict=bool(count))]


# --- ranks -------------------------------------------------------------------------------------------------


def start_mpi(timeout_s: float = TIMEOUT_S) -> Any:
    """mpi4py's COMM_WORLD; MPI ends with the interpreter. RankError: no MPI here, or not all ranks started in time."""
    if importlib.util.find_spec("mpi4py") is None:
        raise RankError(NO_MPI)
    try:
        import mpi4py

        mpi4py.rc.initialize = False
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise RankError(f"{NO_MPI} ({error})") from error
    _outlive_others()
    if MPI.Is_initialized():
        return MPI.COMM_WORLD
    # MPI_Init waits for all ranks without end; called so, it holds no interpreter lock and can be left alone
    library, got = ctypes.CDLL(MPI.__file__), ctypes.c_int()
    starting = Thread(
        target=lambda: library.MPI_Init_thread(None, None, MPI.THREAD_MULTIPLE, ctypes.byref(got)), daemon=True
    )
    starting.start()
    starting.join(timeout_s)
    if starting.is_alive():
        raise RankError(
            f"waited {timeout_s:g} s for all ranks to start; one ended before, or was never started; look at their "
            "output, and start all of them again"
        )
    atexit.register(MPI.Finalize)
    return MPI.COMM_WORLD


def check_timeout(seconds: Any) -> float:
    """Seconds above 0 that a rank waits for others."""
    found = check_float("timeout_s", seconds, "seconds above 0")
    if found <= 0:
        raise ArgumentError(f"timeout_s: got {shown(seconds)}, expected seconds above 0")
    return found


def _outlive_others() -> None:
    """Do not end by SIGUSR1, which MPICH's mpiexec -disable-auto-cleanup sends where another rank was killed.

    A rank that lives can then say so by its RankError. A handler of the program's own stays.
    """
    usr1 = getattr(signal, "SIGUSR1", None)
    if usr1 is not None and current_thread() is main_thread() and signal.getsignal(usr1) == signal.SIG_DFL:
        signal.signal(usr1, lambda *_: None)


def _named(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


class Ranks:
    """The ranks of an mpi4py communicator, which exchange bytes with a time limit; a failed one tells the others.

    lost: a rank gave an exchange up, or left by an error, and none will be done. received_bytes: from the other
    ranks, so far.
    """

    def __init__(self, comm: Any, timeout_s: float = TIMEOUT_S) -> None:
        if not all(hasattr(comm, name) for name in ("Idup", "Iallgatherv", "Iprobe")):
            raise ArgumentError(f"comm: got {shown(comm)}, expected an mpi4py communicator, such as MPI.COMM_WORLD")
        timeout_s = check_timeout(timeout_s)
        self.timeout_s, self.lost, self.received_bytes = timeout_s, False, 0
        self.rank, self.size = int(comm.Get_rank()), int(comm.Get_size())
        self._late: list[Any] = []  # requests given up, and with them the memory that they may still write
        self._ending: Event | None = None  # once a rank is lost: set at exit, see ``_guard_exit``
        _outlive_others()
        self._comm, request = comm.Idup()
        self._wait(request, lambda: None)

    def agree(self, setup: str, weight: float) -> list[float]:
        """The weights of all ranks. RankError unless all have the same ``setup``."""
        found = [data.decode().rsplit(" ", 1) for data in self.exchange(f"{setup} {weight!r}".encode())]
        for rank, (theirs, _) in enumerate(found):
            if theirs != found[0][0]:
                raise RankError(f"rank {rank} is set up as {theirs}, rank 0 as {found[0][0]}; expected the same")
        return [float(weight) for _, weight in found]

    def exchange(self, data: bytes, call: Said | None = None) -> list[bytes]:
        """Every rank's ``data``, by rank.

        RankError: a rank failed, is in another ``call`` (on every rank), or did not answer in time, now or before.
        """
        found = [one.split(b"\n", 1) for one in self._gather(FINE + (call or Said()).to_bytes() + b"\n" + data)]
        calls = [Said.from_bytes(said) for said, _ in found]
        for rank, theirs in enumerate(calls):
            for text in differences(rank, theirs, calls[0]):
                raise RankError(text)
        return [one for _, one in found]

    def fail(self, error: BaseException, done: str = "") -> None:
        """Answer the exchange that the others are in with an error; behind that of call ``done``, their next one.

        It waits for that, at most ``timeout_s``.
        """
        if not self.lost:
            late = f" (behind the exchange of {done}, which the other ranks have done)" if done else ""
            with suppress(RankError):  # this rank's own error is raised
                self._gather(FAILED + f"{_named(error)}{late}".encode())

    def leave(self, error: BaseException) -> None:
        """As ``fail``, of a rank that makes no exchange any more: none can follow, but where all of them leave."""
        if not self.lost:
            with suppress(RankError):  # this rank's own error is raised
                self._gather(LEFT + _named(error).encode())

    def full(self, error: CapacityError) -> None:
        """Answer the exchange that the others are in: no room here, for which all of them raise a CapacityError.

        RankError where that cannot be: one of them failed, or is lost.
        """
        with suppress(OtherFullError):  # this rank's own error is raised
            self._gather(FULL + str(error).encode())

    def abort(self, status: int) -> None:
        """End all ranks with ``status``, after the grace in which the others print why."""
        sys.stdout.flush()
        sys.stderr.flush()
        time.sleep(min(self.timeout_s, GRACE_S))
        Thread(target=_exit_after, args=(GRACE_S, status), daemon=True).start()  # should MPI wait for a lost rank
        self._comm.Abort(status)

    def _gather(self, data: bytes) -> list[bytes]:
        if self.lost:
            raise RankError(f"rank {self.rank}: a rank was lost, or left, before; start all of them again")
        sizes = np.zeros(self.size, np.int64)
        try:
            self._wait(self._comm.Iallgather(np.array([len(data)], np.int64), sizes))
            starts = np.cumsum(sizes) - sizes
            received = np.empty(int(sizes.sum()), np.uint8)
            self._wait(self._comm.Iallgatherv(np.frombuffer(data, np.uint8), (received, (sizes, starts))))
        except BaseException as error:  # an interrupt, too: the others are in the midst of it
            if not self.lost:
                gave_up = f"rank {self.rank} gave an exchange up: {_named(error)}"
                self._give_up(str(error) if isinstance(error, RankError) else gave_up)
            raise
        self.received_bytes += sizes.nbytes - sizes.itemsize + received.nbytes - len(data)
        found = [received[a : a + n].tobytes() for a, n in zip(starts, sizes, strict=True)]
        left = [one[:1] == LEFT for one in found]
        self.lost = any(left) and not all(left)
        for rank, one in enumerate(found):
            if one[:1] in (FAILED, LEFT):
                raise RankError(f"rank {rank} failed: {one[1:].decode()}")
        for rank, one in enumerate(found):
            if one[:1] == FULL:
                raise OtherFullError(f"rank {rank}: {one[1:].decode()}")
        return [one[1:] for one in found]

    def _wait(self, request: Any, listen: Callable[[], None] | None = None) -> None:
        """RankError where the request is not done in time; the communicator is of no use from then on."""
        deadline = time.monotonic() + self.timeout_s
        pause = 0.0
        self._late.append(request)
        while not request.Test():
            (listen or self._listen)()
            if time.monotonic() > deadline:
                others = f"rank {1 - self.rank}" if self.size == 2 else f"the {self.size - 1} other ranks"
                late = "it is lost" if self.size == 2 else "MPI cannot tell which of them is lost"
                raise RankError(
                    f"rank {self.rank} waited {self.timeout_s:g} s for {others}; {late}, late, or in no call; look at "
                    "the output of all ranks, and start all of them again, with a larger timeout_s if one was late"
                )
            time.sleep(pause)
            pause = min(pause + 2e-5, 1e-3)
        self._late.remove(request)

    def _give_up(self, why: str) -> None:
        """No exchange any more; a rank that still comes to this one need not wait for it."""
        self.lost = True
        self._guard_exit()
        note = np.frombuffer(why.encode()[:NOTE_BYTES].ljust(NOTE_BYTES), np.uint8)
        for rank in range(self.size):
            if rank != self.rank:
                with suppress(RuntimeError):  # mpi4py's, of a rank that is gone; this rank's own error is raised
                    self._late.append(self._comm.Isend(note, rank))

    def _listen(self) -> None:
        """RankError with what a rank that gave up said; nothing else is sent from one rank to another."""
        if self._comm.Iprobe():
            note = np.empty(NOTE_BYTES, np.uint8)
            self._comm.Recv(note)
            self.lost = True
            self._guard_exit()
            raise RankError(note.tobytes().decode(errors="replace").rstrip())

    def _guard_exit(self) -> None:
        """Let this process end, with ``LOST_STATUS``, also where MPI's finalisation waits for a rank that is gone."""
        if self._ending is not None:
            return
        self._ending = ending = Event()
        grace = min(self.timeout_s, GRACE_S)

        def guard() -> None:
            ending.wait()
            _exit_after(grace, LOST_STATUS)

        Thread(target=guard, daemon=True).start()  # now: an interpreter that ends starts no thread
        atexit.register(_finalize, ending)  # runs before what was registered by whoever started MPI


def _exit_after(seconds: float, status: int) -> None:
    time.sleep(seconds)
    os._exit(status)


def _finalize(ending: Event) -> None:
    """End MPI while Python still runs, so that the thread that waits for ``ending`` can end the process instead."""
    from mpi4py import MPI

    sys.stdout.flush()
    sys.stderr.flush()
    ending.set()
    if not MPI.Is_finalized():
        ctypes.CDLL(MPI.__file__).MPI_Finalize()  # MPI.Finalize holds the interpreter lock
