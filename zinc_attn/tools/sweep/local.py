"""The sweep of one process."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, closing
from typing import Any

from ...errors import LimitError
from ...runtime.device import Device
from ..harness.progress import Progress, Steps
from .calls import AttentionCall, ResidentInputs, make_resident
from .points import Expected, Oracle, Point, expected_output, is_everything, samples, time_points
from .rows import SweepRow
from .spec import SweepSpec

WrapCall = Callable[[AttentionCall], AttentionCall]


def sweep(
    device: Device,
    spec: SweepSpec,
    *,
    progress: Progress | None = None,
    on_row: Callable[[SweepRow], Any] | None = None,
    oracle: Oracle = expected_output,
    wrap_call: WrapCall | None = None,
) -> list[SweepRow]:
    """Verify and time a call of ``spec`` at every context under every layout.

    on_row sees each row when it is ready. A point for which the device has no room gives a row with status "refused".
    oracle: says what a sequence must give; wrap_call: is given every call and returns the one that is made in its
    place. Both are there for tests, which put faults in.
    """
    per_context = 2 * spec.batch + 2 * len(spec.splits)
    steps, rows = Steps(progress, len(spec.contexts) * per_context), list[SweepRow]()
    for i, context in enumerate(spec.contexts):
        steps.done = i * per_context
        points = []
        for split in spec.splits:
            plan = split.plan_on(device.info, context, spec.shape, spec.dtype, spec.q_len)
            points.append(Point(SweepRow.of(spec, device, context, split.label, plan), split, plan))
        _run_context(device, spec, points, oracle, wrap_call, steps)
        for point in points:
            rows.append(point.row)
            if on_row:
                on_row(point.row)
    steps.finish()
    return rows


def _run_context(
    device: Device,
    spec: SweepSpec,
    points: list[Point],
    oracle: Oracle,
    wrap_call: WrapCall | None,
    steps: Steps,
) -> None:
    """Verify and time the points of one context, or refuse them where there is no room for its sequences."""
    with ExitStack() as stack:
        try:
            resident = stack.enter_context(closing(make_resident(device, spec, points[0].row.context)))
            expected = _fill(resident, spec, points[0].row.context, oracle, steps)
        except (LimitError, MemoryError) as error:  # DeviceMemoryError is a MemoryError
            for point in points:
                point.row = point.row.refused(error)
            return
        _measure(resident, spec, points, expected, wrap_call, steps)


def _fill(resident: ResidentInputs, spec: SweepSpec, context: int, oracle: Oracle, steps: Steps) -> list[Expected]:
    """Make the sequences of one context; what the oracle says of them."""
    expected = []
    for sample in samples(spec, context):
        steps.begin(f"making data · {context:,} keys")
        data = spec.inputs(context, sample.sequence)
        resident.add(data)
        steps.begin(f"computing the oracle · {context:,} keys")
        if sample.kv_heads:
            expected.append(oracle(data, spec.dtype, sample))
        del data  # before the next sequence's is made
    return expected


def _measure(
    resident: ResidentInputs,
    spec: SweepSpec,
    points: list[Point],
    expected: list[Expected],
    wrap_call: WrapCall | None,
    steps: Steps,
) -> None:
    """Verify every point of one context, then time those that passed."""
    context = points[0].row.context
    everything = is_everything(spec, samples(spec, context))
    first_layout: Point | None = None  # the first without a wrong bit
    for point in points:
        steps.begin(f"compiling shaders, checking bits · {context:,} keys")
        try:
            call = resident.call(point.split, point.plan)
            point.call = wrap_call(call) if wrap_call else call
            point.run_after_spoiling()
        except (LimitError, MemoryError) as error:
            point.row = point.row.refused(error)
            continue
        point.verify(expected, None if everything else first_layout, "bits" if everything else "bits (sampled)")
        if point.row.status == "ok":
            first_layout = first_layout or point
    steps.begin(f"timing · {context:,} keys", len(points))
    time_points([point for point in points if point.row.status == "ok"], spec.repeats)
