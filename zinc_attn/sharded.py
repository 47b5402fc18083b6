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
import sys
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from threading import RLock, Thread
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from . import kernels
from .cache import KVCache, Sequence
from .decode import Attention, padded
from .device import Device
from .errors import ArgumentError, ShapeError, ZincAttnError
from .kernels import MERGE, MERGE_DIMS, SCRATCH_BYTES
from .reference import PartialState, gather
from .rows import Work
from .runtime import Buffer, Dispatch, Recording, Use, memory_budget
from .shapes import KEYS_PER_NODE, MAX_CONTEXT, NODE, AttnShape, check_int

F32 = NDArray[np.float32]
T = TypeVar("T")
TIMEOUT_S: Final = 60.0  # that a rank waits for the others' partial states
GRACE_S: Final = 5.0  # between a rank's error and the end of all, for the others' errors to be printed
NO_MPI: Final = (
    "several ranks need mpi4py and an MPI: pip install 'zinc-attn[mpi]', and MPICH or Open MPI from the system or "
    "pip install mpich"
)


class RankError(ZincAttnError):
    """Another rank failed, was lost, or is set up otherwise; the message says which and what."""


# --- the fold on a device ----------------------------------------------------------------------------------


class Fold:
    """Pass 2 on ``device`` for partial states from anywhere; buffers and command buffers are kept between calls."""

    def __init__(self, device: Device, shape: AttnShape) -> None:
        self.device, self.shape = device, shape
        self._made: dict[tuple[int, int, bool], tuple[Work, list[Buffer], Recording]] = {}

    def __call__(self, parts: Seq[PartialState]) -> tuple[F32, F32]:
        """out (q_len, q_heads, head_dim) and lse (q_len, q_heads): the bits of ``fold``, and its errors."""
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
        work, (words, states, out), recording = self._rig(rows, states_room, whole.sinks is not None)
        work.rows[:] = 0
        work.rows[:count, 0], work.rows[:count, 1] = np.arange(count) * n, n
        work.rows[:count, 2], work.rows[:count, 3] = whole.span[0], NODE
        if whole.sinks is not None:
            work.sinks[:] = whole.sinks.view(np.uint32)
        runtime.write(words, work.words)
        runtime.write(states, np.ascontiguousarray(whole.o[begin:end]).reshape(-1).view(np.uint32))
        pairs = np.stack([whole.m[begin:end], whole.l[begin:end]], axis=-1)
        runtime.write(states, np.ascontiguousarray(pairs).reshape(-1).view(np.uint32), states_room * heads * dim)
        runtime.run(recording)
        found, size = runtime.read(out).view(np.float32), rows * heads * dim
        return found[:size].reshape(rows, heads, dim)[:count], found[size:].reshape(rows, heads)[:count]

    def _rig(self, rows: int, states: int, sinks: bool) -> tuple[Work, list[Buffer], Recording]:
        key = rows, states, sinks
        if key not in self._made:
            runtime, shape = self.device.runtime, self.shape
            work = Work(0, rows, 0, 0, np.zeros(shape.q_heads, np.float32) if sinks else None)
            work.set_shape(shape, shape.kv_heads)
            work.set(rows=rows, state_stride=states)
            made: list[Buffer] = []
            try:
                made.append(runtime.buffer(4 * work.words.size, Use.INPUT))
                made.append(runtime.buffer(4 * states * shape.q_heads * (shape.head_dim + 2), Use.INPUT))
                made.append(runtime.buffer(4 * rows * shape.q_heads * (shape.head_dim + 1), Use.OUTPUT))
                lanes = kernels.merge_lanes(self.device.info.kind)
                kernel = self.device.kernel(MERGE, (shape.head_dim, lanes))
                grid = (-(-shape.head_dim // MERGE_DIMS), shape.q_heads, rows)
                recording = runtime.record([Dispatch(kernel, (made[0], made[1], made[2]), grid)])
            except BaseException:
                for buffer in made:
                    buffer.close()
                raise
            self._made[key] = work, made, recording
        return self._made[key]

    def close(self) -> None:
        """Free the buffers."""
        for _, buffers, recording in self._made.values():
            recording.close()
            for buffer in buffers:
                buffer.close()
        self._made.clear()


# --- who holds what ----------------------------------------------------------------------------------------


def deal(nodes: int, weights: Seq[float]) -> NDArray[np.int64]:
    """The shard of each of ``nodes`` nodes, (nodes,): after any number of them each has its weight's share, within one.

    Which shard holds a node never shows in the bits.
    """
    share = np.asarray(weights, np.float64)
    if share.ndim != 1 or not share.size or not np.all(np.isfinite(share)) or np.any(share <= 0):
        raise ArgumentError(f"weights: got {list(weights)}, expected positive numbers, one per shard")
    share = share / share.sum()
    owners = np.empty(nodes, np.int64)
    have = np.zeros(share.size)
    for node in range(nodes):
        owners[node] = np.argmax(share * (node + 1) - have)
        have[owners[node]] += 1
    return owners


class ShardedSequence:
    """A sequence whose nodes lie on several shards, from ``ShardedKVCache.new_sequence``."""

    def __init__(self, cache: ShardedKVCache) -> None:
        self.cache = cache
        self.lengths = [0] * cache.num_layers
        self.shards: dict[int, Sequence] = {i: one.new_sequence() for i, one in cache.shards.items()}

    def __len__(self) -> int:
        return min(self.lengths)

    def __bool__(self) -> bool:
        return True

    def nodes(self, shard: int, tokens: int) -> NDArray[np.int64]:
        """The numbers of the nodes that ``shard`` holds of the first ``tokens`` tokens."""
        return np.flatnonzero(self.cache.owners[: -(-tokens // KEYS_PER_NODE)] == shard)

    def truncate(self, n: int) -> None:
        """Keep the first ``n`` tokens, at most len(self)."""
        with self.cache.lock:
            n = check_int("n", n, 0, len(self))
            for shard, sequence in self.shards.items():
                sequence.truncate(int(np.clip(n - self.nodes(shard, n) * KEYS_PER_NODE, 0, KEYS_PER_NODE).sum()))
            self.lengths[:] = [n] * len(self.lengths)

    def free(self) -> None:
        """Give the pages back."""
        with self.cache.lock:
            for sequence in self.shards.values():
                sequence.free()


class ShardedKVCache:
    """A KVCache whose sequences lie on several devices.

    devices: open Devices, of one vendor or of several; weights: shares of the nodes, None for the devices' memory (a
    bandwidth per device balances the time instead); capacity: tokens over all sequences; the rest as in ``KVCache``,
    page_size at most 512.
    With ``comm``, an mpi4py communicator or Ranks, the shards are the ranks: each gives one device and its own weight,
    and every rank makes the same calls with the same arguments. RankError where the ranks' arguments differ.
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
        if not devices or not all(isinstance(device, Device) for device in devices):
            raise ArgumentError(f"devices: got {devices!r}, expected a list of open Devices")
        if comm is not None and len(devices) != 1:
            raise ArgumentError(f"devices: got {len(devices)} with a communicator, expected this rank's one")
        self.devices, self.shape, self.dtype = list(devices), shape, dtype
        self.num_layers = check_int("num_layers", num_layers, 1)
        capacity = check_int("capacity", capacity, 1, MAX_CONTEXT)
        page_size = check_int("page_size", page_size, 16, KEYS_PER_NODE)
        memory = [float(memory_budget(device.info.index)[1]) for device in devices]
        shares = list(memory if weights is None else weights)
        if len(shares) != len(devices):
            raise ArgumentError(f"weights: got {len(shares)}, expected one per device ({len(devices)})")
        self.ranks = comm if comm is None or isinstance(comm, Ranks) else Ranks(comm, timeout_s)
        if self.ranks is not None:
            setup = f"{shape} layers={num_layers} capacity={capacity} {dtype} page_size={page_size}"
            shares = self.ranks.agree(setup, shares[0])
        nodes = -(-capacity // KEYS_PER_NODE)
        self.owners = deal(nodes, shares)
        counts = np.bincount(self.owners, minlength=len(shares))
        mine = range(len(shares)) if self.ranks is None else [self.ranks.rank]
        self.shards: dict[int, KVCache] = {}
        self.lock = RLock()
        try:
            for device, shard in zip(devices, mine, strict=True):
                tokens = max(int(counts[shard]), 1) * KEYS_PER_NODE
                self.shards[shard] = KVCache(device, shape, num_layers, tokens, dtype, page_size)
        except BaseException:
            self.close()
            raise

    @property
    def capacity(self) -> int:
        """Tokens of one sequence that has the cache to itself."""
        return len(self.owners) * KEYS_PER_NODE

    def new_sequence(self) -> ShardedSequence:
        """An empty sequence."""
        with self.lock:
            return ShardedSequence(self)

    def append(self, seq: ShardedSequence, layer: int, k: Any, v: Any) -> None:
        """Append tokens to one layer, as ``KVCache.append``; each shard takes those of its nodes."""
        with self.lock:
            pieces, end = self.pieces(seq, layer, k, v)

            def one(shard: int) -> None:
                rows_k, rows_v = pieces[shard]
                if len(rows_k):
                    self.shards[shard].append(seq.shards[shard], layer, rows_k, rows_v)

            with self.kept(seq, layer):
                self.together(one)
                seq.lengths[layer] = end

    def pieces(
        self, seq: ShardedSequence, layer: int, k: Any, v: Any
    ) -> tuple[dict[int, tuple[NDArray[Any], NDArray[Any]]], int]:
        """The new rows of each local shard, and the layer's length with them. ArgumentError beyond the capacity.

        Every rank checks all rows, so that an error names a row as the caller counts them.
        """
        layer = check_int("layer", layer, 0, self.num_layers - 1)
        keys, values, _ = next(iter(self.shards.values())).check_rows(k, v)
        begin = seq.lengths[layer]
        end = begin + len(keys)
        if end > self.capacity:
            raise ArgumentError(f"k: {end} tokens, expected at most capacity = {self.capacity}")
        owner = self.owners[np.arange(begin, end) // KEYS_PER_NODE]
        return {shard: (keys[owner == shard], values[owner == shard]) for shard in self.shards}, end

    def together(self, one: Callable[[int], T]) -> dict[int, T]:
        """``one`` on every local shard at a time; where one fails, its error."""
        with ThreadPoolExecutor(len(self.shards)) as pool:
            waiting = {shard: pool.submit(one, shard) for shard in self.shards}
        return {shard: f.result() for shard, f in waiting.items()}

    @contextmanager
    def kept(self, seq: ShardedSequence, layer: int) -> Iterator[None]:
        """Where the block fails, a layer gets its former lengths back, on every local shard."""
        before = {shard: sequence.lengths[layer] for shard, sequence in seq.shards.items()}
        length = seq.lengths[layer]
        try:
            yield
        except BaseException:
            seq.lengths[layer] = length
            for shard, n in before.items():
                seq.shards[shard].retract(layer, n)
            raise

    def close(self) -> None:
        """Free the device memory of the local shards."""
        for cache in self.shards.values():
            cache.close()

    def __enter__(self) -> ShardedKVCache:
        return self

    def __exit__(self, *error: object) -> None:
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
        self.cache = cache
        options = {"scale": scale, "window": window, "softcap": softcap, "sinks": sinks}
        self._attention = {i: Attention(one, **options) for i, one in cache.shards.items()}
        self._fold = Fold(cache.devices[0], cache.shape)
        self.sent_bytes = 0

    def __call__(
        self, q: Any, seq: ShardedSequence, layer: int, k: Any = None, v: Any = None, *, return_lse: bool = False
    ) -> Any:
        """Append k, v to ``seq``, then attend, as ``Attention``. A failed call leaves the cache as it was."""
        cache = self.cache
        if not isinstance(seq, ShardedSequence) or seq.cache is not cache:
            raise ArgumentError(f"seq: got {type(seq).__name__}, expected a ShardedSequence of this cache")
        with cache.lock:
            layer = check_int("layer", layer, 0, cache.num_layers - 1)
            with cache.kept(seq, layer):
                try:
                    out, lse, end = self._attend(q, seq, layer, k, v)
                except BaseException as error:
                    if cache.ranks is not None and not isinstance(error, RankError):
                        cache.ranks.fail(error)
                    raise
                seq.lengths[layer] = end
        out, lse = out.reshape(np.shape(q)), lse.reshape(np.shape(q)[:-1])
        return (out, lse) if return_lse else out

    def _attend(self, q: Any, seq: ShardedSequence, layer: int, k: Any, v: Any) -> tuple[F32, F32, int]:
        cache, end = self.cache, seq.lengths[layer]
        pieces: dict[int, tuple[Any, Any]] = dict.fromkeys(cache.shards, (None, None))
        if k is not None or v is not None:
            if k is None or v is None:
                raise ArgumentError("k, v: got one of them, expected both, or neither")
            pieces, end = cache.pieces(seq, layer, k, v)

        def one(shard: int) -> PartialState:
            rows = pieces[shard]
            rows = rows if rows[0] is not None and len(rows[0]) else (None, None)
            nodes = seq.nodes(shard, end)
            return self._attention[shard].partial(q, seq.shards[shard], layer, *rows, nodes=nodes, tokens=end)

        parts = list(cache.together(one).values())
        if cache.ranks is not None:
            self.sent_bytes += parts[0].nbytes
            parts = [PartialState.from_bytes(data) for data in cache.ranks.exchange(parts[0].to_bytes())]
        out, lse = self._fold(parts)
        return out, lse, end

    def close(self) -> None:
        """Free the command buffers and tensors."""
        self._fold.close()
        for attention in self._attention.values():
            attention.close()


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


class Ranks:
    """The ranks of an mpi4py communicator, which exchange bytes with a time limit; a failed one tells the others.

    lost: an exchange was not done in time, and none will be. received_bytes: from the other ranks, so far.
    """

    def __init__(self, comm: Any, timeout_s: float = TIMEOUT_S) -> None:
        self.timeout_s, self.lost, self.received_bytes = timeout_s, False, 0
        self.rank, self.size = int(comm.Get_rank()), int(comm.Get_size())
        self._late: list[Any] = []  # requests given up, and with them the memory that they may still write
        self._comm, request = comm.Idup()
        self._wait(request)

    def agree(self, setup: str, weight: float) -> list[float]:
        """The weights of all ranks. RankError unless all have the same ``setup``."""
        found = [data.decode().rsplit(" ", 1) for data in self.exchange(f"{setup} {weight!r}".encode())]
        for rank, (theirs, _) in enumerate(found):
            if theirs != found[0][0]:
                raise RankError(f"rank {rank} is set up as {theirs}, rank 0 as {found[0][0]}; expected the same")
        return [float(weight) for _, weight in found]

    def exchange(self, data: bytes) -> list[bytes]:
        """Every rank's ``data``, by rank. RankError: a rank failed, or did not answer in time, now or before."""
        if self.lost:
            raise RankError(f"rank {self.rank}: a rank was lost before; start all of them again")
        return self._gather(b"\0" + data)

    def fail(self, error: BaseException) -> None:
        """Answer the exchange that the others are in with an error."""
        if not self.lost:
            with suppress(RankError):  # this rank's own error is raised
                self._gather(b"\1" + f"{type(error).__name__}: {error}".encode())

    def abort(self, status: int) -> None:
        """End all ranks with ``status``, after the grace in which the others print why."""
        sys.stdout.flush()
        sys.stderr.flush()
        time.sleep(min(self.timeout_s, GRACE_S))
        self._comm.Abort(status)

    def _gather(self, data: bytes) -> list[bytes]:
        sizes = np.zeros(self.size, np.int64)
        self._wait(self._comm.Iallgather(np.array([len(data)], np.int64), sizes))
        starts = np.cumsum(sizes) - sizes
        received = np.empty(int(sizes.sum()), np.uint8)
        self._wait(self._comm.Iallgatherv(np.frombuffer(data, np.uint8), (received, (sizes, starts))))
        self.received_bytes += sizes.nbytes - sizes.itemsize + received.nbytes - len(data)
        found = [received[a : a + n].tobytes() for a, n in zip(starts, sizes, strict=True)]
        failed = {rank: one[1:].decode() for rank, one in enumerate(found) if one[:1] == b"\1"}
        if failed:
            rank, text = next(iter(failed.items()))
            raise RankError(f"rank {rank} failed: {text}")
        return [one[1:] for one in found]

    def _wait(self, request: Any) -> None:
        """RankError where the request is not done in time; the communicator is of no use from then on."""
        deadline = time.monotonic() + self.timeout_s
        pause = 0.0
        while not request.Test():
            if time.monotonic() > deadline:
                self.lost = True
                self._late.append(request)
                raise RankError(
                    f"rank {self.rank} waited {self.timeout_s:g} s for the {self.size - 1} other ranks; one is lost or "
                    "made another call; look at their output, and start all of them again"
                )
            time.sleep(pause)
            pause = min(pause + 2e-5, 1e-3)
