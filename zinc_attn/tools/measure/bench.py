"""The benchmark: calls beside a read yardstick, a single split, a workgroup per query head, NumPy and PyTorch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Final

from ...errors import ArgumentError
from ...runtime.device import Device
from ..harness.progress import Progress, Steps, each_point
from ..harness.split_spec import SplitSpec
from .baselines import baselines
from .calls import PER_HEAD
from .points import Point, no_keys
from .rows import BENCH_WARM_UP, HOST_CLOCK, MEASURES, Row
from .spec import CallSpec

BUDGET_S: Final = 10.0  # rounds of a shape and context where ``repeats`` is not given
HOST_ROUNDS: Final = 1000  # of a call without keys
AUTO: Final = SplitSpec("auto")
SPLITS: Final = (AUTO, SplitSpec("1 split", num_splits=1), SplitSpec(PER_HEAD, num_splits=1))


def bench(
    devices: Sequence[Device],
    specs: Sequence[CallSpec],
    *,
    host_rounds: int = HOST_ROUNDS,
    progress: Progress | None = None,
    on_row: Callable[[Row], Any] | None = None,
) -> list[Row]:
    """Verify and time the calls of ``specs`` on every device, and those without keys, which show the host's work.

    devices: one physical device, opened once per runtime. specs: of contiguous K and V, a shape each, whose splits do
    not count. host_rounds: rounds of the call without keys. on_row sees each row when it is ready.

    Everything of one shape and context takes turns, runtimes and layouts alike, so that ratios come from the same
    seconds. The baselines follow, since their thread pools spin on after each call.
    """
    for name, given in (("devices", devices), ("specs", specs)):
        if not given:
            raise ArgumentError(f"{name}: got none, expected one or more")
    points = [(spec, context) for spec in specs for context in (0, *spec.contexts)]
    steps = Steps(progress, len(points) * 2 * (1 + len(SPLITS) * len(devices)))

    def rows(point: tuple[CallSpec, int]) -> list[Row]:
        spec, context = point
        with ExitStack() as stack:
            if context:
                return _point(stack, devices, replace(spec, splits=layouts(spec)), context, steps)
            return _host(stack, devices, replace(spec, splits=(AUTO,)), steps, host_rounds)

    return each_point(points, steps, rows, on_row)


def layouts(spec: CallSpec) -> tuple[SplitSpec, ...]:
    """Those of SPLITS that differ: the workgroups of matrix units have no choice of heads."""
    return SPLITS[:2] if spec.bounded else SPLITS


def _host(stack: ExitStack, devices: Sequence[Device], spec: CallSpec, steps: Steps, rounds: int) -> list[Row]:
    """Rows of the host's work per call: of calls without keys, which leave the device next to nothing to do."""
    point = Point("bench", spec, 0, steps, judge=no_keys)
    subjects = [one for device in devices for one in point.verified(stack, device)]
    for subject, device in zip(subjects, devices, strict=True):
        subject.clocked["empty submit"] = device.runtime.empty_submit
        subject.output = None  # so that nothing but the calls is between two of them
    made = itertools.groupby(point.timed(subjects, BUDGET_S, BENCH_WARM_UP, rounds), lambda row: row.runtime)
    return [row for _, mine in made for row in _with_host_per_call(list(mine))]


def _with_host_per_call(rows: list[Row]) -> list[Row]:
    """The rows of a call without keys, and the host's work in a steady call, which is a difference of two medians.

    It has neither quartiles nor a minimum: those of differences tell of other programs, and may be below 0.
    """
    times = {row.measure: row for row in rows if row.status == "ok"}
    if not times:
        return rows
    steady, empty, name = times["steady call"], times["empty submit"], "host per call"
    work: dict[str, Any] = dict.fromkeys(("q1_us", "q3_us", "min_us", "max_us"))
    work |= {name: getattr(steady, name) - getattr(empty, name) for name in ("median_us", "cpu_us", "caller_us")}
    return [*rows, replace(steady, measure=name, latency_mode=MEASURES[name], **work)]


def _point(stack: ExitStack, devices: Sequence[Device], spec: CallSpec, context: int, steps: Steps) -> list[Row]:
    """All rows of one shape and context: the yardstick and every layout on each device, then the baselines."""
    point = Point("bench", spec, context, steps)
    subjects = [one for device in devices for one in point.verified(stack, device)]
    rows = point.timed(subjects, BUDGET_S, BENCH_WARM_UP)
    if point.only is not None:
        want = point.expected[0].out[-1]
        rows += point.timed(baselines(point.only, spec.dtype, want), BUDGET_S, BENCH_WARM_UP)
    read = {(row.runtime, row.measure): row.kv_gb_s for row in rows if row.layout == "read" and row.kv_gb_s}

    def beside_yardstick(row: Row) -> Row:
        best = read.get((row.runtime, "call" if row.latency_mode == HOST_CLOCK else "device"))
        return replace(row, of_read=row.kv_gb_s / best if row.kv_gb_s and best else None)

    return [beside_yardstick(row) for row in rows]
