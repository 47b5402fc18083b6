"""K and V on devices, and the calls on them that are verified and timed."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from dataclasses import dataclass, field, replace
from time import perf_counter, process_time, thread_time
from typing import Any, Final

import numpy as np

from ...cache.kv_cache import KVCache
from ...cache.rows import tiles
from ...canonical.constants import KEYS_PER_LEAF, KEYS_PER_NODE
from ...decode.attention import Attention
from ...decode.contiguous import ContiguousKV, RecordedCall, packed
from ...distributed.attention import ShardedAttention
from ...distributed.cache import ShardedKVCache
from ...distributed.ranks import Ranks
from ...errors import LimitError
from ...kernels import declarations as kernels
from ...limits import MAX_CONTEXT, WAVE
from ...planning.splits import SplitPlan
from ...runtime.device import Device
from ...runtime.protocol import Buffer, Dispatch, Use
from ...shapes import row_format
from ..harness.bits import F32, Output, compare
from ..harness.inputs import Inputs
from ..harness.split_spec import SplitSpec
from .rows import Row, Times
from .spec import CallSpec

READ_LOADS: Final = 16  # uvec4 a lane of the yardstick, or the next larger number that divides the buffer
PER_HEAD: Final = "per query head"  # the layout of a benchmark with a workgroup for every query head


@dataclass
class Subject:
    """A call that is verified and timed, and its row.

    clocked: calls by the host's clock, by measure, of which "call" is the one that is verified; cut_back: called behind
    each, outside the clock. spoil: leaves an output other than that of the call, so that an element which the call does
    not write is seen; result: out (batch, q_len, q_heads, head_dim) and lse (batch, q_len, q_heads) of the last call,
    None of what has no such output. stamped: gives a recording with timestamps, None where there is no such clock.
    output: what was verified.
    """

    row: Row
    clocked: dict[str, Callable[[], object]] = field(default_factory=dict)
    cut_back: Callable[[], object] = lambda: None
    spoil: Callable[[], object] = lambda: None
    result: Callable[[], Output] | None = None
    stamped: Callable[[], AbstractContextManager[Recorded]] | None = None
    output: Output | None = None
    seconds: float = 0.0  # of the last call
    timed_runs: int = 0  # below 1 while calls warm up

    def run(self, name: str = "call") -> Times:
        """Make a call by the host's clock."""
        call, caller, cpu, start = self.clocked[name], thread_time(), process_time(), perf_counter()
        call()
        times = perf_counter() - start, process_time() - cpu, thread_time() - caller
        self.cut_back()
        self.seconds = times[0]
        return times

    def timed_run(self) -> dict[str, Times]:
        """A time of every measure; the output of each call is compared with the verified one."""
        self.timed_runs += 1
        made = dict[str, Times]()
        for name in self.clocked:
            made[name] = self.run(name)
            self._compare(f"timed run {self.timed_runs}" if self.timed_runs > 0 else "a warm-up run")
        if self.stamped is not None:
            with self.stamped() as call:
                call.run()
                (begin, end), *more = call.timings()
            made["device"] = ((more[-1][1] if more else end) - begin,)
            if self.result is not None:
                made["pass 1"] = (end - begin,)
                for second, third in more:
                    made |= {"gap": (second - end,), "pass 2": (third - second,)}
        return made

    def run_spoiled(self) -> None:
        """A call behind the timing, whose output was spoiled before: timed calls that write nothing would show here."""
        if self.result is not None:
            self.spoil()
            self.run()
            self._compare("a run behind the timing")

    def _compare(self, when: str) -> None:
        """Fail the row where the last output is not the verified one."""
        verified = self.output if self.row.status == "ok" else None
        if verified and self.result and (found := compare(self.result(), verified)):
            self.row = self.row.failed(f"in {when}: {found.text()}")


