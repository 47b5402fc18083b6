"""What a cache's dtype costs: perplexity of a text through ZincCaches, beside transformers' eager attention.

All runs read the same tokens in the same chunks, each after the right ones (teacher forcing), in float32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ...errors import ArgumentError, UnsupportedError
from ...runtime.device import Device
from ..harness.progress import Progress, Steps
from .generation import Settings, open_cache
from .hf_model import HFModel, integration, quiet

TEXT: Final = Path(__file__).with_name("pride_and_prejudice_1.txt")  # chapter 1 of Jane Austen's novel of 1813
CONTEXT: Final = 1024  # tokens by default, if the model has as many positions
ROWS: Final = 128  # tokens of a forward, whose logits are compared together
EAGER: Final = "eager"


@dataclass(frozen=True)
class Perplexity:
    """One run over a text. cache: the cache's dtype, or EAGER.

    kl: mean over the positions of the Kullback-Leibler divergence of the next token's distribution from eager's, in
    nats; same_best: share of the positions whose most probable next token is eager's. Both None for eager itself.
    """

    cache: str
    perplexity: float
    kl: float | None = None
    same_best: float | None = None


def text_ids(tokenizer: Any, text: str, context: int) -> list[int]:
    """The first ``context`` token ids, 2 at least, of a text. ArgumentError: it is too short."""
    ids = [int(token) for token in tokenizer(text)["input_ids"]]
    if len(ids) < context:
        need = f"expected at least context = {context:,}; give a longer text or a smaller context"
        raise ArgumentError(f"text: got {len(ids):,} tokens, {need}")
    return ids[:context]


def measure_perplexity(
    model: HFModel,
    device: Device,
    ids: Sequence[int],
    dtypes: Sequence[str],
    settings: Settings,
    progress: Progress | None = None,
) -> list[Perplexity]:
    """Eager's perplexity of the tokens, and that with a cache of each dtype; the first token is given.

    settings: the caches' page size and arithmetic. model: with float32 weights. LimitError: more tokens than it has
    positions. UnsupportedError: its own attention cannot be selected.
    """
    import torch
    from transformers import DynamicCache

    config = model.model.config
    if config.model_type in integration().ADAPTABLE:
        raise UnsupportedError(
            f"perplexity: got {model.name} of type {config.model_type}, whose attention is adapted, expected a model "
            "that calls transformers' AttentionInterface; generate takes it"
        )
    model.check_positions(len(ids), "context")
    tokens = torch.tensor(list(ids))
    sums = np.zeros((1 + len(dtypes), 3))
    parts, targets = tokens[:-1].split(ROWS), tokens[1:].split(ROWS)  # the last token has no next one
    steps = Steps(progress, len(parts) * (1 + len(dtypes)))
    with ExitStack() as stack, torch.no_grad(), quiet():
        each = (replace(settings, dtype=dtype) for dtype in dtypes)
        caches = [stack.enter_context(open_cache(model, device, one, len(ids))) for one in each]
        eager_cache = DynamicCache(config=config)
        for part, following in zip(parts, targets, strict=True):
            steps.begin(EAGER)
            with model.eager_attention():
                eager = _log_probabilities(model, part, eager_cache)
            sums[0] += _sums(eager, eager, following)
            for i, cache in enumerate(caches):
                steps.begin(dtypes[i])
                sums[1 + i] += _sums(_log_probabilities(model, part, cache), eager, following)
    eager_run, *runs = (sums / (len(ids) - 1)).tolist()
    found = [Perplexity(dtype, math.exp(loss), kl, same) for dtype, (loss, kl, same) in zip(dtypes, runs, strict=True)]
    return [Perplexity(EAGER, math.exp(eager_run[0])), *found]


def _log_probabilities(model: HFModel, part: Any, cache: Any) -> Any:
    """Float64 log-probabilities (n, vocab) of the tokens behind each of ``part`` (n,)."""
    return model.logits(part[None], cache, all_rows=True).double().log_softmax(1)


def _sums(found: Any, eager: Any, targets: Any) -> NDArray[np.float64]:
    """Summed over positions: loss, KL divergence from eager, and how often the best token is eager's.

    found, eager: float64 log-probabilities (n, vocab); targets: the token ids (n,) that come next.
    """
    loss = -found.gather(1, targets[:, None]).sum()
    return np.array([loss, (eager.exp() * (eager - found)).sum(), (found.argmax(1) == eager.argmax(1)).sum()])
