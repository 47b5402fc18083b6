"""The sweep of one process."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Any

from ...errors import LimitError
from ...runtime.device import Device
from ..harness.bound import Expected
from ..harness.progress import Progress, Steps, each_point
from .calls import AttentionCall, CachedInputs, ContiguousInputs, make_resident
from .points import Oracle, Point, oracle_of, samples, time_points
from .rows import SweepRow, SweepSpec

ResidentInputs = CachedInputs | ContiguousInputs
WrapCall = Callable[[AttentionCall], AttentionCall]


def sweep(
    device: Device,
    spec: SweepSpec,
    *,
    progress: Progress | None = None,
    on_row: Callable[[SweepRow], Any] | None = None,
    oracle: Oracle | None = None,
    wrap_call: WrapCall = lambda call: call,
) -> list[SweepRow]:
    """Verify and time a call of ``spec`` at every context under every layout.

    on_row sees each row when it is ready. A point for which the device has no room gives a row with status "refused".
    oracle: says what a sequence must give, None for the NumPy oracle, or float64 with matrix units; wrap_call: is given
    every call and returns the one that is made in its place. Both are there for tests, which put faults in.
    """
    steps = Steps(progress, len(spec.contexts) * 2 * (spec.batch + len(spec.splits)))
    rows_of = _Sweep(device, spec, oracle or oracle_of(spec), wrap_call, steps).rows
    return each_point(spec.contexts, steps, rows_of, on_row)


@dataclass(frozen=True)
class _Sweep:
    device: Device
    spec: SweepSpec
    oracle: Oracle
    wrap_call: WrapCall
    steps: Steps

    def rows(self, context: int) -> list[SweepRow]:
        """The rows of one context."""
        points, info, spec = [], self.device.info, self.spec
        for split in spec.splits:
            plan = split.plan(context, spec.shape, info.layout_facts, spec.dtype, spec.q_len)
            points.append(Point(SweepRow.of(spec, self.device, context, split.label, plan), split, plan))
        with ExitStack() as stack:
            try:
                resident = stack.enter_context(closing(make_resident(self.device, spec, context)))
                expected = self._fill(resident, context)
            except (LimitError, MemoryError) as error:  # DeviceMemoryError is a MemoryError
                return [point.row.refused(error) for point in points]
            self._measure(resident, points, expected)
        return [point.row for point in points]

    def _fill(self, resident: ResidentInputs, context: int) -> dict[int, Expected]:
        """Make the sequences; what the oracle says of them, by sequence."""
        expected: dict[int, Expected] = {}
        for sample in samples(self.spec, context):
            self.steps.begin(f"making data · {context:,} keys")
            data = self.spec.inputs(context, sample.sequence)
            resident.add(data)
            self.steps.begin(f"computing the oracle · {context:,} keys")
            if sample.kv_heads:
                expected[sample.sequence] = self.oracle(data, self.spec.dtype, sample)
            del data  # before the next sequence's is made
        return expected

    def _measure(self, resident: ResidentInputs, points: list[Point], expected: dict[int, Expected]) -> None:
        """Verify every point, then time those that pass."""
        good: list[Point] = []
        for point in points:
            self.steps.begin(f"compiling shaders, checking bits · {point.row.context:,} keys")
            try:
                point.call = self.wrap_call(resident.call(point.split, point.plan))
                point.call.spoil()
                point.call.run()
                point.output = point.call.result()
            except (LimitError, MemoryError) as error:
                point.row = point.row.refused(error)
                continue
            point.verify(expected, good[0] if good else None)
            if point.row.status == "ok":
                good.append(point)
        self.steps.begin(f"timing · {points[0].row.context:,} keys", len(points))
        time_points(good, self.spec.repeats)