def make_resident(device: Device, spec: CallSpec, context: int, ranks: Ranks | None = None) -> Resident:
    """Room for the sequences of one context. LimitError and MemoryError where the device has none."""
    if ranks:
        return RankedInputs(ranks, device, spec, context)
    if spec.page_size is None:
        return ContiguousInputs(device, spec, context)
    capacity = spec.batch * -(-context // spec.page_size) * spec.page_size
    if capacity > MAX_CONTEXT:
        asked = f"{spec.batch} x {context:,} tokens"
        raise LimitError(f"{asked}: a cache holds at most {MAX_CONTEXT:,}, in whole pages")
    return CachedInputs(KVCache(device, spec.shape, 1, capacity, spec.dtype, spec.page_size), spec, context)


class CachedInputs:
    """The sequences of a batch in a cache of one layer, which have ``before`` tokens each between the calls."""

    def __init__(self, cache: KVCache | ShardedKVCache, spec: CallSpec, context: int) -> None:
        self.cache, self.before, self.arithmetic = cache, context - spec.q_len, spec.arithmetic
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

    def _attention(self, split: SplitSpec) -> Callable[..., Any]:
        assert isinstance(self.cache, KVCache)
        return Attention(
            self.cache, num_splits=split.num_splits, split_size=split.split_size, arithmetic=self.arithmetic
        )

    def call(self, row: Row, split: SplitSpec, plan: SplitPlan) -> Subject:
        """The call under a layout, whose plan is ``plan``."""
        attention, alone, got = self._attention(split), len(self.sequences) == 1, list[Any]()

        def arguments(q: list[F32]) -> tuple[Any, ...]:
            batch = q, self.sequences, self.k, self.v
            return tuple(x[0] for x in batch) if alone else batch

        given, others = arguments(self.q), arguments([-q for q in self.q])

        def attend(call: tuple[Any, ...] = given) -> None:
            q, sequences, k, v = call
            got[:] = attention(q, sequences, 0, k, v, return_lse=True)

        def cut_back() -> None:
            for sequence in self.sequences:
                sequence.truncate(self.before)

        def spoil() -> None:
            attend(others)
            cut_back()

        def result() -> Output:
            return Output(*(np.stack([x] if alone else x) for x in got))

        return Subject(row, {"call": attend}, cut_back, spoil, result)

    def close(self) -> None:
        """Free the device memory."""
        self.cache.close()


class RankedInputs(CachedInputs):
    """A sequence whose nodes lie on ranks. It is appended by ``call``, so that every rank appends or none does."""

    cache: ShardedKVCache

    def __init__(self, ranks: Ranks, device: Device, spec: CallSpec, context: int) -> None:
        assert spec.page_size is not None
        shape, self.ranks = spec.shape, ranks
        cache = ShardedKVCache([device], shape, 1, context, spec.dtype, spec.page_size, comm=ranks)
        super().__init__(cache, spec, context)
        others = int(np.sum(cache.owners[: -(-context // KEYS_PER_NODE)] != ranks.rank))  # nodes of other ranks
        self.formula_bytes = others * spec.q_len * shape.q_heads * (shape.v_head_dim + 2) * 4  # to get in a call

    def add(self, data: Inputs) -> None:
        """Take the sequence's ``data``."""
        self.data = data

    def _attention(self, split: SplitSpec) -> Callable[..., Any]:
        return ShardedAttention(self.cache, arithmetic=self.arithmetic)

    def call(self, row: Row, split: SplitSpec, plan: SplitPlan) -> Subject:
        """The call, whose layout is a split per node."""
        super().add(self.data)
        return super().call(replace(row, formula_bytes=self.formula_bytes), split, plan)


class ContiguousInputs:
    """K and V of one sequence as two arrays on the device."""

    def __init__(self, device: Device, spec: CallSpec, context: int) -> None:
        row = row_format(spec.shape, spec.dtype)
        nbytes = 4 * tiles(context) * KEYS_PER_LEAF * spec.shape.kv_heads * max(row.k_words, row.v_words)
        if nbytes > device.info.max_buffer_bytes:
            raise LimitError(
                f"K or V of {nbytes:,} bytes: {device.info.name} takes at most {device.info.max_buffer_bytes:,} bytes "
                "in one storage buffer; use a shorter context, a smaller dtype, or the cache"
            )
        self.device, self.spec, self.stack = device, spec, ExitStack()

    def add(self, data: Inputs) -> None:
        """Make the one sequence, of ``data``."""
        self.q = data.rows
        self.kv = self.stack.enter_context(closing(ContiguousKV(self.device, data.k, data.v, self.spec.dtype)))

    def call(self, row: Row, split: SplitSpec, plan: SplitPlan) -> Subject:
        """The call by ``plan``, which is that of ``split``; for a benchmark with all measures."""
        heads, arithmetic = 1 if split.label == PER_HEAD else plan.shape.heads_per_workgroup, self.spec.arithmetic

        def record(timestamps: bool) -> RecordedCall:
            made = RecordedCall(self.kv, plan, timestamps=timestamps, heads_per_workgroup=heads, arithmetic=arithmetic)
            made.write_q(self.q)
            return made

        step = self.stack.enter_context(closing(record(False)))

        def steady() -> None:
            step.write_q(self.q)
            step.run()
            step.result()

        def result() -> Output:
            return Output(*(x[None] for x in step.result()))

        subject = Subject(replace(row, heads_per_workgroup=heads), {"call": step.run}, spoil=step.poison, result=result)
        if row.tool == "bench":
            subject.clocked["steady call"] = steady
            subject.stamped = self._stamped(record)
        return subject

    def yardstick(self, data: Inputs) -> Subject:
        """The call that reads K and V, which are those of ``data``, and does nothing else; verified."""
        read = self.stack.enter_context(closing(ReadYardstick(self.kv)))
        row = Row.of("bench", self.device, self.spec.shape, self.spec.dtype, self.kv.tokens, layout="read")
        wrong = read.wrong(data, self.spec.dtype)
        row = row.failed(wrong) if wrong else replace(row, verified="xor of all words")
        return Subject(row, {"call": read.run}, stamped=self._stamped(lambda stamps: ReadYardstick(self.kv, stamps)))

    def _stamped(self, record: Callable[[bool], Recorded]) -> Callable[[], AbstractContextManager[Recorded]] | None:
        """What gives the recording that ``record`` makes with timestamps; None where the device has no clock."""
        if not self.kv.tokens or not self.device.info.timestamp_period_ns:
            return None
        # A CPU's driver compiles a pipeline in its first run, so a recording that can be timed again is kept.
        kept = self.stack.enter_context(closing(record(True)))
        return lambda: nullcontext(kept)

    def close(self) -> None:
        """Free the device memory."""
        self.stack.close()


class ReadYardstick:
    """A kernel that reads the buffers of a ContiguousKV once and does nothing else."""

    def __init__(self, kv: ContiguousKV, timestamps: bool = False) -> None:
        self.runtime = kv.device.runtime
        self.out: list[Buffer] = []
        steps, most = [], self.runtime.info.max_workgroups[0]
        for data in (kv.k, kv.v):
            lanes = data.nbytes // (16 * WAVE)  # rows of 32 uvec4
            rows = (n for n in itertools.count(min(READ_LOADS, lanes)) if lanes % n == 0 and lanes // n <= most)
            loads = next(rows)
            self.out.append(self.runtime.buffer(4 * lanes // loads, Use.OUTPUT))
            kernel = kv.device.kernel(kernels.READ, (loads,))
            steps.append(Dispatch(kernel, (data, self.out[-1]), (lanes // loads, 1, 1)))
        self.recording = self.runtime.record(steps, timestamps)

    def run(self) -> None:
        """Submit and wait."""
        self.runtime.run(self.recording)

    def timings(self) -> list[tuple[float, float]]:
        """Begin and end of each dispatch on the device's clock."""
        return self.runtime.timings(self.recording)

    def wrong(self, data: Inputs, dtype: str) -> str | None:
        """What is wrong with a run: whether it leaves any word of ``data``, stored as ``dtype``, unread."""
        self.run()
        for words, out in zip(packed(data.k, data.v, dtype, True), self.out, strict=True):
            if not np.array_equal(np.bitwise_xor.reduce(words.reshape(out.nbytes // 4, -1), 1), self.runtime.read(out)):
                return "the yardstick did not read every word"
        return None

    def close(self) -> None:
        """Free the command buffer and the output."""
        self.recording.close()
        for buffer in self.out:
            buffer.close()


Recorded = RecordedCall | ReadYardstick
Resident = CachedInputs | ContiguousInputs
