"""One context on some devices: filled, verified against the oracle, and timed in turns; and the sweep of these."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import fields, replace
from typing import Any, Final, NamedTuple

import numpy as np

from ...canonical.constants import KEYS_PER_NODE
from ...distributed.ranks import RankError, Ranks
from ...errors import ArgumentError, LimitError
from ...runtime.device import Device
from ..harness.bits import Expected, Output, Truth, compare, oracle, truth
from ..harness.inputs import Inputs
from ..harness.progress import Progress, Steps, each_point
from ..harness.split_spec import SplitSpec
from ..harness.timing import FEWEST_REPEATS, MOST_REPEATS, in_turns
from .calls import ContiguousInputs, Subject, make_resident
from .rows import RANKS_MODE, Row
from .spec import CallSpec

WARM_UP_RUNS: Final = 3
BUDGET_S: Final = 3.0  # timed runs of a point where ``repeats`` is not given
NODES: Final = SplitSpec("nodes", split_size=KEYS_PER_NODE)


class Sample(NamedTuple):
    """What the oracle computes of one sequence: its last ``rows`` rows, and of these the last ``kv_heads`` KV heads."""

    sequence: int
    rows: int
    kv_heads: int


Oracle = Callable[[Inputs, str, Sample], Expected]
WrapCall = Callable[[Subject], Subject]


def samples(spec: CallSpec, context: int) -> list[Sample]:
    """What the oracle computes of each sequence within ``spec.oracle_products``.

    Where that is not everything, the last KV head of every sequence comes first; at least the last sequence has one.
    """
    shape, batch = spec.shape, spec.batch
    row = max(context, 1) * shape.group * max(shape.head_dim, shape.v_head_dim)  # products of a row and KV head
    pairs = min(max(spec.oracle_products // (row * spec.q_len), 1), batch * shape.kv_heads)
    each, more = divmod(pairs, batch)
    rows = min(max(spec.oracle_products // row, 1), spec.q_len)
    return [Sample(i, rows, each + (i >= batch - more)) for i in range(batch)]


def oracle_of(spec: CallSpec) -> Oracle:
    """What says how a call of ``spec`` must come out: the oracle, or float64 and the bound of matrix units."""
    judge: Callable[..., Expected] = truth if spec.bounded else oracle
    return lambda data, dtype, sample: judge(data.rows[-sample.rows :], data.k, data.v, dtype, sample.kv_heads)


def no_keys(data: Inputs, dtype: str, sample: Sample) -> Output:
    """What a call without keys gives."""
    rows, shape = data.rows, data.shape
    return Output(np.zeros((*rows.shape[:2], shape.v_head_dim), np.float32), np.full(rows.shape[:2], -np.inf, "f4"))


class Point:
    """One context of a spec, while its calls are verified and timed.

    judge: what says how calls must come out, None for ``oracle_of``; wrap_call: see ``sweep``. ranks: those that make
    the same calls; what fails on one of them fails on all.
    """

    def __init__(
        self,
        tool: str,
        spec: CallSpec,
        context: int,
        steps: Steps,
        *,
        judge: Oracle | None = None,
        wrap_call: WrapCall = lambda call: call,
        ranks: Ranks | None = None,
    ) -> None:
        self.tool, self.spec, self.context, self.ranks = tool, spec, context, ranks
        self.judge, self.wrap_call = judge or oracle_of(spec), wrap_call
        self.expected: dict[int, Expected] = {}  # by sequence, once its values are made
        self.only: Inputs | None = None  # of a benchmark: the values of its sequence
        self._first: tuple[str, Output] | None = None  # layout and output of the first that is as it must be
        self._steps = steps

    def _begin(self, what: str, steps: int = 1) -> None:
        self._steps.begin(f"{what} · {self.context:,} keys", steps)

    def verified(self, stack: ExitStack, device: Device) -> list[Subject]:
        """Every layout on a device, its first call compared with the oracle's output and with the first layout's.

        In a benchmark with keys the yardstick comes before them. ``stack`` closes all.
        """
        spec, facts = self.spec, device.info.layout_facts
        plans = [split.plan(self.context, spec.shape, facts, spec.dtype, spec.q_len) for split in spec.splits]
        layouts = list(zip(spec.splits, plans, strict=True))
        ranked: dict[str, Any] = {"ranks": self.ranks.size, "latency_mode": RANKS_MODE} if self.ranks else {}
        rows = [Row.of_call(self.tool, spec, device, *layout, **ranked) for layout in layouts]
        try:
            with together(self.ranks):
                resident = stack.enter_context(closing(make_resident(device, spec, self.context, self.ranks)))
                for data in self._sequences():
                    resident.add(data)
            subjects = list[Subject]()
            if isinstance(resident, ContiguousInputs) and self.only and self.context:
                subjects.append(resident.yardstick(self.only))
        except (LimitError, MemoryError) as error:  # DeviceMemoryError is a MemoryError
            return [Subject(row.refused(error)) for row in rows]
        for row, layout in zip(rows, layouts, strict=True):
            self._begin("compiling shaders, checking bits")
            try:
                subjects.append(self.verify(self.wrap_call(resident.call(row, *layout))))
            except (LimitError, MemoryError) as error:
                if self.ranks:  # the others wait for this one's verdict
                    raise
                subjects.append(Subject(row.refused(error)))
        return subjects

    def _sequences(self) -> Iterator[Inputs]:
        """The values of each sequence, one at a time."""
        if self.only is not None:
            yield self.only
            return
        for sample in samples(self.spec, self.context):
            self._begin("making data")
            data = self.spec.inputs(self.context, sample.sequence)
            self._begin("computing the oracle")
            if sample.kv_heads:
                self.expected[sample.sequence] = self.judge(data, self.spec.dtype, sample)
            if self.tool == "bench":
                self.only = data
            yield data
            del data  # before the next sequence's is made

    def verify(self, subject: Subject) -> Subject:
        """The subject, whose call is made for the first time, with the verdict on its output in its row."""
        assert subject.result is not None
        subject.spoil()
        before = self.ranks.received_bytes if self.ranks else 0
        subject.run()
        if self.ranks:
            subject.row = replace(subject.row, received_bytes=self.ranks.received_bytes - before)
        subject.output = out, lse = subject.result()
        found = {at: compare(Output(out[at], lse[at]), want) for at, want in self.expected.items()}
        wrong = next((one.text(of=(at,)) for at, one in found.items() if one), None)
        layout, first = self._first or ("", subject.output)
        if not wrong and (other := compare(subject.output, first)):
            wrong = f"unlike layout {layout}: {other.text()}"
        everything = sum(want.out.size for want in self.expected.values()) == out.size
        word = "bound" if any(isinstance(want, Truth) for want in self.expected.values()) else "bits"
        verified = word if everything else f"{word} (sampled)"
        subject.row = subject.row.failed(wrong) if wrong else replace(subject.row, verified=verified)
        self._share_verdict(subject)
        if subject.row.status == "ok":
            self._first = self._first or (subject.row.layout, subject.output)
        return subject

    def timed(
        self, subjects: Sequence[Subject], budget_s: float, warm_up: int, repeats: int | None = None
    ) -> list[Row]:
        """Time what is verified in turns; the rows of all. repeats: rounds, None for those of the spec."""
        good, repeats = [one for one in subjects if one.row.status == "ok"], repeats or self.spec.repeats
        self._begin("timing", len(subjects))
        if self.ranks and good and repeats is None:  # rank 0 says how many
            likely = int(np.clip(budget_s / good[0].seconds, FEWEST_REPEATS, MOST_REPEATS))
            repeats = int(self.ranks.exchange(str(likely).encode())[0])
        for one in good:
            one.timed_runs = -warm_up
        times = in_turns([one.timed_run for one in good], repeats, budget_s, warm_up)
        rows = {id(one): [one.row] for one in subjects}
        for one, mine in zip(good, times, strict=True):
            one.run_spoiled()
            self._share_verdict(one)
            rows[id(one)] = one.row.timed(mine) if one.row.status == "ok" else [one.row]
        return [row for one in subjects for row in rows[id(one)]]

    def _share_verdict(self, subject: Subject) -> None:
        """Fail the subject on all ranks where it failed on one, or where the output of a rank is not that of rank 0."""
        if self.ranks is None:
            return
        assert subject.result is not None
        digest = subject.result().digest()
        first = self.ranks.exchange(digest.encode())[0].decode()
        other = "" if digest == first else "out or lse are not those of rank 0"
        if trouble := _first_trouble(self.ranks, subject.row.error or other):
            subject.row = subject.row.failed(trouble)


def _first_trouble(ranks: Ranks, mine: str) -> str:
    """What the first rank in trouble says, the same on all ranks; empty where none is in trouble."""
    said = [text.decode() for text in ranks.exchange(mine.encode())]
    return next((f"rank {rank}: {text}" for rank, text in enumerate(said) if text), "")


@contextmanager
def together(ranks: Ranks | None) -> Iterator[None]:
    """Where there is no room for the block on one rank, LimitError on all; for one process as it is raised."""
    if ranks is None:
        yield
        return
    trouble = ""
    try:
        yield
    except (LimitError, MemoryError, RankError) as error:
        if ranks.lost:
            raise
        trouble = str(error) or "no room in host memory"
    if trouble := _first_trouble(ranks, trouble):
        raise LimitError(trouble)


def sweep(
    device: Device,
    spec: CallSpec,
    *,
    ranks: Ranks | None = None,
    progress: Progress | None = None,
    on_row: Callable[[Row], Any] | None = None,
    oracle: Oracle | None = None,
    wrap_call: WrapCall = lambda call: call,
) -> list[Row]:
    """Verify and time a call of ``spec`` at every context under every layout.

    on_row sees each row when it is ready. A point for which the device has no room gives a row with status "refused".
    ranks: those among which the nodes of one sequence lie, each with its ``device``; all make the same call. The layout
    is then a split per node, and spec.splits does not count. Every rank compares its bits with the oracle's and with
    those of rank 0. A row says the same on all ranks but for its device, bytes and times; without spec.repeats rank 0
    says how many calls are timed.
    oracle: says what a sequence must give, None for the NumPy oracle, or float64 with matrix units; wrap_call: is given
    every call and returns the one that is made in its place. Both are there for tests, which put faults in.
    ArgumentError: a batch over ranks, or no cache there. RankError: see Ranks.
    """
    if ranks:
        ranks.agree(_set_up(spec), 1.0)
        if spec.batch > 1 or spec.page_size is None:
            got = f"batch: got {spec.batch}" if spec.batch > 1 else "page_size: got None"
            raise ArgumentError(f"{got} for a distributed sweep, expected one sequence in a cache of pages")
        spec = replace(spec, splits=(NODES,))
    steps = Steps(progress, len(spec.contexts) * 2 * (spec.batch + len(spec.splits)))

    def rows(context: int) -> list[Row]:
        point = Point("sweep", spec, context, steps, judge=oracle, wrap_call=wrap_call, ranks=ranks)
        with ExitStack() as stack:
            return point.timed(point.verified(stack, device), BUDGET_S * len(spec.splits), WARM_UP_RUNS)

    return each_point(spec.contexts, steps, rows, on_row)


def _set_up(spec: CallSpec) -> str:
    """What every rank must have been given alike."""
    names = (one.name for one in fields(spec) if one.name not in ("splits", "kv", "model"))
    words = {name: str(getattr(spec, name)) for name in names}
    if spec.kv:
        words["values"] = hashlib.sha256(b"".join(x.tobytes() for x in (spec.kv.q, spec.kv.k, spec.kv.v))).hexdigest()
    return ", ".join(f"{name} {value}" for name, value in words.items())
