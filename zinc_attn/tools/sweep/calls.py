"""K and V on devices, and the calls on them that a sweep verifies and times."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np

from ...cache.kv_cache import KVCache
from ...cache.rows import tiles
from ...canonical.constants import KEYS_PER_LEAF, KEYS_PER_NODE
from ...decode.attention import Attention
from ...decode.contiguous import ContiguousKV, RecordedCall
from ...distributed.attention import ShardedAttention
from ...distributed.cache import ShardedKVCache
from ...distributed.ranks import Ranks
from ...errors import LimitError
from ...limits import MAX_CONTEXT
from ...planning.arithmetic import Arithmetic
from ...planning.splits import SplitPlan
from ...runtime.device import Device
from ...shapes import row_format
from ..harness.bits import F32, Output
from ..harness.inputs import Inputs
from ..harness.split_spec import SplitSpec
from .rows import SweepSpec


@dataclass(frozen=True)
class AttentionCall:
    """A call under one layout.

    spoil: leaves an output other than that of the call, so that an element which the call does not write is seen;
    run: makes the call and returns the seconds it took; result: out (batch, q_len, q_heads, head_dim) and lse (batch,
    q_len, q_heads) of the last call.
    """

    spoil: Callable[[], object]
    run: Callable[[], float]
    result: Callable[[], Output]


def make_resident(device: Device, spec: SweepSpec, context: int) -> CachedInputs | ContiguousInputs:
    """Room for the sequences of one context. LimitError and MemoryError where the device has none."""
    if spec.page_size is None:
        return ContiguousInputs(device, spec, context)
    capacity = spec.batch * -(-context // spec.page_size) * spec.page_size
    if capacity > MAX_CONTEXT:
        asked = f"{spec.batch} x {context:,} tokens"
        raise LimitError(f"{asked}: a cache holds at most {MAX_CONTEXT:,}, in whole pages")
    cache = KVCache(device, spec.shape, 1, capacity, spec.dtype, spec.page_size)
    return CachedInputs(cache, context - spec.q_len, spec.arithmetic)


class CachedInputs:
    """The sequences of a batch in a cache of one layer, which have ``before`` tokens each between the calls."""

    def __init__(self, cache: KVCache | ShardedKVCache, before: int, arithmetic: Arithmetic) -> None:
        self.cache, self.before, self.arithmetic = cache, before, arithmetic
        self.sequences: list[Any] = []
        self.q: list[F32] = []  # of each sequence, as k and v are: the rows that a call appends
        self.k: list[F32] = []
        self.v: list[F32] = []

    def add(self, data: Inputs) -> None:
        """Make the next sequence, of ``data``."""
        cache: Any = self.cache
        sequence, n = cache.new_sequence(), self.before
        if n:
            cache.append(sequence, 0, data.k[:n], data.v[:n])
        self.sequences.append(sequence)
        self.q.append(data.rows)
        self.k.append(data.k[n:].copy())
        self.v.append(data.v[n:].copy())

    def call(self, split: SplitSpec, plan: SplitPlan) -> AttentionCall:
        """The call under a layout, whose plan is ``plan``. The rows are cut off again outside the clock."""
        attention: Any
        if isinstance(self.cache, ShardedKVCache):
            attention = ShardedAttention(self.cache, arithmetic=self.arithmetic)
        else:
            attention = Attention(
                self.cache, num_splits=split.num_splits, split_size=split.split_size, arithmetic=self.arithmetic
            )
        alone, got = len(self.sequences) == 1, list[Any]()

        def run(queries: list[F32]) -> float:
            batch = queries, self.sequences, self.k, self.v
            q, sequences, k, v = (x[0] for x in batch) if alone else batch
            begin = perf_counter()
            made = attention(q, sequences, 0, k, v, return_lse=True)
            seconds = perf_counter() - begin
            got[:] = ([x] for x in made) if alone else made
            for sequence in self.sequences:
                sequence.truncate(self.before)
            return seconds

        others = [-q for q in self.q]
        return AttentionCall(lambda: run(others), lambda: run(self.q), lambda: Output(*map(np.stack, got)))

    def close(self) -> None:
        """Free the device memory."""
        self.cache.close()


class RankedInputs(CachedInputs):
    """A sequence whose nodes lie on ranks. formula_bytes: those that this rank should get in a call."""

    def __init__(self, ranks: Ranks, device: Device, spec: SweepSpec, context: int) -> None:
        assert spec.page_size is not None
        shape = spec.shape
        cache = ShardedKVCache([device], shape, 1, context, spec.dtype, spec.page_size, comm=ranks)
        super().__init__(cache, context - spec.q_len, spec.arithmetic)
        others = int(np.sum(cache.owners[: -(-context // KEYS_PER_NODE)] != ranks.rank))  # nodes of other ranks
        self.formula_bytes = others * spec.q_len * shape.q_heads * (shape.v_head_dim + 2) * 4


class ContiguousInputs:
    """K and V of one sequence as two arrays on the device."""

    def __init__(self, device: Device, spec: SweepSpec, context: int) -> None:
        row = row_format(spec.shape, spec.dtype)
        nbytes = 4 * tiles(context) * KEYS_PER_LEAF * spec.shape.kv_heads * max(row.k_words, row.v_words)
        if nbytes > device.info.max_buffer_bytes:
            raise LimitError(
                f"K or V of {nbytes:,} bytes: {device.info.name} takes at most {device.info.max_buffer_bytes:,} bytes "
                "in one storage buffer; use a shorter context, a smaller dtype, or the cache"
            )
        self._device, self._dtype, self._arithmetic = device, spec.dtype, spec.arithmetic
        self._stack = ExitStack()

    def add(self, data: Inputs) -> None:
        """Make the one sequence, of ``data``."""
        self._q = data.rows
        self._kv = ContiguousKV(self._device, data.k, data.v, self._dtype)
        self._stack.callback(self._kv.close)

    def call(self, split: SplitSpec, plan: SplitPlan) -> AttentionCall:
        """The call by ``plan``, which is that of ``split``."""
        step = RecordedCall(self._kv, plan, arithmetic=self._arithmetic)
        self._stack.callback(step.close)
        step.write_q(self._q)

        def run() -> float:
            begin = perf_counter()
            step.run()
            return perf_counter() - begin

        return AttentionCall(step.poison, run, lambda: Output(*(x[None] for x in step.result())))

    def close(self) -> None:
        """Free the device memory."""
        self._stack.close()
