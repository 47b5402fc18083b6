"""The benchmark: every subject of a shape and context is verified, then all are timed in turns."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from typing import Any, Final

import numpy as np

from ...decode.contiguous import ContiguousKV
from ...errors import ArgumentError, LimitError
from ...runtime.device import Device
from ...shapes import AttnShape
from ..harness.bits import Output, oracle
from ..harness.bound import Expected, fault, truth
from ..harness.inputs import Inputs
from ..harness.progress import Progress, Steps, each_point
from ..harness.timing import in_turns
from .baselines import baselines
from .rows import HOST_CLOCK, WARM_UP_ROUNDS, BenchRow, BenchSpec, with_host_per_call
from .subjects import ReadYardstick, Subject, attention, recorded

BUDGET_S: Final = 10.0  # rounds of a shape and context where ``repeats`` is not given


def bench(
    devices: Sequence[Device],
    spec: BenchSpec,
    *,
    progress: Progress | None = None,
    on_row: Callable[[BenchRow], Any] | None = None,
) -> list[BenchRow]:
    """Verify and time the calls of ``spec`` on every device.

    devices: one physical device, opened once per runtime. on_row sees each row when it is ready.
    """
    if not devices:
        raise ArgumentError("devices: got none, expected one or more")
    points = list(itertools.product(spec.shapes, (0, *spec.contexts)))
    steps = Steps(progress, len(points))

    def rows(point: tuple[AttnShape, int]) -> list[BenchRow]:
        shape, context = point
        steps.begin(f"{shape} · {f'{context:,} keys' if context else 'host work per call'}")
        data = Inputs.normal(shape, context, spec.dtype, spec.seed)
        with ExitStack() as stack:
            return _point(stack, devices, data, spec) if context else _host(stack, devices, data, spec)

    return each_point(points, steps, rows, on_row)


def _host(stack: ExitStack, devices: Sequence[Device], data: Inputs, spec: BenchSpec) -> list[BenchRow]:
    """Rows of the host's work per call: of calls without keys, which leave the device next to nothing to do."""
    subjects = []
    for device in devices:
        kv = stack.enter_context(closing(ContiguousKV(device, data.k, data.v, spec.dtype)))
        row = BenchRow.of(device, data, spec.dtype, "auto")
        subject = attention(stack, replace(row, verified="bits"), kv, data, spec.arithmetic)
        assert subject.output is not None
        out, lse = subject.output()
        if out.any() or not (lse == -np.inf).all():
            return [subject.row.without_time("failed", "without keys: expected out 0 and lse -inf")]
        subject.clocked["empty submit"] = device.runtime.empty_submit
        subjects.append(subject)
    samples = in_turns([subject.sample for subject in subjects], spec.host_rounds, BUDGET_S, WARM_UP_ROUNDS)
    rows = (subject.row.timed(mine) for subject, mine in zip(subjects, samples, strict=True))
    return [row for mine in rows for row in with_host_per_call(mine)]


class _Judge:
    """Says how outputs are not as they must be: as ``want`` of the last query heads at least, and all heads as those of
    the first output that passed."""

    def __init__(self, want: Expected) -> None:
        self._want = want
        self._first: Output | None = None

    def fault(self, output: Output) -> str | None:
        """The first wrong element in words, None where there is none."""
        wrong = fault(output, self._want) or (fault(output, self._first) if self._first else None)
        if not wrong:
            self._first = self._first or output
        return wrong


def _point(stack: ExitStack, devices: Sequence[Device], data: Inputs, spec: BenchSpec) -> list[BenchRow]:
    """All rows of one shape and context: the yardstick and every layout on each device, then the baselines."""
    shape = data.shape
    sampled = len(data.k) * shape.q_heads * shape.head_dim > spec.oracle_products
    bounded, heads = spec.bounded(shape), 1 if sampled else None
    want = (truth if bounded else oracle)(data.q, data.k, data.v, spec.dtype, heads)
    word = f"{'bound' if bounded else 'bits'}{' (last KV head)' if sampled else ''}"
    judge, passed, done = _Judge(want), list[Subject](), list[BenchRow]()

    def sort(subject: Subject, wrong: str | None) -> None:
        if wrong:
            done.append(subject.row.without_time("failed", wrong))
        else:
            passed.append(subject)

    for device in devices:
        row = BenchRow.of(device, data, spec.dtype, "read")
        try:
            kv = stack.enter_context(closing(ContiguousKV(device, data.k, data.v, spec.dtype)))
            read, call = recorded(stack, replace(row, verified="xor of all words"), kv, partial(ReadYardstick, kv))
            sort(read, call.wrong(data, spec.dtype))
            for layout in spec.layouts(shape):
                row = replace(row, layout=layout)
                subject = attention(stack, replace(row, verified=word), kv, data, spec.arithmetic)
                assert subject.output is not None
                sort(subject, judge.fault(subject.output()))
        except (LimitError, MemoryError) as error:  # DeviceMemoryError is a MemoryError
            done.append(row.without_time("refused", str(error)))
    others, untimed = baselines(data, spec.dtype, want.out.astype(np.float32))
    for subjects in (passed, others):
        samples = in_turns([subject.sample for subject in subjects], spec.repeats, BUDGET_S, WARM_UP_ROUNDS)
        for one, mine in zip(subjects, samples, strict=True):
            if one.output and (wrong := judge.fault(one.output())):
                done.append(one.row.without_time("failed", f"after timing: {wrong}"))
            else:
                done += one.row.timed(mine, len(data.k) * shape.kv_bytes_per_token(spec.dtype))
    return _beside_yardstick(done) + untimed


def _beside_yardstick(rows: Sequence[BenchRow]) -> list[BenchRow]:
    """The rows with their rates over those of the yardstick."""
    read = {(row.runtime, row.measure): row.kv_gb_s for row in rows if row.layout == "read" and row.kv_gb_s}
    made = []
    for row in rows:
        best = read.get((row.runtime, "call" if row.latency_mode == HOST_CLOCK else "device"))
        made.append(replace(row, of_read=row.kv_gb_s / best if row.kv_gb_s and best else None))
    return made
