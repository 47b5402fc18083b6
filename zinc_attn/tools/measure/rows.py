"""The rows of a sweep, a benchmark or a decode: one type."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, Final

import numpy as np

from ...kernels.device_info import DeviceInfo
from ...planning.splits import SplitPlan
from .spec import CallSpec

MODELED: Final = "modeled"  # a measure, and a row's dispatcher, where nothing ran
DEVICE_CLOCK: Final = "device timestamps; median"
MODES: Final = {  # of a measure: what its time covers, and by which clock
    "call": "host clock, warm; median",
    "device": DEVICE_CLOCK,  # from the begin of the first dispatch to the end of the last one
    "pass 1": DEVICE_CLOCK,
    "gap": DEVICE_CLOCK,  # from the end of pass 1 to the begin of pass 2
    "pass 2": DEVICE_CLOCK,
    "step": "decode calls of all layers, each append, attend, merge; host clock; mean of the layers",
    "prepare": "Attention.prepare; host clock",
    MODELED: "attend, merge as docs/cost-model.md has them; nothing ran",
}
LINE: Final = ("device", "runtime", "shape", "dtype")  # with the layout, the fields that tell rows of one context apart
FIGURES: Final = (
    *("median_us", "min_us", "max_us", "iqr_us", "kv_gb_s"),
    *("attention_ms_per_step", "tokens_s", "step_tokens_s", "relative_error"),
)
_GIVEN: Final = ("model", "layers", "dtype", "batch", "q_len", "page_size", "arithmetic", "weights_ms")
_PLANNED: Final = ("num_splits", "passes", "workgroups", "scratch_bytes")


@dataclass(frozen=True)
class Row:
    """A measure of a call on one layer, or a step of ``decode_steps``. A missing figure is None.

    context: keys that a sequence's last row sees, the call's own rows among them. plan: of one sequence under
    ``layout``, None for a step. measure: a key of MODES; seconds: of every timed call.
    status: "ok", "failed" (wrong output; ``error`` names the first, its indices sequence, row, head, dimension), or
    "refused" (there is no room; ``error`` says why). Only "ok" has times.
    verified: "bits": out and lse have the oracle's bits; "bits (sampled)": some heads do, at least the last KV head of
    every sequence, and all have the bits of the context's first layout; "bound", "bound (sampled)": with matrix units,
    out and lse are as near to float64 as the units' roundings allow, and have the first layout's bits; None: a step of
    a decode that was not compared. relative_error: of out against float64 in the L2 norm, where it was asked for.
    """

    spec: CallSpec
    info: DeviceInfo
    runtime: str
    context: int
    layout: str
    plan: SplitPlan | None = None
    status: str = "ok"
    verified: str | None = None
    error: str | None = None
    measure: str = "call"
    seconds: tuple[float, ...] = ()
    relative_error: float | None = None

    @property
    def line(self) -> dict[str, str]:
        """The fields that tell it from other rows of its context: LINE and the layout."""
        fields = {"shape": str(self.spec.shape), "dtype": self.spec.dtype}
        return {"device": self.info.name, "runtime": self.runtime, **fields, "layout": self.layout}

    @property
    def latency_mode(self) -> str:
        """The span of the time, and its clock."""
        if self.measure != "call":
            return MODES[self.measure]
        call = "decode call: append, attend, merge" if self.spec.page_size else "submit and wait: attend, merge"
        call = call if self.plan else "one call of a function"
        return f"{call}; {MODES['call']}"

    @cached_property
    def figures(self) -> dict[str, float | None]:
        """FIGURES of the times. kv_gb_s: stored bytes of K and V of all sequences, each once, per median time; 1e9.

        attention_ms_per_step: of all layers; tokens_s: batch * q_len of them in a step, as if attention were all of it;
        step_tokens_s: the same with the spec's weights_ms added to attention.
        """
        figures, spec = dict[str, float | None].fromkeys(FIGURES), self.spec
        if not self.seconds:
            return figures
        low, q1, median, q3, high = (1e6 * np.percentile(self.seconds, (0, 25, 50, 75, 100))).tolist()
        figures |= {"median_us": median, "min_us": low, "max_us": high, "iqr_us": q3 - q1}
        if median > 0 and self.measure not in ("gap", "pass 2", "prepare"):
            nbytes = spec.batch * self.context * spec.shape.kv_bytes_per_token(spec.dtype)
            figures["kv_gb_s"] = nbytes / median / 1e3
        if median > 0 and self.measure in ("call", "step", MODELED):
            ms, tokens = median * spec.layers / 1e3, 1e3 * spec.batch * spec.q_len
            figures |= {"attention_ms_per_step": ms, "tokens_s": tokens / ms}
            if spec.weights_ms is not None:
                figures["step_tokens_s"] = tokens / (ms + spec.weights_ms)
        return figures | {"relative_error": self.relative_error}

    def record(self) -> dict[str, Any]:
        """The row as an object of texts and numbers, floats rounded to 6 digits."""
        spec, info, plan = self.spec, self.info, self.plan
        values = {
            "device": info.name,
            **{"device_kind": info.kind, "driver": info.driver, "compute_units": info.compute_units},
            "runtime": self.runtime,
            **{"shape": str(spec.shape), **asdict(spec.shape), "context": self.context, "layout": self.layout},
            **{name: getattr(spec, name) for name in _GIVEN},
            "plan": plan.fingerprint() if plan else None,
            **{name: getattr(plan, name, None) for name in _PLANNED},
            **{name: getattr(self, name) for name in ("status", "verified", "error", "measure", "latency_mode")},
            **{"repeats": len(self.seconds), **self.figures},
        }
        return {name: float(f"{x:.6g}") if isinstance(x, float) else x for name, x in values.items()}

    def failed(self, error: str) -> Row:
        return replace(self, status="failed", verified=None, error=error, seconds=())
