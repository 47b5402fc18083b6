"""Generating text: prefill in chunks, then one token at a time, with the keys and values in a ZincCache."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import reduce
from operator import add
from typing import Any

import numpy as np

from ...checks import check_int
from ...decode.arithmetic import arithmetic_name
from ...dtypes import storage_dtype
from ...errors import ArgumentError
from ...planning.arithmetic import Arithmetic
from ...runtime.device import Device
from ..measure import PAGE_SIZE
from .hf_model import HFModel, integration, quiet
from .trace import AttentionTrace
from .warm_up import warm_up


@dataclass(frozen=True)
class Settings:
    """How to generate. ArgumentError for a value that no run could have.

    prefill_chunk: prompt tokens per forward, None for all at once. dtype: of the cache, None for the model's.
    capacity: tokens of the cache, None for what is needed. num_splits, split_size: a fixed split layout. arithmetic:
    see ``Attention``.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    seed: int = 0
    prefill_chunk: int | None = None
    dtype: str | None = None
    page_size: int = PAGE_SIZE
    num_splits: int | None = None
    split_size: int | None = None
    capacity: int | None = None
    arithmetic: Arithmetic = "canonical"

    def __post_init__(self) -> None:
        arithmetic_name(self.arithmetic)
        check_int("seed", self.seed, 0, (1 << 64) - 1)
        least = dict.fromkeys(("max_new_tokens", "prefill_chunk", "num_splits", "split_size", "capacity"), 1)
        for name, bound in {**least, "page_size": 16}.items():
            if (value := getattr(self, name)) is not None or getattr(Settings, name) is not None:
                check_int(name, value, bound)
        if not (np.isfinite(self.temperature) and self.temperature >= 0):
            raise ArgumentError(f"temperature: got {self.temperature!r}, expected a finite number of at least 0")
        if self.num_splits is not None and self.split_size is not None:
            raise ArgumentError("num_splits, split_size: got both, expected at most one")
        if self.dtype is not None:
            storage_dtype(self.dtype)

    @property
    def layout(self) -> dict[str, int | None]:
        """The arguments of Attention that fix a split layout."""
        return {"num_splits": self.num_splits, "split_size": self.split_size}

    def tokens(self, prompt: int) -> int:
        """Tokens that the cache must hold; the last new one never enters it. ArgumentError beyond ``capacity``."""
        needed = prompt + self.max_new_tokens - 1
        if self.capacity is not None and self.capacity < needed:
            raise ArgumentError(
                f"capacity: got {self.capacity:,}, expected at least {needed:,} for {prompt:,} prompt tokens and "
                f"{self.max_new_tokens:,} new ones"
            )
        return self.capacity or needed

    def chunks(self, prompt: int) -> list[int]:
        """Sizes of the chunks of a prompt."""
        return even_chunks(prompt, self.prefill_chunk or prompt)


@dataclass(frozen=True)
class Generation:
    """What came out. Times are in seconds; a step is the forward of a single token and choosing the next one.

    stopped: "length" or "eos". margins: by how much the best logit led when each id was chosen. warm_up_s: the time of
    the warm-up before, which is in no other time.
    """

    ids: list[int]
    prompt_tokens: int
    stopped: str
    dtype: str
    prefill_s: float
    decode_attention_s: float
    steps_s: list[float]
    margins: list[float]
    warm_up_s: float = 0.0

    @property
    def figures(self) -> dict[str, Any]:
        """Tokens per second and attention's share of decode; None where nothing was decoded."""
        decoded, decode_s = len(self.steps_s), sum(self.steps_s)
        return {
            "warm_up_s": self.warm_up_s,
            "prompt_tokens": self.prompt_tokens,
            "new_tokens": len(self.ids),
            "prefill_s": self.prefill_s,
            "prefill_tokens_s": self.prompt_tokens / self.prefill_s,
            "decode_s": decode_s,
            "decode_tokens_s": decoded / decode_s if decoded else None,
            "median_step_ms": 1e3 * float(np.median(self.steps_s)) if decoded else None,
            "attention_share": self.decode_attention_s / decode_s if decoded else None,
        }


def combined(parts: Sequence[Generation], warm_up_s: float) -> Generation:
    """Generations on one cache, at least one, as one: ids, margins and times of all, behind one warm-up.

    Numbers are added, and lists joined.
    """
    names = ("ids", "prompt_tokens", "prefill_s", "decode_attention_s", "steps_s", "margins")
    totals = {name: reduce(add, (getattr(one, name) for one in parts)) for name in names}
    return replace(parts[-1], **totals, warm_up_s=warm_up_s)


