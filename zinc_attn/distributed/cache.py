"""A KV cache whose sequences lie on several devices, of one process or of MPI ranks.

A sequence's nodes of 512 tokens are dealt to the shards in proportion to their weights. Output bits do not depend on
which shard holds a node: they are those of one device that holds the whole sequence.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from collections.abc import Sequence as Seq
from types import TracebackType
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ..cache.head_scales import check_head_scales
from ..cache.kv_cache import KVCache
from ..cache.pages import MIN_PAGE_SIZE
from ..cache.resident import MAX_LAYERS
from ..cache.sequence import check_kept
from ..canonical.constants import KEYS_PER_NODE
from ..checks import check_bool, check_float, check_int, described, shown
from ..dtypes import storage_dtype
from ..errors import ArgumentError
from ..limits import MAX_CONTEXT
from ..runtime.device import Device
from ..runtime.devices import memory_budget
from ..runtime.registry import Registry
from ..shapes import AttnShape
from .call import Call
from .ranks import TIMEOUT_S, Ranks, check_timeout
from .sequence import ShardedSequence
from .shards import Shards


class ShardedKVCache(Shards):
    """A KVCache whose sequences lie on several devices.

    devices: open Devices, of one vendor or of several; weights: shares of the nodes, None for the devices' free memory
    (with the devices' memory bandwidth as weights, they take equal time); capacity: tokens over all sequences, see
    below; the other arguments are those of ``KVCache``, with page_size at most 512.

    A node is allocated when its first token comes. It goes to the shard that lacks most of its share of all sequences'
    nodes, so many short sequences fill the shards as one long sequence does. A sequence of n tokens has ceil(n / 512)
    nodes. A full node that forks share counts once; a partly filled node counts for each fork, on one shard.

    An append never finds a shard full as long as the sequences have never had more than ``capacity`` / 512 nodes at a
    time, and were forked, and cut within what forks share, at multiples of 512 tokens. Otherwise appends succeed while
    the shard of the node has free pages; then CapacityError names the shard, on every rank.

    With ``comm``, an mpi4py communicator or Ranks, the shards are the ranks. Each rank gives one device and its own
    weight, and every rank makes the same calls with the same arguments. ``append`` and a call of ShardedAttention
    exchange a description of the call. Where the descriptions differ, or one rank fails before the exchange, every rank
    gets a RankError and nothing is appended; the rank that failed gets its own error. A rank that fails after the
    exchange, in the fold, lacks the rows that the others have appended: they get the RankError in their next call, and
    every rank gets it in any call where the lengths differ. A rank that leaves the ``with`` block by an error ends the
    others, too, and waits at most ``timeout_s`` for them.

    A rank that is lost or late is noticed after ``timeout_s`` (that of Ranks where ``comm`` is one). The RankError
    cannot say which of several ranks it is, and every later call raises it, too, as the ranks are no longer in step.
    """

    # The class of a shard's cache; tests put another class or a staticmethod here.
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
        _check_devices(devices, shape)
        checked = None if weights is None else _checked_weights(weights)
        timeout_s = check_timeout(timeout_s)
        if comm is not None and len(devices) != 1:
            raise ArgumentError(f"devices: got {len(devices)} with a communicator, expected this rank's one")
        dtype, rounds = storage_dtype(dtype), check_bool("round_rows", round_rows)
        self.devices, self.dtype = list(devices), dtype
        num_layers = check_int("num_layers", num_layers, 1, MAX_LAYERS)
        scales = check_head_scales(dtype, shape, num_layers, k_scale, v_scale)
        capacity = check_int("capacity", capacity, 1, MAX_CONTEXT)
        page_size = check_int("page_size", page_size, MIN_PAGE_SIZE, KEYS_PER_NODE)
        shares = [float(memory_budget(device.info)[1]) for device in devices] if checked is None else checked
        if len(shares) != len(devices):
            raise ArgumentError(f"weights: got {len(shares)}, expected one per device ({len(devices)})")
        ranks = comm if comm is None or isinstance(comm, Ranks) else Ranks(comm, timeout_s)
        if ranks is not None:
            setup = f"{shape} layers={num_layers} capacity={capacity} {dtype} page_size={page_size} round_rows={rounds}"
            setup += "" if scales is None else f" scales={hashlib.sha256(scales.tobytes()).hexdigest()}"
            shares = ranks.agree(setup, shares[0])
        super().__init__(shape, num_layers, capacity, shares, ranks)
        self.users: Registry[Any] = Registry()  # objects that close() must close first
        local = range(len(shares)) if ranks is None else [ranks.rank]
        try:
            options = {"round_rows": rounds, "k_scale": k_scale, "v_scale": v_scale}
            with Call.of(self, "ShardedKVCache()") as call:
                for device, shard in zip(devices, local, strict=True):
                    tokens = int(self.allocator.capacity[shard]) * KEYS_PER_NODE
                    arguments = (device, shape, num_layers, tokens, dtype, page_size)
                    self.shards[shard] = self.make_shard(*arguments, **options)
                call.exchange()
        except BaseException:
            self.close()
            raise

    @property
    def free_tokens(self) -> int:
        """Tokens for which nodes are free, on every rank the same. A longer append may find a shard full."""
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
            self.settle()
            return ShardedSequence(self)

    def append(self, seq: ShardedSequence, layer: int, k: Any, v: Any = None) -> None:
        """Append tokens to one layer, as ``KVCache.append`` does. Each shard takes the tokens of its nodes.

        A failed call changes nothing.
        """
        with Call.of(self, "append") as call:
            call.check([seq], layer, [k], None if v is None else [v])
            call.reserve()

            def append(shard: int) -> None:
                rows_k, rows_v = call.pieces[0][shard]
                if rows_k is not None:
                    self.shards[shard].append(seq.shards[shard], layer, rows_k, rows_v)

            call.run_on_shards(append)
            call.exchange()

    def keep_rows(self, seq: ShardedSequence, rows: Any, last: int) -> None:
        """See ``ShardedSequence.keep``."""
        with Call.of(self, "keep") as call:
            seq.lengths_of.check_open()
            call.keep(seq, check_kept(seq.lengths_of, rows, last))

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
        """Close the cache. If this rank leaves by an error, other ranks get the error in their current or next call."""
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
