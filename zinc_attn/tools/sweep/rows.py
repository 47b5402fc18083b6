"""What a sweep says of one point."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from ...planning.splits import SplitPlan
from ...runtime.device import Device
from ...shapes import AttnShape
from ..harness.timing import Spread
from .spec import SweepSpec

DECODE_MODE: Final = "decode call: append, attend, merge; host clock, warm; median"
CONTIGUOUS_MODE: Final = "submit and wait: attend, merge; host clock, warm; median"
RANKS_MODE: Final = "decode call: append, attend, one gather, merge; host clock of rank 0, warm; median"
_FIGURES: Final = (
    *("median_us", "min_us", "max_us", "iqr_us", "kv_gb_s"),
    *("attention_ms_per_step", "tokens_s", "tokens_s_with_weights"),
)


@dataclass(frozen=True)
class SweepRow:
    """One point. Times are of one call on one layer, and None where there is none.

    A call attends q_len rows of each of ``batch`` sequences. context: keys that a sequence's last row sees, the call's
    own rows among them. The fields from plan to scratch_bytes are those of one sequence's plan.
    status: "ok", "failed" (a bit is wrong; ``error`` names the first, its indices sequence, row, head, dimension), or
    "refused" (there is no room; ``error`` says why).
    verified: "bits": out and lse of all sequences, rows and heads are the oracle's; "bits (sampled)": those of some
    are, at least of the last KV head of the last sequence, and all are those of the context's first layout.
    """

    model: str
    device: str
    device_kind: str
    driver: str
    runtime: str
    compute_units: int
    q_heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    batch: int
    q_len: int
    page_size: int | None  # tokens; None: contiguous, without a cache
    layers: int
    data: str
    context: int
    layout: str
    plan: str  # fingerprint
    num_splits: int
    unit_keys: int
    build: str
    passes: int
    workgroups: int
    scratch_bytes: int
    status: str = "ok"
    verified: str | None = None
    error: str | None = None
    latency_mode: str = DECODE_MODE
    repeats: int = 0
    median_us: float | None = None
    min_us: float | None = None
    max_us: float | None = None
    iqr_us: float | None = None  # between the quartiles
    kv_gb_s: float | None = None  # stored bytes of K and V of all sequences, each once, per median; 1e9
    attention_ms_per_step: float | None = None  # all layers
    tokens_s: float | None = None  # batch * q_len per step, as if attention were all of the step
    weights_ms: float | None = None  # the rest of the step, as given
    tokens_s_with_weights: float | None = None
    ranks: int = 1
    received_bytes: int | None = None
    formula_bytes: int | None = None

    @classmethod
    def of(
        cls, spec: SweepSpec, device: Device, context: int, layout: str, plan: SplitPlan, *, ranks: int | None = None
    ) -> SweepRow:
        """The row of a point that has not run; ``ranks`` is None for a sweep of one process."""
        info = device.info
        mode = RANKS_MODE if ranks else DECODE_MODE if spec.page_size else CONTIGUOUS_MODE
        said = {name: getattr(spec, name) for name in ("model", "dtype", "batch", "q_len", "page_size", "layers")}
        planned = {name: getattr(plan, name) for name in ("num_splits", "unit_keys", "build", "passes", "workgroups")}
        return cls(
            **said,
            **planned,
            **asdict(spec.shape),
            device=info.name,
            device_kind=info.kind,
            driver=info.driver,
            runtime=device.runtime.name,
            compute_units=info.compute_units,
            data=spec.kv.source if spec.kv else f"normal, seed {spec.seed}",
            context=context,
            layout=layout,
            plan=plan.fingerprint(),
            scratch_bytes=plan.scratch_bytes,
            latency_mode=mode,
            weights_ms=spec.weights_ms,
            ranks=ranks or 1,
        )

    def failed(self, error: str) -> SweepRow:
        """The row with a wrong bit, which has no times."""
        untimed: dict[str, Any] = dict.fromkeys(_FIGURES)
        return replace(self, status="failed", verified=None, error=error, repeats=0, **untimed)

    def refused(self, error: BaseException | str) -> SweepRow:
        """The row of a point for which there is no room."""
        return replace(self, status="refused", error=str(error) or "no room in host memory")

    def timed(self, seconds: Sequence[float]) -> SweepRow:
        """The row with the figures of these times of a call."""
        spread = Spread.of(seconds)
        ms = spread.median * self.layers / 1e3
        per_token = AttnShape(self.q_heads, self.kv_heads, self.head_dim).kv_bytes_per_token(self.dtype)
        tokens = self.batch * self.q_len
        return replace(
            self,
            repeats=len(seconds),
            median_us=spread.median,
            min_us=spread.low,
            max_us=spread.high,
            iqr_us=spread.q3 - spread.q1,
            kv_gb_s=self.batch * self.context * per_token / spread.median / 1e3,
            attention_ms_per_step=ms,
            tokens_s=1e3 * tokens / ms,
            tokens_s_with_weights=None if self.weights_ms is None else 1e3 * tokens / (ms + self.weights_ms),
        )
