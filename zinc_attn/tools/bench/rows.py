"""What a benchmark measures, and what it says of one measure."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from ...checks import check_int
from ...dtypes import storage_dtype
from ...errors import ArgumentError
from ...limits import MAX_CONTEXT
from ...planning.arithmetic import Arithmetic
from ...runtime.device import Device
from ...shapes import AttnShape
from ..harness.bits import ORACLE_PRODUCTS
from ..harness.inputs import Inputs, check_stored_v
from ..harness.timing import Spread
from ..sweep.rows import SweepSpec

WARM_UP_ROUNDS: Final = 2
HOST_ROUNDS: Final = 1000  # of a call without keys
LAYOUTS: Final = ("auto", "1 split", "per query head")
HOST_CLOCK: Final = f"host clock, submit and wait, after {WARM_UP_ROUNDS} warm-up rounds"
DEVICE_CLOCK: Final = "device timestamps"
MEASURES: Final[Mapping[str, str]] = {  # what a row's times are of, and by which clock
    "call": HOST_CLOCK,  # RecordedCall.run(), or the call of the yardstick or the baseline
    "steady call": HOST_CLOCK,  # write_q, run, result: what a decode loop does
    "pass 1": DEVICE_CLOCK,
    "gap": DEVICE_CLOCK,  # from the end of pass 1 to the begin of pass 2
    "pass 2": DEVICE_CLOCK,
    "device": DEVICE_CLOCK,  # from the begin of the first dispatch to the end of the last one
    "empty submit": HOST_CLOCK,
    "host per call": "median of steady calls without keys less that of empty submissions",
}
Times = tuple[float, ...]  # seconds; by the host clock also CPU seconds of the process and of the calling thread


@dataclass(frozen=True)
class BenchSpec:
    """The calls of a benchmark: one query row of every shape at every context. ArgumentError names a wrong field.

    contexts: keys; dtype: of K and V; repeats: rounds per shape and context (None: 5 to 50 within 10 s); seed: of the
    values; arithmetic: see ``Attention``; host_rounds: rounds of the call without keys; oracle_products: context *
    q_heads * head_dim above which the oracle computes the last KV head alone.
    """

    shapes: Sequence[AttnShape]
    contexts: Sequence[int]
    dtype: str = "f16"
    repeats: int | None = None
    seed: int = 0
    host_rounds: int = HOST_ROUNDS
    oracle_products: int = ORACLE_PRODUCTS
    arithmetic: Arithmetic = "canonical"

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", storage_dtype(self.dtype))
        for context in self.contexts:
            check_int("contexts", context, 1, MAX_CONTEXT)
        if not self.shapes:
            raise ArgumentError("shapes: got none, expected one or more")
        for shape in self.shapes:
            self.calls(check_stored_v(shape))

    def calls(self, shape: AttnShape) -> SweepSpec:
        """The calls of one shape, as those of a sweep; checked."""
        given = {name: getattr(self, name) for name in ("dtype", "repeats", "seed", "arithmetic")}
        return SweepSpec(shape, 1, self.contexts, page_size=None, **given)

    def bounded(self, shape: AttnShape) -> bool:
        """Whether matrix units attend, so that a call has a bound of its error in place of the oracle's bits."""
        return self.calls(shape).bounded

    def layouts(self, shape: AttnShape) -> tuple[str, ...]:
        """Those of LAYOUTS that differ: the workgroups of matrix units have no choice of heads."""
        return LAYOUTS[:2] if self.bounded(shape) else LAYOUTS


@dataclass(frozen=True)
class BenchRow:
    """One measure of one subject, for one layer and one query row. Times are in microseconds, None where there is none.

    context: keys; 0: the host's work per call. layout: one of LAYOUTS, "read" (the yardstick) or "baseline".
    verified: "bits"; "bits (last KV head)" where the oracle made that one alone and the others are those of the
    first layout; "bound": with matrix units, as near to float64 as their roundings allow, and the bits of the first
    layout; of a baseline, its error. arithmetic: None for the yardstick and baselines. status: "ok", "failed" (wrong
    output) or "refused"; note: the reason.
    """

    device: str
    device_kind: str
    driver: str
    runtime: str
    shape: str
    dtype: str
    context: int
    layout: str
    load: float | None = None  # the machine's load average of the last minute
    plan: str | None = None  # fingerprint
    heads_per_workgroup: int | None = None
    verified: str | None = None
    status: str = "ok"
    note: str | None = None
    measure: str = "call"
    latency_mode: str = HOST_CLOCK
    repeats: int = 0
    median_us: float | None = None
    q1_us: float | None = None  # lower quartile
    q3_us: float | None = None
    min_us: float | None = None
    cpu_us: float | None = None  # median CPU time, all threads; a CPU device's work is in it
    caller_us: float | None = None  # median CPU time of the calling thread, which no device's work is in
    kv_gb_s: float | None = None  # bytes of K and V as the device stores them, each once, per median; 1e9
    of_read: float | None = None  # kv_gb_s over the yardstick's, by the same clock, runtime and context
    compute_units: int | None = None  # of the device, on which the split rule depends; None for a baseline
    arithmetic: str | None = None

    @classmethod
    def of(cls, device: Device, data: Inputs, dtype: str, layout: str) -> BenchRow:
        """The row of a subject that has not run."""
        info, name = device.info, device.runtime.name
        load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
        row = cls(info.name, info.kind, info.driver, name, str(data.shape), dtype, len(data.k), layout, load)
        return replace(row, compute_units=info.compute_units)

    def without_time(self, status: str, note: str) -> BenchRow:
        """The row of a subject that failed or was refused."""
        return replace(self, verified=None, status=status, note=note)

    def timed(self, samples: Sequence[Mapping[str, Times]], kv_bytes: int = 0) -> list[BenchRow]:
        """A row per measure of ``samples``. kv_bytes: bytes of K and V, 0 where no rate is to be given."""
        made = []
        for measure in (name for name in MEASURES if name in samples[0]):
            times, *cpu = zip(*(one[measure] for one in samples), strict=True)
            spread = Spread.of(times)
            rated = kv_bytes and measure not in ("gap", "pass 2") and spread.median > 0
            row = replace(
                self,
                measure=measure,
                latency_mode=MEASURES[measure],
                repeats=len(times),
                median_us=spread.median,
                q1_us=spread.q1,
                q3_us=spread.q3,
                min_us=spread.low,
                cpu_us=1e6 * float(np.median(cpu[0])) if cpu else None,
                caller_us=1e6 * float(np.median(cpu[1])) if cpu else None,
                kv_gb_s=kv_bytes / spread.median / 1e3 if rated else None,
            )
            made.append(row)
        return made


def with_host_per_call(rows: Sequence[BenchRow]) -> list[BenchRow]:
    """The rows of a subject without keys, and the host's work in a steady call, which is a difference of two medians.

    It has neither quartiles nor a minimum: those of differences tell of other programs, and may be below 0.
    """
    steady, empty = (next(row for row in rows if row.measure == name) for name in ("steady call", "empty submit"))
    work: dict[str, Any] = dict.fromkeys(("q1_us", "q3_us", "min_us"))
    work |= {name: getattr(steady, name) - getattr(empty, name) for name in ("median_us", "cpu_us", "caller_us")}
    name = "host per call"
    return [*rows, replace(steady, measure=name, latency_mode=MEASURES[name], **work)]
