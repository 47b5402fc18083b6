"""Decode of a model at long contexts with every split layout, without a prefill.

Keys and values of the context are seeded normal values that go straight into the cache, linear-attention layers begin
with a fresh state, and the last STEPS positions are decoded on fixed token ids.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from time import perf_counter
from typing import Any, Final

import numpy as np

from ...cache import rows
from ...checks import check_int
from ...dtypes import storage_dtype
from ...errors import LimitError
from ...planning.arithmetic import Arithmetic, on_matrices
from ...runtime.device import Device
from ...shapes import AttnShape
from ..harness.bound import truth
from ..harness.progress import Progress, Steps
from ..harness.split_spec import SplitSpec
from ..sweep import PAGE_SIZE
from .float64 import blockwise_attention
from .hf_model import HFModel, check_memory, integration, quiet
from .trace import F32, AttentionTrace, Call, first_difference

STEPS: Final = 16  # positions that are decoded
LAYOUTS: Final = "1,2,8,64,auto,size:256,size:2048"  # by default; the first of all is always the single split
CONTEXTS: Final = "8k,32k,128k"  # by default; in place of those beyond the model's maximum, that maximum
BOUND: Final = 5e-6  # relative L2 error of a layer's attention outputs against float64 that passes
BLOCK: Final = 4096  # tokens whose seeded values are made together
REFERENCE_BLOCK: Final = 2048  # keys that the float64 reference takes at a time


@dataclass(frozen=True)
class LayoutResult:
    """Decode of the last STEPS positions with one layout, beside a single split. Times: median of the steps, ms.

    status: "baseline", "equal", "host differs" (the model's own arithmetic) or "DIFFERENT".
    """

    layout: str
    splits: int
    status: str
    step_ms: float
    attention_ms: float
    difference: str | None = None


@dataclass(frozen=True)
class LayerError:
    """A layer's attention outputs against float64: largest absolute error, and relative L2 error over all rows.

    bound_share: with matrix units, the largest error over the bound of their roundings, which then decides.
    """

    layer: int
    max_abs: float
    relative_l2: float
    bound_share: float | None = None

    @property
    def in_bound(self) -> bool:
        """Whether the error is as small as it must be."""
        return self.relative_l2 <= BOUND if self.bound_share is None else self.bound_share <= 1


@dataclass
class ContextResult:
    """One context. refused: why there is no room for it."""

    context: int
    dtype: str
    layouts: list[LayoutResult] = field(default_factory=list)
    layers: list[LayerError] = field(default_factory=list)
    fill_s: float = 0.0
    reference_s: float = 0.0
    refused: str | None = None

    @property
    def relative_l2(self) -> float:
        """The worst layer's relative L2 error."""
        return max((one.relative_l2 for one in self.layers), default=0.0)

    @property
    def bound_share(self) -> float | None:
        """The worst layer's share of its bound, None where no layer is attended by matrix units."""
        return max((one.bound_share for one in self.layers if one.bound_share is not None), default=None)

    @property
    def max_abs(self) -> float:
        """The worst layer's largest absolute error."""
        return max((one.max_abs for one in self.layers), default=0.0)

    @property
    def status(self) -> str:
        """ "pass", "FAIL" or "refused"."""
        if self.refused:
            return "refused"
        equal = all(one.status in ("baseline", "equal") for one in self.layouts)
        return "pass" if equal and all(one.in_bound for one in self.layers) else "FAIL"

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "status": self.status, "bound": BOUND, "steps": STEPS}


@dataclass(frozen=True)
class ValidationOptions:
    """dtype: of the cache, None for the model's. page_size: tokens. seed: of keys, values and token ids. arithmetic:
    see ``Attention``."""

    dtype: str | None = None
    page_size: int = PAGE_SIZE
    seed: int = 0
    arithmetic: Arithmetic = "canonical"


