"""Verifying and timing the points of one context."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from ...planning.splits import SplitPlan
from ..harness.bits import Output, compare
from ..harness.inputs import Inputs
from ..harness.oracle import oracle
from ..harness.split_spec import SplitSpec
from ..harness.timing import rounds
from .calls import AttentionCall
from .rows import SweepRow
from .spec import SweepSpec

WARM_UP_RUNS: Final = 3
BUDGET_S: Final = 3.0  # timed runs of a point where ``repeats`` is not given


class Sample(NamedTuple):
    """What the oracle computes of one sequence: its last ``rows`` rows, and of these the last ``kv_heads`` KV heads."""

    sequence: int
    rows: int
    kv_heads: int


class Expected(NamedTuple):
    """The oracle's output from ``first`` (sequence, row, query head) on."""

    first: tuple[int, int, int]
    output: Output


Oracle = Callable[[Inputs, str, Sample], Expected]


def samples(spec: SweepSpec, context: int) -> list[Sample]:
    """What the oracle computes of each sequence within ``spec.oracle_products``.

    Where that is not everything, the last KV head of every sequence comes first; at least the last sequences have one.
    """
    shape, batch, q_len = spec.shape, spec.batch, spec.q_len
    row = context * shape.group * shape.head_dim  # products of a row and KV head
    pairs = min(max(spec.oracle_products // (row * q_len), 1), batch * shape.kv_heads)
    each, more = divmod(pairs, batch)
    rows = min(max(spec.oracle_products // row, 1), q_len)
    return [Sample(i, rows, each + (i >= batch - more)) for i in range(batch)]


def is_everything(spec: SweepSpec, chosen: Sequence[Sample]) -> bool:
    """Whether the samples are of all rows and heads."""
    return all((one.rows, one.kv_heads) == (spec.q_len, spec.shape.kv_heads) for one in chosen)


def expected_output(data: Inputs, dtype: str, sample: Sample) -> Expected:
    """What the oracle computes of a sequence with the values ``data``."""
    output = oracle(data.rows[-sample.rows :], data.k, data.v, dtype, sample.kv_heads)
    first_head = (data.shape.kv_heads - sample.kv_heads) * data.shape.group
    return Expected((sample.sequence, len(data.rows) - sample.rows, first_head), output)


@dataclass
class Point:
    """One context under one layout."""

    row: SweepRow
    split: SplitSpec
    plan: SplitPlan
    call: AttentionCall | None = None
    output: Output | None = None  # that was compared with the oracle's

    def run(self) -> float:
        """Make the call; the seconds it took."""
        assert self.call is not None
        return self.call.run()

    def run_after_spoiling(self) -> None:
        """Spoil the output, make the call, and keep its output for ``verify``."""
        assert self.call is not None
        self.call.spoil()
        self.call.run()
        self.output = self.call.result()

    def verify(self, expected: Sequence[Expected], first_layout: Point | None, verified: str) -> None:
        """Compare the output with the oracle's, and with that of the context's first good layout where it is given."""
        assert self.output is not None
        out, lse = self.output
        for (sequence, row, head), want in expected:
            found = compare((out[sequence, row:, head:], lse[sequence, row:, head:]), want, (row, head))
            if found:
                self.row = self.row.failed(replace(found, index=(sequence, *found.index)).text())
                return
        if first_layout and first_layout.output and (found := compare(self.output, first_layout.output)):
            self.row = self.row.failed(f"unlike layout {first_layout.row.layout}: {found.text()}")
            return
        self.row = replace(self.row, verified=verified)

    def compare_timed(self, run: int) -> None:
        """Compare the output of a timed call with the verified one."""
        assert self.call is not None and self.output is not None
        if self.row.status == "ok" and (found := compare(self.call.result(), self.output)):
            self.row = self.row.failed(f"in timed run {run}: {found.text()}")


def time_points(points: list[Point], repeats: int | None) -> None:
    """Time the points in turns, compare the output of every call, and complete the rows of those that pass."""
    seconds: list[list[float]] = [[] for _ in points]
    for point in points:
        for _ in range(WARM_UP_RUNS):
            point.run()
    for done in rounds(repeats, BUDGET_S * len(points)) if points else ():
        for point, times in zip(points, seconds, strict=True):
            times.append(point.run())
            point.compare_timed(done + 1)
    for point, times in zip(points, seconds, strict=True):
        if point.row.status == "ok":
            point.row = point.row.timed(times)
