"""What a sweep measures, checked before any device is opened, and what it says of one point."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from ...cache.pages import PagePool
from ...cache.rows import stored_values
from ...checks import check_int
from ...decode.arithmetic import arithmetic_name
from ...dtypes import storage_dtype
from ...errors import ArgumentError, ShapeError
from ...planning.arithmetic import Arithmetic, on_matrices
from ...planning.splits import SplitPlan
from ...runtime.device import Device
from ...shapes import AttnShape, row_format
from ...storage import storage_types
from ..harness.bits import ORACLE_PRODUCTS
from ..harness.inputs import Inputs
from ..harness.split_spec import SplitSpec
from ..harness.timing import Spread

PAGE_SIZE: Final = 256  # tokens
DECODE_MODE: Final = "decode call: append, attend, merge; host clock, warm; median"
CONTIGUOUS_MODE: Final = "submit and wait: attend, merge; host clock, warm; median"
RANKS_MODE: Final = "decode call: append, attend, one gather, merge; host clock of rank 0, warm; median"
_GIVEN: Final = ("model", "dtype", "arithmetic", "batch", "q_len", "page_size", "layers")  # of a SweepSpec
_FIGURES: Final = (
    *("median_us", "min_us", "max_us", "iqr_us", "kv_gb_s"),
    *("attention_ms_per_step", "tokens_s", "tokens_s_with_weights"),
)


@dataclass(frozen=True)
class SweepSpec:
    """The calls of a sweep. ArgumentError and its kinds name the field that cannot be measured.

    layers: attention layers of a step; contexts: keys of a sequence, the call's q_len rows among them; splits:
    layouts (``distributed_sweep`` has its own); dtype: of K and V; batch: sequences in a call, with q_len new rows
    each; page_size: tokens, None for contiguous K and V without a cache (one sequence); repeats: timed
    calls per point (None: 5 to 50 within 3 s); weights_ms: the rest of a step; kv: values of this shape for every
    sequence, in place of normal ones from ``seed``; arithmetic: see ``Attention``; oracle_products: batch * q_len *
    context * q_heads * head_dim up to which everything is compared with the oracle, and above it as many KV heads
    as that allows.
    """

    shape: AttnShape
    layers: int
    contexts: Sequence[int]
    splits: Sequence[SplitSpec] = (SplitSpec("auto"), SplitSpec("1", num_splits=1))
    dtype: str = "f16"
    batch: int = 1
    q_len: int = 1
    page_size: int | None = PAGE_SIZE
    repeats: int | None = None
    weights_ms: float | None = None
    seed: int = 0
    kv: Inputs | None = None
    model: str = ""
    arithmetic: Arithmetic = "canonical"
    oracle_products: int = ORACLE_PRODUCTS

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", storage_dtype(self.dtype))
        row_format(self.shape, self.dtype)  # refuses a dtype that the shape does not take
        for name in ("layers", "batch", "q_len"):
            check_int(name, getattr(self, name), 1)
        if self.page_size is not None:
            PagePool(1, self.page_size)
        elif self.batch > 1:
            raise ArgumentError(f"batch: got {self.batch}, expected 1 for contiguous K and V without a cache")
        for name in ("contexts", "splits"):
            if not getattr(self, name):
                raise ArgumentError(f"{name}: got none, expected one or more")
        arithmetic_name(self.arithmetic)
        check_int("seed", self.seed, 0)
        if self.repeats is not None:
            check_int("repeats", self.repeats, 1)
        if self.weights_ms is not None and not 0 <= self.weights_ms < float("inf"):
            raise ArgumentError(f"weights_ms: got {self.weights_ms}, expected milliseconds of at least 0")
        shortest = min(self.contexts)
        if shortest < self.q_len:
            raise ArgumentError(f"contexts: got {shortest}, expected at least {self.q_len}, the call's own rows")
        if self.kv is not None:
            self._check_kv(self.kv)

    def _check_kv(self, kv: Inputs) -> None:
        longest = max(self.contexts)
        if kv.shape != self.shape:
            raise ShapeError(f"kv: got {kv.shape}, expected {self.shape}")
        if len(kv.rows) != self.q_len:
            raise ShapeError(f"q_len: got {self.q_len}, expected {len(kv.rows)}, the query rows in {kv.source}")
        if longest > len(kv.k):
            raise ArgumentError(f"contexts: got {longest}, expected at most {len(kv.k)}, the tokens in {kv.source}")
        try:
            for name, x, kind in zip("kv", (kv.k, kv.v), storage_types(self.dtype), strict=True):
                stored_values(name, x, kind.name)
        except ArgumentError as error:
            raise type(error)(f"{kv.source}: {error}") from error

    @property
    def bounded(self) -> bool:
        """Whether matrix units attend, so that a call has a bound of its error in place of the oracle's bits."""
        return on_matrices(self.arithmetic, self.q_len, self.shape)

    def inputs(self, context: int, sequence: int = 0) -> Inputs:
        """The values of one sequence of the batch."""
        if self.kv:
            return self.kv.prefix(context)
        return Inputs.normal(self.shape, context, self.dtype, self.seed, q_len=self.q_len, sequence=sequence)


@dataclass(frozen=True)
class SweepRow:
    """One point. Times are of one call on one layer, and None where there is none.

    A call attends q_len rows of each of ``batch`` sequences. context: keys that a sequence's last row sees, the call's
    own rows among them. The fields from plan to scratch_bytes are those of one sequence's plan.
    status: "ok", "failed" (a bit is wrong; ``error`` names the first, its indices sequence, row, head, dimension), or
    "refused" (there is no room; ``error`` says why).
    verified: "bits": out and lse of all sequences, rows and heads are the oracle's; "bits (sampled)": those of some
    are, at least of the last KV head of the last sequence, and all are those of the context's first layout. "bound",
    "bound (sampled)": with matrix units, out and lse are as near to float64 as their roundings allow, and all bits are
    those of the first layout.
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
    v_head_dim: int
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
    arithmetic: str = "canonical"

    @classmethod
    def of(
        cls, spec: SweepSpec, device: Device, context: int, layout: str, plan: SplitPlan, *, ranks: int | None = None
    ) -> SweepRow:
        """The row of a point that has not run; ``ranks`` is None for a sweep of one process."""
        info = device.info
        mode = RANKS_MODE if ranks else DECODE_MODE if spec.page_size else CONTIGUOUS_MODE
        said = {name: getattr(spec, name) for name in _GIVEN}
        sizes = {name: getattr(spec.shape, name) for name in ("q_heads", "kv_heads", "head_dim", "v_head_dim")}
        planned = {name: getattr(plan, name) for name in ("num_splits", "unit_keys", "passes", "workgroups")}
        return cls(
            **said,
            **planned,
            **sizes,
            device=info.name,
            device_kind=info.kind,
            driver=info.driver,
            runtime=device.runtime.name,
            compute_units=info.compute_units,
            data=spec.kv.source if spec.kv else f"normal, seed {spec.seed}",
            context=context,
            layout=layout,
            plan=plan.fingerprint(),
            build=plan.build_on(info.layout_facts, spec.dtype),
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
        shape = AttnShape(self.q_heads, self.kv_heads, self.head_dim, self.v_head_dim)
        per_token = shape.kv_bytes_per_token(self.dtype)
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
