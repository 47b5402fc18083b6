"""Decode of a model at long contexts with every split layout, without a prefill.

Keys and values of the context are seeded normal values that go straight into the cache, linear-attention layers begin
with a fresh state, and the last STEPS positions are decoded on fixed token ids.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np

from ...cache import rows
from ...dtypes import storage_dtype
from ...errors import LimitError
from ...planning.arithmetic import on_matrices
from ...runtime.device import Device
from ..harness.bits import F32, first_difference, oracle, oracle_options, truth
from ..harness.progress import Progress, Steps
from ..harness.split_spec import SplitSpec
from .generation import Settings, open_cache
from .hf_model import HFModel, integration, quiet

STEPS: Final = 16  # positions that are decoded
CONTEXTS: Final = "8k,32k,128k"  # by default; in place of those beyond the model's maximum, that maximum
BLOCK: Final = 4096  # tokens whose seeded values are made together
SINGLE: Final = SplitSpec.parse("1")


@dataclass(frozen=True)
class Finding:
    """A comparison at one context. what: a layout beside a single split, or "oracle": a single split beside that.

    status: "equal"; "DIFFERENT", attention gave other bits on equal q, k and v; "host differs", the model's own
    arithmetic moved before; "in bound" or "beyond bound" of matrix units' roundings, whose bits no oracle has;
    "refused", there is no room for the context. text: where the first difference is, or the reason.
    """

    context: int
    what: str
    status: str
    text: str = ""


class Call(NamedTuple):
    """An attention call of one row. q, out: (1, q_heads, size); new: k and v (1, kv_heads, size), or neither where the
    module attends the rows of an earlier call."""

    layer: int
    q: F32
    new: tuple[F32, ...]
    out: F32
    options: Any


Step = tuple[list[Call], F32]  # the attention calls of a forward, and its logits (vocab,)


def validate(
    model: HFModel,
    device: Device,
    contexts: Sequence[int],
    layouts: Sequence[SplitSpec],
    settings: Settings,
    progress: Progress | None = None,
) -> Iterator[Finding]:
    """Decode the last STEPS positions of each context with every layout; compare bits, also with the oracle's.

    A context is filled once, and every layout decodes a fork. Each finding comes as it is ready. settings: the cache's
    dtype, page size and arithmetic, and the seed of keys, values and token ids.
    contexts: of at least STEPS keys. LimitError: contexts beyond the model's positions.
    """
    for context in contexts:
        model.check_positions(context, "contexts")
    others = [layout for layout in dict.fromkeys(layouts) if layout != SINGLE]
    for context in contexts:
        try:
            with open_cache(model, device, settings, context) as cache:
                yield from _Context(model, cache, context, settings).findings(others, progress)
        except (LimitError, MemoryError) as error:  # DeviceMemoryError is a MemoryError
            yield Finding(context, "", "refused", str(error) or "no room in host memory")


@dataclass(frozen=True)
class _Context:
    """One context of a validation, on a cache that holds as many tokens."""

    model: HFModel
    cache: Any
    context: int
    settings: Settings

    def findings(self, layouts: Sequence[SplitSpec], progress: Progress | None) -> Iterator[Finding]:
        layers = [layer for layer in self.cache.layers if isinstance(layer, integration().ZincLayer)]
        steps = Steps(progress, 2 + len(layouts) + len(layers))
        fixed = self.context - STEPS
        whole = fixed - fixed % self.settings.page_size  # forks share full pages, and write the rest anew
        steps.begin(f"{self.context:,} keys: filling the cache")
        self.fill(self.cache, 0, whole)
        steps.begin(f"{self.context:,} keys: single split")
        base = self.decode(SINGLE, whole)
        for layout in layouts:
            steps.begin(f"{self.context:,} keys: layout {layout.label}")
            yield Finding(self.context, layout.label, *_difference(self.decode(layout, whole), base))
        share = 0.0
        for layer in layers:
            steps.begin(f"{self.context:,} keys: oracle of layer {layer.index}")
            found = self.against_oracle(layer, base)
            if isinstance(found, str):
                yield Finding(self.context, "oracle", "DIFFERENT", f"layer {layer.index}: {found}")
                return
            share = max(share, found)
        text = f"{share:.2%} of the bound, " * (share > 0) + f"{len(layers)} layers"
        status = "beyond bound" if share > 1 else "in bound" if share else "equal"
        yield Finding(self.context, "oracle", status, text)

    def values(self, layer: Any, begin: int, end: int) -> Iterator[tuple[F32, F32]]:
        """Seeded k and v of tokens [begin, end) in pieces of a BLOCK each, which the cache rounds to its dtype."""
        for block in range(begin // BLOCK, -(-end // BLOCK)):
            rng = np.random.default_rng([self.settings.seed, layer.index, block])
            sizes = (layer.shape.head_dim, layer.shape.v_head_dim)
            k, v = (rng.standard_normal((BLOCK, layer.shape.kv_heads, size), np.float32) for size in sizes)
            part = slice(max(begin - block * BLOCK, 0), min(end - block * BLOCK, BLOCK))
            yield k[part], v[part]

    def fill(self, cache: Any, begin: int, end: int) -> None:
        """Append tokens [begin, end) to the attention layers."""
        while begin < end:
            until = min(begin // BLOCK * BLOCK + BLOCK, end)
            cache.append(lambda layer, a=begin, b=until: next(self.values(layer, a, b)), self.model.dtype)
            begin = until

    def decode(self, layout: SplitSpec, whole: int) -> list[Step]:
        """The last STEPS positions with a layout, on a fork of ``whole`` tokens."""
        import torch

        vocab = self.model.config.vocab_size
        ids = np.random.default_rng([self.settings.seed, STEPS]).integers(0, vocab, (STEPS, 1, 1))
        self.cache.set_layout(layout.num_splits, layout.split_size)
        twin, steps, calls = self.cache.fork(), list[Step](), list[Call]()
        try:
            self.fill(twin, whole, self.context - STEPS)
            twin.observer = lambda call: calls.append(_kept(call))
            with torch.no_grad(), quiet():
                for one in ids:
                    logits = self.model.logits(torch.from_numpy(one), twin).numpy()
                    steps.append((calls.copy(), logits))
                    calls.clear()
        finally:
            twin.reset()
        return steps

    def against_oracle(self, layer: Any, base: list[Step]) -> float | str:
        """The first bit of the layer's outputs that is not the oracle's; 0.0 where every bit is.

        No oracle has the bits of matrix units: theirs have the largest error's share of the bound of their roundings.
        """
        calls = [[call for call in of_step if call.layer == layer.index] for of_step, _ in base]
        decoded = [next(call.new for call in step if call.new) for step in calls]
        pieces = [*self.values(layer, 0, self.context - STEPS), *decoded]
        k, v = (np.concatenate(arrays) for arrays in zip(*pieces, strict=True))
        k, v = rows.stored(k, v, storage_dtype(self.settings.dtype or self.model.dtype), round_rows=True)
        share = 0.0
        for mine in zip(*calls, strict=True):  # in some models several modules share keys and values
            q, got = (np.concatenate([getattr(call, name) for call in mine]) for name in ("q", "out"))
            options = dict(vars(mine[0].options))
            if on_matrices(self.settings.arithmetic, 1, layer.shape):
                share = max(share, truth(q, k, v, "f32", None, options).out_share(got))
                continue
            options |= oracle_options(self.settings.arithmetic)
            if found := first_difference("out", got, oracle(q, k, v, "f32", None, options).out):
                return found.text(ulp=True)
        return share


def _kept(call: Any) -> Call:
    """What is compared of an ``AttendedCall`` of one row."""
    q, *new = (x[0].detach().float().numpy().swapaxes(0, 1).copy() for x in (call.query, *(call.new or ())))
    return Call(call.layer, q, tuple(new), call.out[0].copy(), call.options)


def _difference(found: list[Step], base: list[Step]) -> tuple[str, str]:
    """The status of a layout whose steps these are, and the first place where they part from the single split's."""
    moved = "differ after equal attention: the model's own arithmetic moved"
    for i, ((calls, logits), (singles, want)) in enumerate(zip(found, base, strict=True)):
        for call, other in zip(calls, singles, strict=True):
            where = f"step {i}, layer {call.layer}"
            pairs = zip((call.q, *call.new), (other.q, *other.new), strict=True)
            if any(first_difference("", *pair) for pair in pairs):
                return "host differs", f"{where}: q, k or v {moved}"
            if part := first_difference("out", call.out, other.out):
                return "DIFFERENT", f"{where}: {part.text()} on equal q, k and v"
        if first_difference("", logits, want):
            return "host differs", f"step {i}: logits {moved}"
    return "equal", ""
