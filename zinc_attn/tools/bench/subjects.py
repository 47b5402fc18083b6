"""What is timed as one: the calls of a layout, and the yardstick that reads K and V and does nothing else."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from dataclasses import dataclass, replace
from time import perf_counter, process_time, thread_time
from typing import Final, TypeVar

import numpy as np

from ...decode.contiguous import ContiguousKV, RecordedCall, packed
from ...kernels import declarations as kernels
from ...limits import WAVE
from ...planning.arithmetic import Arithmetic
from ...runtime.protocol import Buffer, Dispatch, Use
from ..harness.bits import Output
from ..harness.inputs import Inputs
from ..harness.split_spec import SplitSpec
from .rows import BenchRow, Times

READ_LOADS: Final = 16  # uvec4 a lane of the yardstick, or the next larger number that divides the buffer


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


TimedCall = TypeVar("TimedCall", RecordedCall, ReadYardstick)


@dataclass
class Subject:
    """A row, and what is timed for its measures.

    clocked: calls by the host's clock; stamped: gives a recording with timestamps, None where the device has no clock;
    output: out (q_heads, head_dim) and lse (q_heads,) of a run into an output that was all NaN, None without such.
    """

    row: BenchRow
    clocked: dict[str, Callable[[], object]]
    stamped: Callable[[], AbstractContextManager[RecordedCall | ReadYardstick]] | None = None
    output: Callable[[], Output] | None = None

    def sample(self) -> dict[str, Times]:
        """One time of every measure."""
        made = {name: _clock(call) for name, call in self.clocked.items()}
        if self.stamped is not None:
            with self.stamped() as call:
                call.run()
                (begin, end), *more = call.timings()
            made["device"] = ((more[-1][1] if more else end) - begin,)
            if self.output is not None:
                made["pass 1"] = (end - begin,)
                for second, third in more:
                    made |= {"gap": (second - end,), "pass 2": (third - second,)}
        return made


def recorded(
    stack: ExitStack, row: BenchRow, kv: ContiguousKV, make: Callable[[bool], TimedCall]
) -> tuple[Subject, TimedCall]:
    """A recording as a subject, and itself. make: the recording, with timestamps or without; ``stack`` closes it."""
    call = stack.enter_context(closing(make(False)))
    subject = Subject(row, {"call": call.run})
    if row.context and kv.device.info.timestamp_period_ns:
        subject.stamped = lambda: closing(make(True))
        # A CPU's driver compiles a pipeline in its first run, so a recording that can be timed again is kept.
        if kv.device.runtime.times_every_run:
            kept = stack.enter_context(closing(make(True)))
            subject.stamped = lambda: nullcontext(kept)
    return subject, call


def attention(stack: ExitStack, row: BenchRow, kv: ContiguousKV, data: Inputs, arithmetic: Arithmetic) -> Subject:
    """One of LAYOUTS, which ``row`` names, on the device of ``kv``."""
    shape, split = data.shape, SplitSpec.parse("auto" if row.layout == "auto" else "1")
    plan = split.plan(kv.tokens, shape, kv.device.info.layout_facts, kv.dtype)
    heads = 1 if row.layout == "per query head" else shape.heads_per_workgroup
    row = replace(row, plan=plan.fingerprint(), heads_per_workgroup=heads, arithmetic=arithmetic)

    def make(timestamps: bool) -> RecordedCall:
        made = RecordedCall(kv, plan, timestamps=timestamps, heads_per_workgroup=heads, arithmetic=arithmetic)
        made.write_q(data.rows)
        return made

    subject, call = recorded(stack, row, kv, make)

    def steady() -> None:
        call.write_q(data.rows)
        call.run()
        call.result()

    def output() -> Output:
        call.poison()
        call.run()
        return Output(*(x[0] for x in call.result()))

    subject.clocked["steady call"], subject.output = steady, output
    return subject


def _clock(call: Callable[[], object]) -> Times:
    caller, cpu, start = thread_time(), process_time(), perf_counter()
    call()
    return perf_counter() - start, process_time() - cpu, thread_time() - caller
