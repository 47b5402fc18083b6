"""The points of one context: verified against the oracle, then timed in turns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from ...planning.splits import SplitPlan
from ..harness.bits import Output, compare, oracle
from ..harness.bound import Expected, Truth, fault, truth
from ..harness.inputs import Inputs
from ..harness.split_spec import SplitSpec
from ..harness.timing import in_turns
from .calls import AttentionCall
from .rows import SweepRow, SweepSpec

WARM_UP_RUNS: Final = 3
BUDGET_S: Final = 3.0  # timed runs of a point where ``repeats`` is not given


class Sample(NamedTuple):
    """What the oracle computes of one sequence: its last ``rows`` rows, and of these the last ``kv_heads`` KV heads."""

    sequence: int
    rows: int
    kv_heads: int


Oracle = Callable[[Inputs, str, Sample], Expected]


def samples(spec: SweepSpec, context: int) -> list[Sample]:
    """What the oracle computes of each sequence within ``spec.oracle_products``.

    Where that is not everything, the last KV head of every sequence comes first; at least the last sequence has one.
    """
    shape, batch = spec.shape, spec.batch
    row = context * shape.group * max(shape.head_dim, shape.v_head_dim)  # products of a row and KV head
    pairs = min(max(spec.oracle_products // (row * spec.q_len), 1), batch * shape.kv_heads)
    each, more = divmod(pairs, batch)
    rows = min(max(spec.oracle_products // row, 1), spec.q_len)
    return [Sample(i, rows, each + (i >= batch - more)) for i in range(batch)]


def oracle_of(spec: SweepSpec) -> Oracle:
    """What says how a call of ``spec`` must come out: the oracle, or float64 and the bound of matrix units."""
    judge: Callable[..., Expected] = truth if spec.bounded else oracle
    return lambda data, dtype, sample: judge(data.rows[-sample.rows :], data.k, data.v, dtype, sample.kv_heads)


@dataclass
class Point:
    """One context under one layout."""

    row: SweepRow
    split: SplitSpec
    plan: SplitPlan
    call: AttentionCall | None = None
    output: Output | None = None  # that was compared with the oracle's
    timed_runs: int = -WARM_UP_RUNS

    def verify(self, expected: Mapping[int, Expected], leader: Point | None) -> None:
        """Compare the output with what is expected, by sequence; where not every bit is, also with ``leader``'s."""
        assert self.output is not None
        for sequence, want in expected.items():
            if wrong := fault(Output(self.output.out[sequence], self.output.lse[sequence]), want, (sequence,)):
                self.row = self.row.failed(wrong)
                return
        everything = sum(want.out.size for want in expected.values()) == self.output.out.size
        word = "bound" if any(isinstance(want, Truth) for want in expected.values()) else "bits"
        every_bit = everything and word == "bits"
        if not every_bit and leader and leader.output and (found := compare(self.output, leader.output)):
            self.row = self.row.failed(f"unlike layout {leader.row.layout}: {found.text()}")
        else:
            self.row = replace(self.row, verified=word if everything else f"{word} (sampled)")

    def timed_run(self) -> float:
        """Make the call and compare its output with the verified one; the seconds it took."""
        assert self.call is not None and self.output is not None
        seconds = self.call.run()
        self.timed_runs += 1
        if self.row.status == "ok" and (found := compare(self.call.result(), self.output)):
            when = f"timed run {self.timed_runs}" if self.timed_runs > 0 else "a warm-up run"
            self.row = self.row.failed(f"in {when}: {found.text()}")
        return seconds


def time_points(points: list[Point], repeats: int | None) -> None:
    """Time the points in turns, compare the output of every call, and complete the rows of those that pass."""
    seconds = in_turns([point.timed_run for point in points], repeats, BUDGET_S * len(points), WARM_UP_RUNS)
    for point, times in zip(points, seconds, strict=True):
        if point.row.status == "ok":
            point.row = point.row.timed(times)
