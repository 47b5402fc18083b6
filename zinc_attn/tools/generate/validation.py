"""Decode of a model at long contexts with every split layout, without a prefill.

Keys and values of the context are seeded normal values that go straight into the cache, linear-attention layers begin
with a fresh state, and the last STEPS positions are decoded on fixed token ids.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from time import perf_counter
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ...cache import rows
from ...canonical import reference
from ...checks import check_int
from ...dtypes import storage_dtype
from ...errors import LimitError
from ...planning.arithmetic import Arithmetic, on_matrices
from ...runtime.device import Device
from ..harness.bits import truth
from ..harness.progress import Progress, Steps
from ..harness.split_spec import SplitSpec
from ..measure import PAGE_SIZE
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

    def worst(self, name: str) -> float | None:
        """The largest ``name`` of a layer (max_abs, relative_l2 or bound_share), None where no layer has one."""
        return max((x for one in self.layers if (x := getattr(one, name)) is not None), default=None)

    @property
    def status(self) -> str:
        """ "pass", "FAIL" or "refused"."""
        equal = all(one.status in ("baseline", "equal") for one in self.layouts)
        found = "pass" if equal and all(one.in_bound for one in self.layers) else "FAIL"
        return "refused" if self.refused else found

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
    progress: Progress | None = None,
) -> Iterator[ContextResult]:
    """Decode the last STEPS positions of each context with every layout; compare bits, and outputs with float64.

    A context is filled once, and every layout decodes a fork. Each result comes as it is ready.
    ArgumentError: contexts below STEPS. LimitError: contexts beyond the model's positions. UnsupportedError: a model
    with ALiBi, which the float64 reference lacks.
    """
    model.check_selectable("validate")
    for context in contexts:
        check_int("contexts", context, STEPS)
        model.check_positions(context, "contexts")
    for context in contexts:
        yield _Context(model, device, context, options, progress).validate([SplitSpec.parse("1"), *layouts])


class _Context:
    """One context of a validation. layers: those that attend."""

    def __init__(
        self, model: HFModel, device: Device, context: int, options: ValidationOptions, progress: Progress | None
    ) -> None:
        self.model, self.device, self.context, self.options = model, device, context, options
        hf, sizes = integration(), {"dtype": options.dtype, "page_size": options.page_size}
        self.cache = hf.ZincCache(model.model.config, context, device=device, arithmetic=options.arithmetic, **sizes)
        self.dtype = storage_dtype(model.dtype if options.dtype is None else options.dtype)
        self.layers = [layer for layer in self.cache.layers if isinstance(layer, hf.ZincLayer)]
        self.steps = Steps(progress, 0)

    def _tell(self, what: str, count: int = 1) -> None:
        self.steps.begin(f"{self.context:,} keys: {what}", count)

    def validate(self, layouts: Sequence[SplitSpec]) -> ContextResult:
        """Fill, decode with every layout, and compare."""
        every = list(dict.fromkeys(layouts))
        fixed, result = self.context - STEPS, ContextResult(self.context, self.dtype)
        blocks, keys = -(-fixed // BLOCK), -(-self.context // REFERENCE_BLOCK)
        self.steps.total = len(self.layers) * (blocks + keys) + len(every) * STEPS
        try:
            with self.cache:
                if self.device.info.kind in ("cpu", "integrated"):  # whose memory is the host's
                    pages = -(-self.context // self.options.page_size)
                    per_token = sum(layer.shape.kv_bytes_per_token(self.dtype) for layer in self.layers)
                    needed = pages * self.options.page_size * per_token
                    check_memory(needed, f"keys and values of {self.context:,} tokens")
                self.cache.allocate(self.model.dtype)
                whole = fixed - fixed % self.options.page_size  # forks share full pages, and write the rest anew
                begin = perf_counter()
                self._fill(self.cache, 0, whole)
                result.fill_s = perf_counter() - begin
                base, first = self._decode(every[0], whole, None)
                result.layouts.append(first)
                result.layouts += [self._decode(layout, whole, base)[1] for layout in every[1:]]
            begin = perf_counter()
            result.layers += [self._error(layer, base) for layer in self.layers]
            result.reference_s = perf_counter() - begin
        except (LimitError, MemoryError) as error:  # DeviceMemoryError is a MemoryError
            result.refused = str(error) or "no room in host memory"
        return result

    def _values(self, layer: Any, begin: int, end: int) -> Iterator[tuple[F32, F32]]:
        """Seeded k and v of tokens [begin, end) in pieces, which the cache rounds to its dtype."""
        for block in range(begin // BLOCK, -(-end // BLOCK)):
            rng = np.random.default_rng([self.options.seed, layer.index, block])
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
        ids = np.random.default_rng([self.options.seed, STEPS]).integers(0, vocab, STEPS).tolist()
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
        status, text = (part.status, part.text) if part else ("equal" if base else "baseline", None)
        splits = layout.plan(self.context, self.layers[0].shape, self.device.info.layout_facts, self.dtype).num_splits
        step_ms, attention_ms = (1e3 * float(np.median(x)) for x in (seconds, trace.steps_s))
        return trace, LayoutResult(layout.label, splits, status, step_ms, attention_ms, text)

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
        largest = squares = norm = 0.0
        share = 0.0 if on_matrices(self.options.arithmetic, 1, layer.shape) else None
        for mine in zip(*calls, strict=True):
            q, got = (np.concatenate([getattr(call, name) for call in mine]) for name in ("q", "out"))
            options = {name: getattr(mine[0].options, name) for name in ("scale", "window", "softcap", "sinks")}
            stored = self._stored(layer, [one[0] for one in calls])
            if share is None:
                want = blockwise_attention(q, stored, self.context, **options)
            else:
                k, v = map(np.concatenate, zip(*stored, strict=True))
                bounded = truth(q, k, v, "f32", None, options)
                share, want = max(share, bounded.out_share(got)), bounded.out
            largest = max(largest, float(np.abs(got - want).max()))
            squares, norm = squares + float(np.sum((got - want) ** 2)), norm + float(np.sum(want**2))
        return LayerError(layer.index, largest, math.sqrt(squares / norm) if norm else float(largest > 0), share)


def blockwise_attention(
    q: F32,
    blocks: Iterable[tuple[F32, F32]],
    tokens: int,
    scale: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks: F32 | None = None,
) -> NDArray[np.float64]:
    """``reference.attention`` of the last rows of ``tokens`` keys, which come in blocks: (n, q_heads, v_head_dim).

    q: (n, q_heads, head_dim). blocks: pairs of k (size, kv_heads, head_dim) and v (size, kv_heads, v_head_dim),
    consecutive from position 0.
    """
    limits = np.arange(tokens - len(q), tokens)[:, None] + 1  # row i sees the keys below limits[i]
    parts, begin = [], 0
    for k, v in blocks:
        position = begin + np.arange(len(k))
        seen = (position < limits) & (position >= limits - (window or tokens))
        if seen.any():
            parts.append(reference.attention(q, k, v, scale=scale, causal=False, softcap=softcap, mask=seen))
        begin += len(k)
    lses = [lse for _, lse in parts] + ([] if sinks is None else [np.tile(sinks.astype(np.float64), (len(q), 1))])
    total = np.logaddexp.reduce(lses)
    made: NDArray[np.float64] = np.sum([out * np.exp(lse - total)[..., None] for out, lse in parts], axis=0)
    return made
