"""What is timed as one: the calls of a layout, and the yardstick that reads K and V and does nothing else."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from time import perf_counter, process_time, thread_time
from typing import Final, Generic, TypeVar

import numpy as np

from ...decode.contiguous import ContiguousKV, RecordedCall, packed
from ...kernels import declarations as kernels
from ...limits import WAVE
from ...planning.arithmetic import Arithmetic
from ...runtime.device import Device
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


class Subject:
    """A row, and the calls that are timed for its measures by the host's clock."""

    def __init__(self, row: BenchRow, clocked: dict[str, Callable[[], object]]) -> None:
        self.row, self.clocked = row, clocked

    def sample(self) -> dict[str, Times]:
        """One time of every measure."""
        return {name: _clock(call) for name, call in self.clocked.items()}


class DeviceSubject(Subject, Generic[TimedCall]):
    """A recorded call, timed by the host's clock, and by the device's where it has one.

    make: the recording, with timestamps or without.
    """

    def __init__(self, row: BenchRow, device: Device, make: Callable[[bool], TimedCall]) -> None:
        self._make: Callable[[bool], TimedCall] = make
        self.call: TimedCall = make(False)
        super().__init__(row, {"call": self.call.run})
        self._timed: TimedCall | None = None
        stamped = bool(row.context and device.info.timestamp_period_ns)
        # A CPU's driver compiles a pipeline in its first run, so a recording that can be timed again is kept.
        self._once = stamped and not device.runtime.times_every_run
        if stamped and not self._once:
            try:
                self._timed = make(True)
            except BaseException:
                self.call.close()
                raise

    def sample(self) -> dict[str, Times]:
        """One time of every measure."""
        made = super().sample()
        if self._once:
            with closing(self._make(True)) as call:
                made |= self._stamped(call)
        elif self._timed:
            made |= self._stamped(self._timed)
        return made

    def _stamped(self, call: TimedCall) -> dict[str, Times]:
        """The times of one run by the device's clock."""
        call.run()
        marks = call.timings()
        found: dict[str, Times] = {"device": (marks[-1][1] - marks[0][0],)}
        if self.row.layout != "read":
            found["pass 1"] = (marks[0][1] - marks[0][0],)
            if len(marks) == 2:
                found["gap"], found["pass 2"] = (marks[1][0] - marks[0][1],), (marks[1][1] - marks[1][0],)
        return found

    def close(self) -> None:
        """Free the recordings."""
        self.call.close()
        if self._timed:
            self._timed.close()


class AttentionSubject(DeviceSubject[RecordedCall]):
    """One of LAYOUTS on a device: ``row`` names it."""

    def __init__(self, row: BenchRow, kv: ContiguousKV, data: Inputs, arithmetic: Arithmetic = "canonical") -> None:
        shape, info = data.shape, kv.device.info
        split = SplitSpec.parse("auto" if row.layout == "auto" else "1")
        plan = split.plan(kv.tokens, shape, info.layout_facts, kv.dtype)
        heads = 1 if row.layout == "per query head" else shape.heads_per_workgroup
        row = replace(row, plan=plan.fingerprint(), heads_per_workgroup=heads, arithmetic=arithmetic)
        self._rows = data.rows

        def make(timestamps: bool) -> RecordedCall:
            step = RecordedCall(kv, plan, timestamps=timestamps, heads_per_workgroup=heads, arithmetic=arithmetic)
            step.write_q(self._rows)
            return step

        super().__init__(row, kv.device, make)
        self.clocked["steady call"] = self._steady

    def _steady(self) -> None:
        self.call.write_q(self._rows)
        self.call.run()
        self.call.result()

    def output(self) -> Output:
        """out (q_heads, head_dim) and lse (q_heads,) of a run into an output that was all NaN."""
        self.call.poison()
        self.call.run()
        out, lse = self.call.result()
        return Output(out[0], lse[0])


def _clock(call: Callable[[], object]) -> Times:
    caller, cpu, start = thread_time(), process_time(), perf_counter()
    call()
    return perf_counter() - start, process_time() - cpu, thread_time() - caller