def validate(
    model: HFModel,
    device: Device,
    contexts: Sequence[int],
    layouts: Sequence[SplitSpec],
    options: ValidationOptions,
    *,
    progress: Progress | None = None,
    on_context: Callable[[ContextResult], None] = lambda result: None,
) -> list[ContextResult]:
    """Decode the last STEPS positions of each context with every layout; compare bits, and outputs with float64.

    A context is filled once, and every layout decodes a fork. on_context: called with each result as it is ready.
    ArgumentError: contexts below STEPS. LimitError: contexts beyond the model's positions. UnsupportedError: a model
    with ALiBi, which the float64 reference lacks.
    """
    model.check_selectable("validate")
    for context in contexts:
        check_int("contexts", context, STEPS)
        model.check_positions(context, "contexts")
    every = list(dict.fromkeys([SplitSpec.parse("1"), *layouts]))
    found = []
    for context in contexts:
        run = _Context(model, device, context, options, progress)
        run.validate(every)
        found.append(run.result)
        on_context(run.result)
    return found


class _Context:
    """One context of a validation. layers: those that attend."""

    def __init__(
        self, model: HFModel, device: Device, context: int, options: ValidationOptions, progress: Progress | None
    ) -> None:
        self.model, self.device, self.context = model, device, context
        self.seed, self.page_size, self.arithmetic = options.seed, options.page_size, options.arithmetic
        hf, arguments = integration(), {"dtype": options.dtype, "page_size": options.page_size}
        self.cache = hf.ZincCache(model.model.config, context, device=device, arithmetic=self.arithmetic, **arguments)
        self.dtype = storage_dtype(model.dtype if options.dtype is None else options.dtype)
        self.layers = [layer for layer in self.cache.layers if isinstance(layer, hf.ZincLayer)]
        self.result = ContextResult(context, self.dtype)
        self.steps = Steps(progress, 0)

    def _tell(self, what: str, count: int = 1) -> None:
        self.steps.begin(f"{self.context:,} keys: {what}", count)

    def validate(self, layouts: Sequence[SplitSpec]) -> None:
        """Fill, decode with every layout, and compare."""
        fixed, result = self.context - STEPS, self.result
        blocks, keys = -(-fixed // BLOCK), -(-self.context // REFERENCE_BLOCK)
        self.steps.total = len(self.layers) * (blocks + keys) + len(layouts) * STEPS
        try:
            with self.cache:
                self._check_room()
                self.cache.allocate(self.model.dtype)
                whole = fixed // self.page_size * self.page_size  # forks share full pages, and write the rest anew
                begin = perf_counter()
                self._fill(self.cache, 0, whole)
                result.fill_s = perf_counter() - begin
                base, first = self._decode(layouts[0], whole, None)
                result.layouts.append(first)
                result.layouts += [self._decode(layout, whole, base)[1] for layout in layouts[1:]]
            begin = perf_counter()
            result.layers += [self._error(layer, base) for layer in self.layers]
            result.reference_s = perf_counter() - begin
        except (LimitError, MemoryError) as error:  # DeviceMemoryError is a MemoryError
            result.refused = str(error) or "no room in host memory"

    def _check_room(self) -> None:
        """Refuse what the host cannot hold where the device's memory is the host's."""
        if self.device.info.kind in ("cpu", "integrated"):
            pages = -(-self.context // self.page_size)
            per_token = sum(layer.shape.kv_bytes_per_token(self.dtype) for layer in self.layers)
            check_memory(pages * self.page_size * per_token, f"keys and values of {self.context:,} tokens")

    def _values(self, layer: Any, begin: int, end: int) -> Iterator[tuple[F32, F32]]:
        """Seeded k and v of tokens [begin, end) in pieces, which the cache rounds to its dtype."""
        for block in range(begin // BLOCK, -(-end // BLOCK)):
            rng = np.random.default_rng([self.seed, layer.index, block])
            sizes = (layer.shape.head_dim, layer.shape.v_head_dim)
            k, v = (rng.standard_normal((BLOCK, layer.shape.kv_heads, size), np.float32) for size in sizes)
            part = slice(max(begin - block * BLOCK, 0), min(end - block * BLOCK, BLOCK))
            yield k[part], v[part]

    def _fill(self, cache: Any, begin: int, end: int) -> None:
        """Append tokens [begin, end) to the attention layers."""
        while begin < end:
            until = min(begin // BLOCK * BLOCK + BLOCK, end)
            if cache is self.cache:
                self._tell("filling the cache", len(self.layers))
            cache.append(lambda layer, a=begin, b=until: next(self._values(layer, a, b)), self.model.dtype)
            begin = until

    def _decode(
        self, layout: SplitSpec, whole: int, base: AttentionTrace | None
    ) -> tuple[AttentionTrace, LayoutResult]:
        """The last STEPS positions on a fork of ``whole`` tokens, compared with the single split's trace."""
        import torch

        vocab = self.model.config.vocab_size
        ids = np.random.default_rng([self.seed, STEPS]).integers(0, vocab, STEPS).tolist()
        self.cache.set_layout(layout.num_splits, layout.split_size)
        twin, trace, seconds = self.cache.fork(), AttentionTrace(keep=True), list[float]()
        try:
            self._fill(twin, whole, self.context - STEPS)
            twin.observer = trace
            with torch.no_grad(), quiet():
                for one in ids:
                    self._tell(f"layout {layout.label}")
                    with trace.timed(seconds):
                        logits = self.model.logits(torch.tensor([[one]]), twin)
                    trace.end_step(logits)
        finally:
            twin.reset()
        part = first_difference(trace.steps, base.steps) if base else None
        status = part.status if part else "equal" if base else "baseline"
        step_ms, attention_ms = (1e3 * float(np.median(x)) for x in (seconds, trace.steps_s))
        text = part.text if part else None
        return trace, LayoutResult(layout.label, self._splits(layout), status, step_ms, attention_ms, text)

    def _splits(self, layout: SplitSpec) -> int:
        info = self.device.info
        shape: AttnShape = self.layers[0].shape
        return layout.plan(self.context, shape, info.layout_facts, self.dtype).num_splits

    def _stored(self, layer: Any, calls: Sequence[Call]) -> Iterator[tuple[F32, F32]]:
        """The values that the layer's cache holds, in pieces: the seeded ones, then the decoded tokens'."""
        for k, v in self._values(layer, 0, self.context - STEPS):
            for at in range(0, len(k), REFERENCE_BLOCK):
                part = slice(at, at + REFERENCE_BLOCK)
                self._tell("float64 reference")
                yield rows.stored(k[part], v[part], self.dtype, round_rows=True)
        k, v = (np.stack([getattr(call, name).float().numpy()[:, 0] for call in calls]) for name in "kv")
        yield rows.stored(k, v, self.dtype, round_rows=True)

    def _error(self, layer: Any, base: AttentionTrace) -> LayerError:
        """The error of all modules that attend the layer's keys and values: in some models several share them."""
        calls = [[call for call in step.calls if call.layer == layer.index] for step in base.steps[:STEPS]]
        limits = np.arange(self.context - STEPS, self.context) + 1
        largest = squares = norm = 0.0
        share = 0.0 if on_matrices(self.arithmetic, 1, layer.shape) else None
        for mine in zip(*calls, strict=True):
            q, got = (np.concatenate([getattr(call, name) for call in mine]) for name in ("q", "out"))
            options = mine[0].options
            arguments = {"window": options.window, "softcap": options.softcap, "sinks": options.sinks}
            stored = self._stored(layer, [one[0] for one in calls])
            if share is None:
                want = blockwise_attention(q, stored, limits, options.scale, **arguments)
            else:
                k, v = map(np.concatenate, zip(*stored, strict=True))
                bounded = truth(q, k, v, "f32", None, {**arguments, "scale": options.scale})
                share, want = max(share, bounded.out_share(got)), bounded.out
            largest = max(largest, float(np.abs(got - want).max()))
            squares, norm = squares + float(np.sum((got - want) ** 2)), norm + float(np.sum(want**2))
        return LayerError(layer.index, largest, math.sqrt(squares / norm) if norm else float(largest > 0), share)
