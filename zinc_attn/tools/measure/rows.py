"""What a sweep, a benchmark or a decode says of what it measured: one type of row, and the columns of each tool."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from ...planning.splits import SplitPlan
from ...runtime.device import Device
from ...shapes import AttnShape
from ..harness.split_spec import SplitSpec
from .spec import CallSpec

DECODE_MODE: Final = "decode call: append, attend, merge; host clock, warm; median"
CONTIGUOUS_MODE: Final = "submit and wait: attend, merge; host clock, warm; median"
RANKS_MODE: Final = "decode call: append, attend, one gather, merge; host clock of rank 0, warm; median"
BENCH_WARM_UP: Final = 2  # rounds
HOST_CLOCK: Final = f"host clock, submit and wait, after {BENCH_WARM_UP} warm-up rounds"
DEVICE_CLOCK: Final = "device timestamps"
MEASURES: Final[Mapping[str, str]] = {  # what a row of a benchmark times, and by which clock
    "call": HOST_CLOCK,  # of a recording, of the yardstick or of a baseline
    "steady call": HOST_CLOCK,  # write the query, call, read the result: what a decode loop does
    "pass 1": DEVICE_CLOCK,
    "gap": DEVICE_CLOCK,  # from the end of pass 1 to the begin of pass 2
    "pass 2": DEVICE_CLOCK,
    "device": DEVICE_CLOCK,  # from the begin of the first dispatch to the end of the last one
    "empty submit": HOST_CLOCK,
    "host per call": "median of steady calls without keys less that of empty submissions",
}
_GIVEN: Final = ("model", "arithmetic", "batch", "q_len", "page_size", "layers", "weights_ms")
_PLANNED: Final = ("num_splits", "unit_keys", "passes", "workgroups", "scratch_bytes")
Times = tuple[float, ...]  # seconds; by the host clock also CPU seconds of the process and of the calling thread
COLUMNS: Final[Mapping[str, Sequence[str]]] = {  # of the files of each tool
    name: words.split()
    for name, words in {
        "sweep": "model device device_kind driver runtime compute_units q_heads kv_heads head_dim v_head_dim dtype "
        "batch q_len page_size layers data context layout plan num_splits unit_keys build passes workgroups "
        "scratch_bytes status verified error latency_mode repeats median_us min_us max_us iqr_us kv_gb_s "
        "attention_ms_per_step tokens_s weights_ms tokens_s_with_weights ranks received_bytes formula_bytes arithmetic",
        "bench": "device device_kind driver runtime shape dtype context layout load plan heads_per_workgroup verified "
        "status note measure latency_mode repeats median_us q1_us q3_us min_us cpu_us caller_us kv_gb_s of_read "
        "compute_units arithmetic",
        "steps": "device driver runtime shape layers dtype prepared context ms neighbors_ms stall",
    }.items()
}


@dataclass(frozen=True)
class Row:
    """A measure of a call on one layer, or a step of ``decode_run``. What there is not is None.

    tool: sweep, bench or steps, which says what of the row is written (COLUMNS). context: keys that a sequence's last
    row sees, the call's own rows among them; 0: the host's work per call. layout: of splits; in a benchmark also "read"
    (the yardstick) and "baseline". The fields from plan to scratch_bytes are those of one sequence's plan.
    status: "ok", "failed" (wrong output; ``error`` names the first, its indices sequence, row, head, dimension), or
    "refused" (there is no room; ``error`` says why). Only "ok" has times.
    verified: "bits": out and lse of all sequences, rows and heads are the oracle's; "bits (sampled)": those of some
    are, at least of the last KV head of the last sequence, and all are those of the context's first layout. "bound",
    "bound (sampled)": with matrix units, out and lse are as near to float64 as their roundings allow, and all bits are
    those of the first layout. Of a baseline, its error.
    """

    tool: str
    device: str
    driver: str
    runtime: str
    q_heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: str
    context: int
    layout: str = ""
    device_kind: str = ""
    compute_units: int | None = None
    model: str = ""
    batch: int = 1
    q_len: int = 1
    page_size: int | None = None  # tokens; None: contiguous, without a cache
    layers: int = 1
    data: str = ""
    plan: str | None = None  # fingerprint
    num_splits: int = 1
    unit_keys: int = 0
    build: str = ""
    passes: int = 1
    workgroups: int = 0
    scratch_bytes: int = 0
    heads_per_workgroup: int | None = None
    arithmetic: str | None = None  # None for the yardstick and baselines
    load: float | None = None  # the machine's load average of the last minute
    status: str = "ok"
    verified: str | None = None
    error: str | None = None
    measure: str = "call"
    latency_mode: str = HOST_CLOCK
    repeats: int = 0
    median_us: float | None = None
    min_us: float | None = None
    max_us: float | None = None
    q1_us: float | None = None  # lower quartile
    q3_us: float | None = None
    cpu_us: float | None = None  # median CPU time, all threads; a CPU device's work is in it
    caller_us: float | None = None  # median CPU time of the calling thread, which no device's work is in
    kv_gb_s: float | None = None  # stored bytes of K and V of all sequences, each once, per median; 1e9
    of_read: float | None = None  # kv_gb_s over the yardstick's, by the same clock, runtime and context
    attention_ms_per_step: float | None = None  # all layers
    tokens_s: float | None = None  # batch * q_len per step, as if attention were all of the step
    weights_ms: float | None = None  # the rest of the step, as given
    tokens_s_with_weights: float | None = None
    ranks: int = 1
    received_bytes: int | None = None
    formula_bytes: int | None = None
    prepared: bool | None = None  # whether ``prepare`` was called before the first step
    ms: float | None = None  # wall time of a step's calls, one per layer
    neighbors_ms: float | None = None  # the median of the steps around it
    stall: bool | None = None

    @classmethod
    def of(cls, tool: str, device: Device, shape: AttnShape, dtype: str, context: int, **more: Any) -> Row:
        """A row of a device that has no figures yet. more: its other fields."""
        info, load = device.info, os.getloadavg()[0] if hasattr(os, "getloadavg") else None
        sizes = (shape.q_heads, shape.kv_heads, shape.head_dim, shape.v_head_dim)
        more = {"device_kind": info.kind, "compute_units": info.compute_units, "load": load, **more}
        return cls(tool, info.name, info.driver, device.runtime.name, *sizes, dtype, context, **more)

    @classmethod
    def of_call(cls, tool: str, spec: CallSpec, device: Device, split: SplitSpec, plan: SplitPlan, **more: Any) -> Row:
        """The row of a call that has not run. more: other fields."""
        mode = HOST_CLOCK if tool == "bench" else DECODE_MODE if spec.page_size else CONTIGUOUS_MODE
        more |= {name: getattr(plan, name) for name in _PLANNED} | {name: getattr(spec, name) for name in _GIVEN}
        return cls.of(
            tool,
            device,
            spec.shape,
            spec.dtype,
            plan.context_len,
            layout=split.label,
            data=spec.kv.source if spec.kv else f"normal, seed {spec.seed}",
            plan=plan.fingerprint(),
            build=plan.build_on(device.info.layout_facts, spec.dtype),
            **{"latency_mode": mode, **more},
        )

    @property
    def shape(self) -> str:
        """The shape, as --shape takes it."""
        return str(AttnShape(self.q_heads, self.kv_heads, self.head_dim, self.v_head_dim))

    @property
    def note(self) -> str | None:
        """The error, by its name in the files of a benchmark."""
        return self.error

    @property
    def iqr_us(self) -> float | None:
        """The distance between the quartiles."""
        return None if self.q1_us is None or self.q3_us is None else self.q3_us - self.q1_us

    def record(self) -> dict[str, Any]:
        """What is written of the row, floats rounded to 6 digits."""
        values = {name: getattr(self, name) for name in COLUMNS[self.tool]}
        return {name: float(f"{x:.6g}") if isinstance(x, float) else x for name, x in values.items()}

    def failed(self, error: str) -> Row:
        """The row of wrong output."""
        return replace(self, status="failed", verified=None, error=error)

    def refused(self, error: BaseException | str) -> Row:
        """The row of what there is no room for."""
        return replace(self, status="refused", verified=None, error=str(error) or "no room in host memory")

    def timed(self, samples: Sequence[Mapping[str, Times]]) -> list[Row]:
        """A row per measure of ``samples``, each of which has a time of every measure."""
        return [
            self._of_times(measure, *zip(*(one[measure] for one in samples), strict=True))
            for measure in MEASURES
            if measure in samples[0]
        ]

    def _of_times(self, measure: str, seconds: Sequence[float], *cpu: Sequence[float]) -> Row:
        low, q1, median, q3, high = (1e6 * float(x) for x in np.percentile(seconds, (0, 25, 50, 75, 100)))
        row = replace(self, measure=measure, repeats=len(seconds), median_us=median, q1_us=q1, q3_us=q3)
        row = replace(row, min_us=low, max_us=high)
        if measure != "call":
            row = replace(row, latency_mode=MEASURES[measure])
        if cpu:
            whole, caller = (1e6 * float(np.median(x)) for x in cpu)
            row = replace(row, cpu_us=whole, caller_us=caller)
        if self.context == 0 or measure in ("gap", "pass 2") or median <= 0:
            return row
        nbytes = self.batch * self.context * AttnShape.parse(self.shape).kv_bytes_per_token(self.dtype)
        row = replace(row, kv_gb_s=nbytes / median / 1e3)
        tokens, ms = self.batch * self.q_len, median * self.layers / 1e3
        if self.weights_ms is not None:
            row = replace(row, tokens_s_with_weights=1e3 * tokens / (ms + self.weights_ms))
        return replace(row, attention_ms_per_step=ms, tokens_s=1e3 * tokens / ms)
