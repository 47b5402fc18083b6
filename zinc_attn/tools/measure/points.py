"""The loop over contexts: at each all calls are made, verified against the oracle, and timed in turns."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from math import inf
from time import perf_counter
from typing import Final, TypeVar

from ...errors import LimitError
from ...runtime.device import Device
from ..harness.bits import Judge, oracle
from ..harness.progress import Progress, Steps
from .calls import CachedCalls, Subject
from .expected import Expectation
from .others import other_subjects
from .rows import Row
from .spec import CallSpec

WARM_UP_RUNS: Final = 3
GPU_WARM_UP_S: Final = 1.0  # at least: the GPU's clock fell while the host made data, and takes as long to rise
FEWEST_REPEATS: Final = 5  # timed runs of a call where ``repeats`` is not given
MOST_REPEATS: Final = 50
BUDGET_S: Final = 3.0  # of a call's timed runs
NO_ROOM: Final = (LimitError, MemoryError)  # DeviceMemoryError is a MemoryError
T = TypeVar("T")


def measure_calls(
    devices: Sequence[Device],
    specs: Sequence[CallSpec],
    *,
    progress: Progress | None = None,
    judge: Judge = oracle,
    wrap_call: Callable[[Subject], Subject] = lambda call: call,
) -> Iterator[Row]:
    """Verify the calls of every spec on every device under every layout, and time those of a context in turns.

    devices: dispatchers on one physical device; specs: of one shape and the same contexts. Each row comes when it is
    ready. A call for which the device has no room gives a row with status "refused".
    judge: computes the bits that a call must have.
    wrap_call: is given every call and returns its replacement; tests put faults in there.
    """
    each = len(devices) * len(specs) * (specs[0].batch + 2 * len(specs[0].splits))
    steps = Steps(progress, each * len(specs[0].contexts))
    for i, context in enumerate(specs[0].contexts):
        steps.done = i * each
        with ExitStack() as stack:
            point = Point(stack, context, steps, wrap_call)
            for spec in specs:
                expected = Expectation(spec, context, judge)
                for device in devices:
                    point.add(device, spec, expected)
                if spec.against:
                    point.add_others(devices[0], spec, expected)
            yield from point.timed(specs[0].repeats)
    steps.finish()


class Point:
    """The calls of one context, and the rows of calls without room. ``stack`` closes their caches."""

    def __init__(self, stack: ExitStack, context: int, steps: Steps, wrap: Callable[[Subject], Subject]) -> None:
        self.stack, self.context, self.steps, self.wrap_call = stack, context, steps, wrap
        self.entries: list[Subject | Row] = []

    def add(self, device: Device, spec: CallSpec, expected: Expectation) -> None:
        units, blank = device.info.split_units, Row(spec, device.info, device.runtime.name, self.context, "")
        plans = [split.plan(self.context, spec.shape, units, spec.q_len) for split in spec.splits]
        rows = [replace(blank, layout=split.label, plan=plan) for split, plan in zip(spec.splits, plans, strict=True)]
        try:
            resident = self._resident(device, spec, expected)
        except NO_ROOM as error:
            self._refuse(error, rows)
            return
        for row, split in zip(rows, spec.splits, strict=True):
            self._begin("compiling shaders, checking bits")
            try:
                subject = self.wrap_call(resident.subject(row, split))
                subject.verify(expected)
                self.entries.append(subject)
            except NO_ROOM as error:
                self._refuse(error, [row])

    def add_others(self, device: Device, spec: CallSpec, expected: Expectation) -> None:
        self._begin("calling others", 0)
        for subject in other_subjects(Row(spec, device.info, "", self.context, ""), spec.inputs(self.context)):
            subject.verify(expected)
            self.entries.append(subject)

    def timed(self, repeats: int | None) -> Iterator[Row]:
        """Time the verified calls in turns; the rows of all calls."""
        good = [subject for subject in self.entries if isinstance(subject, Subject) and subject.row.status == "ok"]
        self._begin("timing", len(good))
        warm_up_s = GPU_WARM_UP_S if any(subject.row.info.kind != "cpu" for subject in good) else 0
        runs = [subject.timed_run for subject in good]
        times = in_turns(runs, repeats, BUDGET_S * len(good), WARM_UP_RUNS, warm_up_s)
        for subject, own_times in zip(good, times, strict=True):
            subject.times = own_times
            subject.run_spoiled()
        for entry in self.entries:
            yield from entry.rows() if isinstance(entry, Subject) else [entry]

    def _begin(self, what: str, steps: int = 1) -> None:
        self.steps.begin(f"{what} · {self.context:,} keys", steps)

    def _resident(self, device: Device, spec: CallSpec, expected: Expectation) -> CachedCalls:
        resident = self.stack.enter_context(closing(CachedCalls(device, spec, self.context)))
        for sequence in range(spec.batch):
            self._begin("making data, computing the oracle")
            data = spec.inputs(self.context, sequence)
            expected.add(sequence, data)
            resident.add(data)
        return resident

    def _refuse(self, error: BaseException, rows: Sequence[Row]) -> None:
        """Keep the rows of calls without room."""
        self.entries += [replace(row, status="refused", error=str(error) or "no room in host memory") for row in rows]


def in_turns(
    calls: Sequence[Callable[[], T]], repeats: int | None, budget_s: float, warm_up: int, warm_up_s: float = 0
) -> list[list[T]]:
    """The results of each of ``calls``, in turns, after ``warm_up`` rounds or more that take ``warm_up_s`` seconds.

    ``repeats`` rounds; None: FEWEST_REPEATS to MOST_REPEATS, as many as begin within ``budget_s`` seconds.
    """

    def rounds(fewest: int, most: float, seconds: float) -> Iterator[list[T]]:
        begin, count = perf_counter(), 0
        while calls and (count < fewest or (count < most and perf_counter() - begin < seconds)):
            yield [call() for call in calls]
            count += 1

    for _ in rounds(warm_up, inf, warm_up_s):
        pass
    fewest, most = (FEWEST_REPEATS, MOST_REPEATS) if repeats is None else (repeats, repeats)
    return [list(results) for results in zip(*rounds(fewest, most, budget_s), strict=True)]
