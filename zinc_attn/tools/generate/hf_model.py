"""A Hugging Face model in transformers, on the CPU, with attention "zinc"."""

from __future__ import annotations

import inspect
import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import DeviceMemoryError, LimitError, UnsupportedError, ZincAttnError


@dataclass(frozen=True)
class HFModel:
    """A transformers model in evaluation mode with attention "zinc"."""

    name: str
    model: Any

    @property
    def config(self) -> Any:
        """The config of the text part."""
        return self.model.config.get_text_config(decoder=True)

    @property
    def dtype(self) -> Any:
        """The torch dtype of keys and values."""
        return self.model.dtype

    @property
    def stop_ids(self) -> frozenset[int]:
        """Token ids that end a text."""
        given = getattr(getattr(self.model, "generation_config", None), "eos_token_id", None)
        given = self.config.eos_token_id if given is None else given
        return frozenset(given if isinstance(given, (list, tuple)) else () if given is None else (given,))

    @property
    def max_positions(self) -> int | None:
        """The most tokens that the config allows; None where it does not say."""
        return getattr(self.config, "max_position_embeddings", None)

    def check_positions(self, tokens: int, what: str) -> None:
        """LimitError for more tokens than the config allows."""
        most = self.max_positions
        if most is not None and tokens > most:
            raise LimitError(
                f"{what}: got {tokens:,} tokens, expected at most max_position_embeddings = {most:,} of {self.name}"
            )

    def check_selectable(self, what: str) -> None:
        """UnsupportedError for a model that ``adapt`` has changed, whose own attention cannot be selected again."""
        if self.model.config.model_type in integration().ADAPTABLE:
            raise UnsupportedError(
                f"{what}: got {self.name} of type {self.model.config.model_type}, whose attention is adapted, expected "
                "a model that calls transformers' AttentionInterface; generate takes it"
            )

    def logits(self, ids: Any, cache: Any) -> Any:
        """Run one forward of token ids (1, n) on a cache, and return the last one's float32 logits (vocab,).

        UnsupportedError: what the model's own code raises.
        """
        keeps_few = "logits_to_keep" in inspect.signature(self.model.forward).parameters
        return self._forward(ids, cache, {"logits_to_keep": 1} if keeps_few else {})[-1].float()

    def all_logits(self, ids: Any, cache: Any) -> Any:
        """The same, with the float32 logits of all the ids: (n, vocab)."""
        return self._forward(ids, cache, {}).float()

    @contextmanager
    def eager_attention(self) -> Iterator[None]:
        """Run the block with transformers' own eager attention in place of "zinc"."""
        self.model.set_attn_implementation("eager")
        try:
            yield
        finally:
            self.model.set_attn_implementation(integration().NAME)

    def _forward(self, ids: Any, cache: Any, arguments: dict[str, Any]) -> Any:
        """The logits (rows, vocab) of one forward, in the model's dtype."""
        try:
            made = self.model(input_ids=ids, past_key_values=cache, use_cache=True, **arguments)
        except (ZincAttnError, MemoryError):
            raise
        except Exception as error:
            text = f"{type(error).__name__}: {_one_line(error)}"
            raise UnsupportedError(f"model: a forward of {type(self.model).__name__} failed: {text}") from error
        return made.logits[0]

    def describe(self) -> str:
        """How many attention layers of which shape it has, and how many others."""
        hf = integration()
        with hf.ZincCache(self.model.config, 1) as cache:
            shapes = Counter(str(layer.shape) for layer in cache.layers if isinstance(layer, hf.ZincLayer))
            others = len(cache.layers) - shapes.total()
        text = ", ".join(f"{n} attention layer{'s' if n > 1 else ''} {one}" for one, n in shapes.items())
        return f"{text} and {others} others" if others else text


def integration() -> Any:
    """``zinc_attn.integrations.transformers``, with "zinc" registered. RuntimeUnavailableError names the extra."""
    from ...integrations import transformers as hf

    hf.register()
    return hf


@contextmanager
def quiet() -> Iterator[None]:
    """Without transformers' notes and progress bars."""
    from transformers.utils import logging as notes

    level, bars = notes.get_verbosity(), notes.is_progress_bar_enabled()
    notes.set_verbosity(logging.ERROR)
    notes.disable_progress_bar()
    try:
        yield
    finally:
        notes.set_verbosity(level)
        if bars:
            notes.enable_progress_bar()


@contextmanager
def refusing(what: str) -> Iterator[None]:
    """Turn errors of transformers, safetensors and torch into typed ones that begin with ``what``."""
    try:
        yield
    except ZincAttnError as error:
        raise type(error)(f"{what}: {error}") from error
    except MemoryError as error:
        raise DeviceMemoryError(f"{what}: no room in host memory") from error
    except Exception as error:  # what these libraries raise is not documented
        raise UnsupportedError(f"{what}: {_one_line(error) or type(error).__name__}") from error


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:400]


def check_memory(nbytes: int, what: str) -> None:
    """DeviceMemoryError where the host has less memory available. Where that is not known, nothing is refused."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return
    found = [int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")]
    if found and nbytes > found[0]:
        raise DeviceMemoryError(
            f"{what} take {nbytes:,} bytes, expected at most the {found[0]:,} that this host has left"
        )
