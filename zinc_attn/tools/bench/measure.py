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
from .rows import HOST_CLOCK, WARM_UP_ROUNDS, BenchRow, BenchSpec, Times, with_host_per_call
from .subjects import AttentionSubject, DeviceSubject, ReadYardstick, Subject

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
        subject = stack.enter_context(closing(AttentionSubject(row, kv, data, spec.arithmetic)))
        out, lse = subject.output()
        if out.any() or not (lse == -np.inf).all():
            return [subject.row.without_time("failed", "without keys: expected out 0 and lse -inf")]
        subject.row = replace(subject.row, verified="bits")
        subject.clocked = {"empty submit": device.runtime.empty_submit, **subject.clocked}
        subjects.append(subject)
    samples = in_turns([subject.sample for subject in subjects], spec.host_rounds, BUDGET_S, WARM_UP_ROUNDS)
    return [
        row
        for subject, mine in zip(subjects, samples, strict=True)
        for row in with_host_per_call(subject.row.timed(mine))
    ]


def _point(stack: ExitStack, devices: Sequence[Device], data: Inputs, spec: BenchSpec) -> list[BenchRow]:
    """All rows of one shape and context."""
    shape = data.shape
    sampled = len(data.k) * shape.q_heads * shape.head_dim > spec.oracle_products
    bounded, heads = spec.bounded(shape), 1 if sampled else None
    want = (truth if bounded else oracle)(data.q, data.k, data.v, spec.dtype, heads)
    word = "bound" if bounded else "bits"
    verifier = _Verifier(want, f"{word} (last KV head)" if sampled else word, spec)
    for device in devices:
        verifier.verify(stack, device, data)
    others, untimed = baselines(data, spec.dtype, want.out.astype(np.float32))
    done, timed = verifier.untimed, list[tuple[Subject, list[dict[str, Times]]]]()
    for subjects in (verifier.passed, others):
        samples = in_turns([subject.sample for subject in subjects], spec.repeats, BUDGET_S, WARM_UP_ROUNDS)
        timed += zip(subjects, samples, strict=True)
    for one, mine in timed:
        if isinstance(one, AttentionSubject) and (wrong := verifier.fault(one.output())):
            done.append(one.row.without_time("failed", f"after timing: {wrong}"))
        else:
            done += one.row.timed(mine, len(data.k) * shape.kv_bytes_per_token(spec.dtype))
    return _beside_yardstick(done) + untimed


class _Verifier:
    """Sorts the subjects of one shape and context into those whose output is as it must be and rows of the others.

    want: what that is, of the last query heads at least; word: what a row says of a comparison with it.
    """

    def __init__(self, want: Expected, word: str, spec: BenchSpec) -> None:
        self.passed: list[Subject] = []
        self.untimed: list[BenchRow] = []
        self._want, self._word, self._spec = want, word, spec
        self._first: Output | None = None  # of the first layout that passed, all heads

    def verify(self, stack: ExitStack, device: Device, data: Inputs) -> None:
        """The yardstick and every layout on a device."""
        dtype = self._spec.dtype
        row = BenchRow.of(device, data, dtype, "read")
        try:
            kv = stack.enter_context(closing(ContiguousKV(device, data.k, data.v, dtype)))
            yardstick = DeviceSubject(replace(row, verified="xor of all words"), device, partial(ReadYardstick, kv))
            stack.enter_context(closing(yardstick))
            self._sort(yardstick, yardstick.call.wrong(data, dtype))
            for layout in self._spec.layouts(data.shape):
                row = replace(row, layout=layout)
                subject = AttentionSubject(replace(row, verified=self._word), kv, data, self._spec.arithmetic)
                stack.enter_context(closing(subject))
                self._sort(subject, self.fault(subject.output()))
        except (LimitError, MemoryError) as error:  # DeviceMemoryError is a MemoryError
            self.untimed.append(row.without_time("refused", str(error)))

    def _sort(self, subject: Subject, wrong: str | None) -> None:
        if wrong:
            self.untimed.append(subject.row.without_time("failed", wrong))
        else:
            self.passed.append(subject)

    def fault(self, output: Output) -> str | None:
        """How an output is not as it must be, or differs from that of the first layout that passed."""
        wrong = fault(output, self._want) or (fault(output, self._first) if self._first else None)
        if not wrong:
            self._first = self._first or output
        return wrong


def _beside_yardstick(rows: Sequence[BenchRow]) -> list[BenchRow]:
    """The rows with their rates over those of the yardstick."""
    read = {(row.runtime, row.measure): row.kv_gb_s for row in rows if row.layout == "read" and row.kv_gb_s}
    made = []
    for row in rows:
        best = read.get((row.runtime, "call" if row.latency_mode == HOST_CLOCK else "device"))
        made.append(replace(row, of_read=row.kv_gb_s / best if row.kv_gb_s and best else None))
    return made
