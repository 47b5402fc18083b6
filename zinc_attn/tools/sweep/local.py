"""The sweep of one process."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, closing
from typing import Any

from ...errors import LimitError
from ...runtime.device import Device
from ..harness.bound import Expected
from ..harness.progress import Progress, Steps, each_point
from .calls import AttentionCall, CachedInputs, ContiguousInputs, make_resident
from .points import Oracle, Point, oracle_of, samples, time_points
from .rows import SweepRow, SweepSpec

Resident = CachedInputs | ContiguousInputs
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
    judge = oracle or oracle_of(spec)

    def rows(context: int) -> list[SweepRow]:
        points, facts = [], device.info.layout_facts
        for split in spec.splits:
            plan = split.plan(context, spec.shape, facts, spec.dtype, spec.q_len)
            points.append(Point(SweepRow.of(spec, device, context, split.label, plan), split, plan))
        with ExitStack() as stack:
            try:
                resident = stack.enter_context(closing(make_resident(device, spec, context)))
                expected = _fill(resident, spec, context, judge, steps)
            except (LimitError, MemoryError) as error:  # DeviceMemoryError is a MemoryError
                return [point.row.refused(error) for point in points]
            good = _verify(resident, points, expected, wrap_call, steps)
            steps.begin(f"timing · {context:,} keys", len(points))
            time_points(good, spec.repeats)
        return [point.row for point in points]

    return each_point(spec.contexts, steps, rows, on_row)


def _fill(resident: Resident, spec: SweepSpec, context: int, judge: Oracle, steps: Steps) -> dict[int, Expected]:
    """Make the sequences; what the oracle says of them, by sequence."""
    expected: dict[int, Expected] = {}
    for sample in samples(spec, context):
        steps.begin(f"making data · {context:,} keys")
        data = spec.inputs(context, sample.sequence)
        resident.add(data)
        steps.begin(f"computing the oracle · {context:,} keys")
        if sample.kv_heads:
            expected[sample.sequence] = judge(data, spec.dtype, sample)
        del data  # before the next sequence's is made
    return expected


def _verify(
    resident: Resident, points: list[Point], expected: dict[int, Expected], wrap_call: WrapCall, steps: Steps
) -> list[Point]:
    """Make the call of every point; the points whose output is as it must be."""
    good: list[Point] = []
    for point in points:
        steps.begin(f"compiling shaders, checking bits · {point.row.context:,} keys")
        try:
            point.call = wrap_call(resident.call(point.split, point.plan))
            point.call.spoil()
            point.call.run()
            point.output = point.call.result()
        except (LimitError, MemoryError) as error:
            point.row = point.row.refused(error)
            continue
        point.verify(expected, good[0] if good else None)
        if point.row.status == "ok":
            good.append(point)
    return good
