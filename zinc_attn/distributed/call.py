"""A call of a sharded cache, in which all rows reach their shards or none do, alike on every rank."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..cache.pages import CapacityError
from ..cache.sequence import Kept
from ..cache.transaction import Transaction
from ..cache.unseen import append_unseen, move_unseen
from ..canonical.constants import KEYS_PER_NODE
from ..checks import check_int
from ..decode.requests import check_once
from ..errors import ArgumentError
from .descriptors import CallDescriptor, SequenceDescriptor
from .ranks import RankError, RemoteCapacityError
from .sequence import ShardedSequence
from .shards import Shards

T = TypeVar("T")
Rows = tuple[NDArray[Any], NDArray[Any]] | tuple[None, None]


class Call:
    """One call of a ShardedKVCache, from ``of``, which commits it or undoes it.

    pieces: the new rows of each sequence for each local shard, (None, None) where a shard gets none; sequences: the
    facts of each sequence that ranks compare; ends: the length of the layer in each sequence, with the new rows;
    exchanged: whether the exchange of this call is over; moved: whether ``keep`` has moved or dropped tokens.
    """

    def __init__(self, cache: Shards, name: str) -> None:
        self.cache, self.name, self.exchanged, self.moved = cache, name, False, False
        self.layer, self.pieces, self.ends = 0, list[dict[int, Rows]](), list[int]()
        self.sequences: list[SequenceDescriptor] = []
        self._new: list[tuple[ShardedSequence, tuple[NDArray[Any], NDArray[Any]] | None]] = []
        self.transaction = Transaction()

    @classmethod
    @contextmanager
    def of(cls, cache: Shards, name: str) -> Iterator[Call]:
        """Begin a call that every rank makes; the end of the block commits it.

        Where the block fails, the sequences are as before, and the other ranks are told.
        """
        with cache.lock:
            call = cls(cache, name)
            try:
                cache.check_open()
                cache.settle()
                yield call
                call.transaction.commit()
                if call.moved:  # the nodes after the kept ones are given up
                    cache.end()
                cache.touched = ()
            except BaseException as error:
                try:
                    cache.end()
                finally:
                    call._tell(error)
                if isinstance(error, RemoteCapacityError):
                    raise CapacityError(str(error)) from None
                raise

    def _tell(self, error: BaseException) -> None:
        """Tell the other ranks that the call failed here. They already know the error of another rank."""
        ranks = self.cache.ranks
        if ranks is None or isinstance(error, RankError):
            return
        if isinstance(error, CapacityError):
            ranks.full(error)
        else:
            ranks.fail(error, str(self.descriptor()) if self.exchanged else "")

    def descriptor(self) -> CallDescriptor:
        """The facts of this call that the ranks compare."""
        return CallDescriptor(self.name, self.layer, self.sequences, self.cache.created)

    def check(self, sequences: Seq[Any], layer: int, k: Seq[Any] | None, v: Seq[Any] | None) -> None:
        """Check the new rows k, v of each sequence; None stands for no rows.

        Every rank checks all rows, so an error names a row as the caller counts them.
        """
        self.layer = layer = check_int("layer", layer, 0, self.cache.num_layers - 1)
        for i, sequence in enumerate(sequences):
            if not isinstance(sequence, ShardedSequence) or sequence.cache is not self.cache:
                raise ArgumentError(f"seq: got {type(sequence).__name__}, expected a ShardedSequence of this cache")
            sequence.lengths_of.check_open()
            if k is not None:
                check_once(sequences, i)
        shard = next(iter(self.cache.shards.values()))
        for i, sequence in enumerate(sequences):
            new = None if k is None else shard.check_rows(k[i], None if v is None else v[i], layer)[:2]
            self._new.append((sequence, new))
            self.ends.append(sequence.lengths[layer] + (0 if new is None else len(new[0])))

    def reserve(self) -> None:
        """Reserve pages for the new rows, and allocate the nodes that they need.

        CapacityError beyond the capacity of the cache; StepError as for a Sequence.
        """
        for (seq, new), end in zip(self._new, self.ends, strict=True):
            if new is None:
                self.pieces.append(dict.fromkeys(self.cache.shards, (None, None)))
                self.sequences.append(SequenceDescriptor(seq.serial, end))
            else:
                self._reserve(seq, *new, end)

    def _reserve(self, seq: ShardedSequence, keys: NDArray[Any], values: NDArray[Any], end: int) -> None:
        cache, begin = self.cache, end - len(keys)
        cache.touch(seq)
        self.transaction.reserve(seq.lengths_of, self.layer, len(keys))
        room = len(cache.owners) * KEYS_PER_NODE
        if end > room:
            raise CapacityError(
                f"k: got {len(keys):,} tokens at length {begin:,}, expected at most {room - begin:,} (capacity = "
                f"{cache.capacity:,}, in whole nodes of {KEYS_PER_NODE}); truncate() the sequence, or make the cache "
                "with a larger capacity"
            )
        new_nodes = -(-end // KEYS_PER_NODE) - len(seq.held)
        if new_nodes > 0:
            cache.allocator.allocate(seq.holding, new_nodes)
        owner = seq.owners[np.arange(begin, end) // KEYS_PER_NODE]  # (new tokens,) the shard of each
        by_shard = {shard: owner == shard for shard in cache.shards}
        latent = cache.shape.latent  # a latent shard takes no v
        self.pieces.append(
            {i: (keys[x], None if latent else values[x]) if x.any() else (None, None) for i, x in by_shard.items()}
        )
        rows = owners = 0
        if cache.ranks is not None:
            rows = zlib.crc32(values.tobytes(), zlib.crc32(keys.tobytes()))
            owners = zlib.crc32(seq.owners.data)
        self.sequences.append(SequenceDescriptor(seq.serial, begin, len(keys), rows, owners))

    def keep(self, seq: ShardedSequence, kept: Kept) -> None:
        """Move a sequence's ``kept`` rows to free pages of each shard; to other shards they travel in the exchange."""
        cache, start, count = self.cache, kept.start, len(kept.sources)
        cache.touch(seq)
        self.transaction.rewrite(seq.lengths_of, start, count)  # first, as ``settle`` looks for the transaction there
        owners = zlib.crc32(seq.owners.data)
        rows = zlib.crc32(kept.sources.tobytes(), start)
        self.sequences = [SequenceDescriptor(seq.serial, len(seq), 0, rows, owners)]
        giver, taker = (seq.owners[x // KEYS_PER_NODE] for x in (kept.sources, kept.targets))  # the shard of each row
        tables, sent = dict[int, NDArray[np.uint32]](), dict[int, NDArray[np.uint32]]()
        for shard, shard_cache in cache.shards.items():
            sequence, held = seq.shards[shard], seq.tokens(shard, start)
            with shard_cache.lock:
                shard_cache.settle()
                reservation = self.transaction.rewrite(sequence.pages, held, seq.tokens(shard, start + count) - held)
                shard_cache.copy_pages(reservation.copies)
                old, tables[shard] = sequence.table(), sequence.table(reservation)
                stay, leave = ((giver == shard) & (same == (taker == shard)) for same in (True, False))
                sources, targets = (seq.positions_on(shard, x[stay]) for x in (kept.sources, kept.targets))
                if len(sources):
                    shard_cache.mover.move(sources, old, targets, tables[shard])
                move_unseen(sequence.pages, held)
                leaving = seq.positions_on(shard, kept.sources[leave])
                sent[shard] = np.stack([shard_cache.mover.gather(i, leaving, old) for i in range(cache.num_layers)])
        if cache.ranks is None:
            self.exchange()
        else:
            received = self.exchange(sent[cache.ranks.rank].tobytes())
            shape = (cache.num_layers, -1, *sent[cache.ranks.rank].shape[2:])
            sent = {i: np.frombuffer(data, np.uint32).reshape(shape) for i, data in enumerate(received) if data}
        if count:
            cache.moving = self.transaction, seq.holding, start // KEYS_PER_NODE
        for shard, shard_cache in cache.shards.items():
            for other, words in sent.items():
                leave = (giver == other) & (taker != other)
                coming = taker[leave] == shard
                targets = seq.positions_on(shard, kept.targets[leave][coming])
                for layer in range(cache.num_layers if len(targets) else 0):
                    with shard_cache.lock:
                        shard_cache.mover.append(layer, targets, tables[shard], words[layer][coming])
                    append_unseen(seq.shards[shard].pages, layer, int(targets[0]))
        self.moved = True

    def run_on_shards(self, task: Callable[[int], T]) -> dict[int, T]:
        """Run ``task`` on every local shard at the same time, and return its results by shard.

        An error is raised after all tasks have ended; a CapacityError names the full shard.
        """
        shards = self.cache.shards
        free = {shard: cache.pool.free_pages for shard, cache in shards.items()}

        def named(shard: int) -> T:
            try:
                return task(shard)
            except CapacityError as error:
                raise CapacityError(self._out_of_pages(shard, free[shard])) from error

        with ThreadPoolExecutor(len(shards)) as pool:
            waiting = {shard: pool.submit(named, shard) for shard in shards}
        return {shard: future.result() for shard, future in waiting.items()}

    def _out_of_pages(self, shard: int, free: int) -> str:
        """The text of the CapacityError of ``shard``, of whose pages ``free`` were free before the call."""
        pool, keys = self.cache.shards[shard].pool, [rows[shard][0] for rows in self.pieces]
        count = sum(len(rows) for rows in keys if rows is not None)
        new = sum(sequence.new for sequence in self.sequences)
        shards = len(self.cache.allocator.share)
        return (
            f"shard {shard} of {shards}: got {count:,} of the {new:,} new tokens, expected what it has room for: "
            f"{free} of its {pool.num_pages} pages of {pool.page_size} tokens are free, and a sequence takes whole "
            "pages; truncate() or free() sequences, or make a larger cache"
        )

    def exchange(self, data: bytes = b"") -> list[bytes]:
        """Return the ``data`` of every rank, by rank. RankError, on every rank, unless all of them are in this call."""
        received = self.cache.exchange(data, self.descriptor())
        self.exchanged = True
        return received
