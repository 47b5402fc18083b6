"""A KV cache whose sequences lie on several devices, of one process or of MPI ranks.

A sequence's nodes of 512 tokens are dealt to the shards in proportion to their weights. Output bits do not depend on
which shard holds a node: they are those of one device that holds the whole sequence.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from threading import RLock
from types import TracebackType
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ..cache.head_scales import check_head_scales
from ..cache.kv_cache import MAX_LAYERS, KVCache
from ..cache.pages import CapacityError
from ..canonical.constants import KEYS_PER_NODE
from ..checks import check_bool, check_float, check_int, described, shown
from ..dtypes import storage_dtype
from ..errors import ArgumentError, ClosedError
from ..limits import MAX_CONTEXT
from ..runtime.device import Device
from ..runtime.devices import memory_budget
from ..runtime.registry import Registry
from ..shapes import AttnShape
from .call import Call
from .descriptors import CallDescriptor
from .nodes import NodeAllocator, deal
from .ranks import TIMEOUT_S, RankError, Ranks, RemoteCapacityError, check_timeout
from .sequence import ShardedSequence


class ShardedKVCache:
    """A KVCache whose sequences lie on several devices.

    devices: open Devices, of one vendor or of several; weights: shares of the nodes, None for the devices' free memory
    (the memory bandwidth of each device balances the time instead); capacity: tokens over all sequences, see below; the
    other arguments are those of ``KVCache``, with page_size at most 512.

    A node is allocated when its first token comes. It goes to the shard that lacks most of its share of all sequences'
    nodes, so many short sequences fill the shards as one long sequence does. A sequence of n tokens has ceil(n / 512)
    nodes. A full node that forks share counts once; a partly filled one counts once for each of them, on one shard.

    An append never finds a shard full as long as the sequences have never had more than ``capacity`` / 512 nodes at a
    time, and were forked, and cut within what forks share, at multiples of 512 tokens. Otherwise appends succeed while
    the shard of the node has free pages; then CapacityError names the shard, on every rank.

    With ``comm``, an mpi4py communicator or Ranks, the shards are the ranks. Each rank gives one device and its own
    weight, and every rank makes the same calls with the same arguments. ``append`` and a call of ShardedAttention
    exchange a description of the call. Where the descriptions differ, or one rank fails before the exchange, every rank
    gets a RankError and nothing is appended; the rank that failed gets its own error. A rank that fails after the
    exchange, in the fold, has not appended what the others have: they get the RankError in their next call, and so does
    every rank in any call that finds the lengths to differ. A rank that leaves the ``with`` block by an error ends the
    others, too, and waits at most ``timeout_s`` for them.

    A rank that is lost or late is noticed after ``timeout_s`` (that of Ranks where ``comm`` is one). The RankError
    cannot say which of several ranks it is, and every later call raises it, too, as the ranks are no longer in step.
    """

    # Makes the cache of one shard; tests put another class or a staticmethod here.
    make_shard: ClassVar[Callable[..., KVCache]] = KVCache

    def __init__(  # noqa: PLR0913, RUF100  (the arguments of KVCache, and how the ranks are reached)
        self,
        devices: Seq[Device],
        shape: AttnShape,
        num_layers: int,
        capacity: int,
        dtype: object = "f16",
        page_size: int = 256,
        *,
        round_rows: bool = False,
        k_scale: Any = None,
        v_scale: Any = None,
        weights: Seq[float] | None = None,
        comm: Any = None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """See the class."""
        _check_devices(devices, shape)
        given = None if weights is None else _checked_weights(weights)
        timeout_s = check_timeout(timeout_s)
        if comm is not None and len(devices) != 1:
            raise ArgumentError(f"devices: got {len(devices)} with a communicator, expected this rank's one")
        dtype, rounds = storage_dtype(dtype), check_bool("round_rows", round_rows)
        self.devices, self.shape, self.dtype = list(devices), shape, dtype
        self.num_layers = check_int("num_layers", num_layers, 1, MAX_LAYERS)
        scales = check_head_scales(dtype, shape, self.num_layers, k_scale, v_scale)
        self._capacity = capacity = check_int("capacity", capacity, 1, MAX_CONTEXT)
        page_size = check_int("page_size", page_size, 16, KEYS_PER_NODE)
        shares = [float(memory_budget(one.info.index)[1]) for one in devices] if given is None else given
        if len(shares) != len(devices):
            raise ArgumentError(f"weights: got {len(shares)}, expected one per device ({len(devices)})")
        self.ranks = comm if comm is None or isinstance(comm, Ranks) else Ranks(comm, timeout_s)
        if self.ranks is not None:
            setup = f"{shape} layers={num_layers} capacity={capacity} {dtype} page_size={page_size} round_rows={rounds}"
            setup += "" if scales is None else f" scales={hashlib.sha256(scales.tobytes()).hexdigest()}"
            shares = self.ranks.agree(setup, shares[0])
        self.allocator = NodeAllocator(shares, deferred=self.ranks is not None)
        self.owners = deal(-(-capacity // KEYS_PER_NODE), shares)  # the shards of a sequence that fills the cache
        self.allocator.capacity[:] = np.maximum(np.bincount(self.owners, minlength=len(shares)), 1)
        self.made = 0  # how many sequences were made; they are numbered in this order
        self.shards: dict[int, KVCache] = {}
        self.lock, self._open = RLock(), True
        self.users: Registry[Any] = Registry()  # what close() must close first
        self._touched: tuple[weakref.ReferenceType[ShardedSequence], ...] = ()  # what the current call changes
        mine = range(len(shares)) if self.ranks is None else [self.ranks.rank]
        try:
            options = {"round_rows": rounds, "k_scale": k_scale, "v_scale": v_scale}
            with self.call("ShardedKVCache()") as call:
                for device, shard in zip(devices, mine, strict=True):
                    tokens = int(self.allocator.capacity[shard]) * KEYS_PER_NODE
                    arguments = (device, shape, num_layers, tokens, dtype, page_size)
                    self.shards[shard] = self.make_shard(*arguments, **options)
                call.exchange()
        except BaseException:
            self.close()
            raise

    @property
    def capacity(self) -> int:
        """Tokens over all sequences, as the cache was made for; it holds whole nodes of 512."""
        return self._capacity

    @property
    def free_tokens(self) -> int:
        """Tokens for which nodes are free, the same on every rank. An append beyond them may find a shard full."""
        with self.lock:
            return max(len(self.owners) - int(self.allocator.used.sum()), 0) * KEYS_PER_NODE

    @property
    def nbytes(self) -> int:
        """Device memory of K and V on the local shards, bytes."""
        return sum(cache.nbytes for cache in self.shards.values())

    def __repr__(self) -> str:
        return described(
            self,
            lambda: (
                f"{self.shape}, {self.dtype}, {self.num_layers} layers, capacity={self.capacity:,} tokens, "
                f"{len(self.allocator.share)} shards: {[*self.shards.values()]}{'' if self._open else ', closed'}"
            ),
        )

    def new_sequence(self) -> ShardedSequence:
        """Return an empty sequence. Every rank calls it."""
        with self.lock:
            self.check_open()
            self.begin()
            return ShardedSequence(self)

    def check_open(self) -> None:
        """ClosedError after ``close``."""
        if not self._open:
            raise ClosedError("ShardedKVCache: used after close()")

    def check_sequence(self, seq: Any) -> None:
        """ArgumentError unless ``seq`` is a sequence of this cache; ClosedError after its ``free``."""
        if not isinstance(seq, ShardedSequence) or seq.cache is not self:
            raise ArgumentError(f"seq: got {type(seq).__name__}, expected a ShardedSequence of this cache")
        seq.lengths_of.check_open()

    def append(self, seq: ShardedSequence, layer: int, k: Any, v: Any = None) -> None:
        """Append tokens to one layer, as ``KVCache.append`` does. Each shard takes the tokens of its nodes.

        A failed call changes nothing.
        """
        with self.call("append") as call:
            call.append([seq], layer, [k], None if v is None else [v])

            def append(shard: int) -> None:
                rows_k, rows_v = call.pieces[0][shard]
                if rows_k is not None:
                    self.shards[shard].append(seq.shards[shard], layer, rows_k, rows_v)

            call.run_on_shards(append)
            call.exchange()

    # --- calls, and what becomes of one that fails ----------------------------------------------------------

    @contextmanager
    def call(self, name: str) -> Iterator[Call]:
        """Begin a call that every rank makes; the end of the block commits it.

        Where the block fails, the sequences are as before, and the other ranks are told.
        """
        with self.lock:
            call = Call(self, name)
            try:
                self.check_open()
                self.begin()
                yield call
                call.transaction.commit()
                if call.moved:  # the nodes behind what is kept are given up
                    self.end()
                self._touched = ()
            except BaseException as error:
                try:
                    self.end()
                finally:
                    self._tell(error, call)
                if isinstance(error, RemoteCapacityError):
                    raise CapacityError(str(error)) from None
                raise

    def touch(self, seq: ShardedSequence) -> None:
        """Note, under the lock, that the current call is going to change ``seq``."""
        self._touched = (*self._touched, weakref.ref(seq))

    def begin(self) -> None:
        """Settle, under the lock and before a call looks at sequences, what an interrupted call left."""
        if self._touched:
            self.end()

    def end(self) -> None:
        """Settle the sequences that the current call touched. An interrupt leaves it to the next call."""
        for reference in self._touched:
            seq = reference()
            if seq is not None and (self._open or seq.lengths_of.closed):
                seq.settle()
        self._touched = ()

    def _tell(self, error: BaseException, call: Call) -> None:
        """Tell the other ranks that ``call`` failed here; an error that came from them they know already."""
        if self.ranks is None or isinstance(error, RankError):
            return
        if isinstance(error, CapacityError):
            self.ranks.full(error)
        else:
            self.ranks.fail(error, str(call.descriptor()) if call.exchanged else "")

    def exchange(self, data: bytes, call: CallDescriptor) -> list[bytes]:
        """Return the ``data`` of every rank, by rank; see ``Ranks.exchange``.

        The same exchange tells which sequences each rank has garbage collected. Those that all have are discarded.
        """
        if self.ranks is None:
            return [data]
        serials = " ".join(map(str, self.allocator.collected()))
        found = [one.split(b"\n", 1) for one in self.ranks.exchange(serials.encode() + b"\n" + data, call)]
        self.allocator.discard(set.intersection(*(set(map(int, one.split())) for one, _ in found)))
        return [one for _, one in found]

    def close(self) -> None:
        """Free the device memory of the local shards, and every sequence."""
        self._open = False
        for user in self.users:
            user.close()
        for cache in self.shards.values():
            cache.close()

    def __enter__(self) -> ShardedKVCache:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        """Close the cache. Where this rank leaves by an error, the ranks that are in a call, or make one, get it."""
        try:
            if error is not None and self.ranks is not None:
                self.ranks.leave(error)
        finally:
            self.close()


def _check_devices(devices: Any, shape: Any) -> None:
    """ArgumentError unless ``devices`` is a list of Devices and ``shape`` an AttnShape."""
    listed = isinstance(devices, Seq) and len(devices) > 0
    if not listed or not all(isinstance(device, Device) for device in devices):
        raise ArgumentError(f"devices: got {shown(devices)}, expected a list of open Devices")
    if not isinstance(shape, AttnShape):
        raise ArgumentError(f"shape: got {type(shape).__name__}, expected an AttnShape")


def _checked_weights(weights: Seq[float] | NDArray[Any]) -> list[float]:
    """``weights`` as a list of floats, or ArgumentError."""
    if not isinstance(weights, (Seq, np.ndarray)) or getattr(weights, "ndim", 1) != 1:
        raise ArgumentError(f"weights: got {shown(weights)}, expected a list of positive numbers, one per device")
    return [check_float("weights", weight, "a list of positive numbers, one per device") for weight in weights]
