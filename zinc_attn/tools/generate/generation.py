"""Generating text: prefill in chunks, then one token at a time, with the keys and values in a ZincCache."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np

from ...checks import check_int
from ...errors import ArgumentError
from ...planning.arithmetic import Arithmetic
from ...runtime.device import Device
from ..measure import PAGE_SIZE
from .hf_model import HFModel, integration, quiet


@dataclass(frozen=True)
class Settings:
    """How to generate. ArgumentError for a value that no run could have; those of the cache are refused by ZincCache.

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
        check_int("seed", self.seed, 0, (1 << 64) - 1)
        check_int("max_new_tokens", self.max_new_tokens, 1)
        for name in ("prefill_chunk", "capacity"):
            if (value := getattr(self, name)) is not None:
                check_int(name, value, 1)
        if not (np.isfinite(self.temperature) and self.temperature >= 0):
            raise ArgumentError(f"temperature: got {self.temperature!r}, expected a finite number of at least 0")


@dataclass(frozen=True)
class Generation:
    """What came out. Times are in seconds; a step is the forward of a single token and choosing the next one.

    stopped: "length" or "eos". digest: of each step's float32 logits and token id, so that two runs can be compared.
    prefill_s: with the compiling of what the prompt and the steps need. attention_s: of the steps alone.
    """

    ids: list[int]
    prompt_tokens: int
    stopped: str
    dtype: str
    digest: str
    prefill_s: float
    attention_s: float
    steps_s: list[float]

    @property
    def figures(self) -> dict[str, Any]:
        """Tokens per second and attention's share of decode; None where nothing was decoded."""
        decoded, decode_s = len(self.steps_s), sum(self.steps_s)
        return {
            "prompt_tokens": self.prompt_tokens,
            "new_tokens": len(self.ids),
            "prefill_s": self.prefill_s,
            "prefill_tokens_s": self.prompt_tokens / self.prefill_s,
            "decode_s": decode_s,
            "decode_tokens_s": decoded / decode_s if decoded else None,
            "median_step_ms": 1e3 * float(np.median(self.steps_s)) if decoded else None,
            "attention_share": self.attention_s / decode_s if decoded else None,
        }


def sampler(settings: Settings) -> Callable[[Any], int]:
    """What chooses a token of logits (vocab,): the best one at temperature 0, otherwise a draw by the seed."""
    import torch

    generator = torch.Generator().manual_seed(settings.seed)

    def choose(logits: Any) -> int:
        if not settings.temperature:
            return int(logits.argmax())
        return int((logits / settings.temperature).softmax(-1).multinomial(1, generator=generator))

    return choose


def generate_ids(
    model: HFModel,
    device: Device,
    prompt: Sequence[int],
    settings: Settings,
    on_token: Callable[[int], None] = lambda token: None,
) -> Generation:
    """Prefill ``prompt`` (token ids) in chunks, then decode until a stop id or max_new_tokens; ``on_token`` gets each.

    ArgumentError: an empty prompt, an id that the vocabulary lacks, a capacity that is too small.
    """
    if not prompt:
        raise ArgumentError("prompt: got no token, expected at least one")
    for one in prompt:
        check_int("prompt", one, 0, model.config.vocab_size - 1)
    needed = len(prompt) + settings.max_new_tokens - 1  # the last new one never enters the cache
    capacity = check_int("capacity", settings.capacity or needed, needed)
    model.check_positions(len(prompt) + settings.max_new_tokens, "prompt, max_new_tokens")
    with open_cache(model, device, settings, capacity) as cache:
        return continue_text(model, cache, prompt, settings, sampler(settings), on_token)


@contextmanager
def open_cache(model: HFModel, device: Device, settings: Settings, tokens: int) -> Iterator[Any]:
    """A ZincCache for ``tokens`` tokens with the settings' dtype, pages and layout. Its memory has been taken."""
    options = {
        name: getattr(settings, name) for name in ("dtype", "page_size", "num_splits", "split_size", "arithmetic")
    }
    with integration().ZincCache(model.model.config, tokens, device=device, **options) as cache:
        cache.allocate(model.dtype)
        yield cache


def continue_text(
    model: HFModel,
    cache: Any,
    prompt: Sequence[int],
    settings: Settings,
    choose: Callable[[Any], int],
    on_token: Callable[[int], None],
) -> Generation:
    """Prefill ``prompt`` in chunks behind the tokens that ``cache`` has, then decode until a stop id or max_new_tokens.

    A new id is handed to ``on_token`` before it enters the cache, and the last one never does.
    """
    import torch

    attention_s, steps_s, ids, digest = list[float](), list[float](), list[int](), hashlib.blake2b(digest_size=16)
    cache.observer = lambda call: attention_s.append(call.seconds)
    parts = torch.tensor([list(prompt)]).split(settings.prefill_chunk or len(prompt), dim=1)
    with torch.no_grad(), quiet():
        while not ids or (len(ids) < settings.max_new_tokens and ids[-1] not in model.stop_ids):
            begin = perf_counter()
            for part in [torch.tensor([[ids[-1]]])] if ids else parts:
                logits = model.logits(part, cache)
            ids.append(choose(logits))
            if len(ids) == 1:
                cache.prepare()  # no step compiles anything
                attention_s.clear()
            steps_s.append(perf_counter() - begin)
            digest.update(logits.numpy().astype("<f4").tobytes() + ids[-1].to_bytes(8, "little"))
            on_token(ids[-1])
    prefill_s, *steps_s = steps_s
    return Generation(
        ids=ids,
        prompt_tokens=len(prompt),
        stopped="eos" if ids[-1] in model.stop_ids else "length",
        dtype=cache.caches[0].dtype,
        digest=digest.hexdigest(),
        prefill_s=prefill_s,
        attention_s=sum(attention_s),
        steps_s=steps_s,
    )


def stream_text(tokenizer: Any, show: Callable[[str], None]) -> tuple[Callable[[int], None], Callable[[], None]]:
    """(what takes each new token id, what ends the text); ``show`` gets whole words, as transformers forms them."""
    import torch
    from transformers import TextStreamer

    class Streamer(TextStreamer):  # type: ignore[misc]
        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            show(text)

    streamer = Streamer(tokenizer, skip_special_tokens=True)
    return lambda token: streamer.put(torch.tensor([token])), streamer.end