class Sampler:
    """Chooses the next token: at temperature 0 the best logit, otherwise one drawn from the seed's generator."""

    def __init__(self, settings: Settings) -> None:
        import torch

        self.temperature, self.generator = settings.temperature, torch.Generator().manual_seed(settings.seed)

    def choose(self, logits: Any) -> tuple[int, float]:
        """A token id, and by how much the best logit led."""
        best = logits.topk(2).values
        token = logits.argmax()
        if self.temperature:
            token = (logits / self.temperature).softmax(-1).multinomial(1, generator=self.generator)
        return int(token), float(best[0] - best[1])


def generate_ids(
    model: HFModel,
    device: Device,
    prompt: Sequence[int],
    settings: Settings,
    *,
    on_token: Callable[[int], None] = lambda token: None,
    trace: AttentionTrace | None = None,
    chunks: Sequence[int] | None = None,
    warm: AbstractContextManager[Any] | None = None,
) -> Generation:
    """Prefill ``prompt`` (token ids) in chunks, then decode until a stop id or max_new_tokens.

    on_token: called with each new id. trace: the cache's observer. chunks: sizes of the prompt's chunks, in place of
    settings.prefill_chunk. warm: run ``warm_up`` before, in this context, so that the times are without it.
    ArgumentError: an empty prompt, an id that the vocabulary lacks, a capacity that is too small.
    """
    if not prompt:
        raise ArgumentError("prompt: got no token, expected at least one")
    for one in prompt:
        check_int("prompt", one, 0, model.config.vocab_size - 1)
    needed = settings.tokens(len(prompt))
    model.check_positions(len(prompt) + settings.max_new_tokens, "prompt, max_new_tokens")
    sizes = list(chunks or settings.chunks(len(prompt)))
    with open_cache(model, device, settings, needed) as cache:
        warm_up_s = 0.0
        if warm is not None:
            with warm:
                warm_up_s = warm_up(model, cache, settings.layout, sizes)
        made = continue_text(model, cache, prompt, settings.max_new_tokens, Sampler(settings), on_token, sizes, trace)
    return replace(made, warm_up_s=warm_up_s)


@contextmanager
def open_cache(model: HFModel, device: Device, settings: Settings, tokens: int) -> Iterator[Any]:
    """A ZincCache for ``tokens`` tokens with the settings' dtype, pages and layout. Its memory has been taken."""
    options = {"device": device, "dtype": settings.dtype, "page_size": settings.page_size, **settings.layout}
    with integration().ZincCache(model.model.config, tokens, arithmetic=settings.arithmetic, **options) as cache:
        cache.allocate(model.dtype)
        yield cache


def continue_text(
    model: HFModel,
    cache: Any,
    prompt: Sequence[int],
    max_new_tokens: int,
    sampler: Sampler,
    on_token: Callable[[int], None],
    chunks: Sequence[int],
    trace: AttentionTrace | None = None,
) -> Generation:
    """Prefill ``prompt`` in chunks behind the tokens that ``cache`` has, then decode until a stop id or max_new_tokens.

    A new id is handed to ``on_token`` before it enters the cache, and the last one never does.
    """
    import torch

    cache.observer = trace = trace or AttentionTrace()
    ids, prefill_s, steps_s, margins = list[int](), list[float](), list[float](), list[float]()
    parts = torch.tensor([list(prompt)]).split(list(chunks), dim=1)
    with torch.no_grad(), quiet():
        while not ids or (len(ids) < max_new_tokens and ids[-1] not in model.stop_ids):
            with trace.timed(steps_s if ids else prefill_s):
                for part in [torch.tensor([[ids[-1]]])] if ids else parts:
                    logits = model.logits(part, cache)
                trace.end_step(logits)
                token, margin = sampler.choose(logits)
                ids.append(token)
                margins.append(margin)
            on_token(token)
    return Generation(
        ids=ids,
        prompt_tokens=len(prompt),
        stopped="eos" if ids[-1] in model.stop_ids else "length",
        dtype=cache.caches[0].dtype,
        prefill_s=prefill_s[0],
        decode_attention_s=sum(trace.steps_s[1:]),
        steps_s=steps_s,
        margins=margins,
    )


def even_chunks(tokens: int, size: int) -> list[int]:
    """Sizes of chunks of ``size`` tokens; the last one has what is left."""
    return [min(size, tokens - at) for at in range(0, tokens, size)]


def stream_text(tokenizer: Any, show: Callable[[str], None]) -> tuple[Callable[[int], None], Callable[[], None]]:
    """(what takes each new token id, what ends the text); ``show`` gets whole words, as transformers forms them."""
    import torch
    from transformers import TextStreamer

    class Streamer(TextStreamer):  # type: ignore[misc]
        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            show(text)

    streamer = Streamer(tokenizer, skip_special_tokens=True)
    return lambda token: streamer.put(torch.tensor([token])), streamer.end
