"""A Hugging Face model in transformers, on the CPU, with attention "zinc"."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
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
        if (most := self.max_positions) is not None and tokens > most:
            raise LimitError(
                f"{what}: got {tokens:,} tokens, expected at most max_position_embeddings = {most:,} of {self.name}"
            )

    def logits(self, ids: Any, cache: Any, *, all_rows: bool = False) -> Any:
        """The float32 logits of one forward of token ids (1, n) on a cache: of the last one (vocab,), or (n, vocab).

        UnsupportedError: what the model's own code raises.
        """
        keeps_few = not all_rows and "logits_to_keep" in inspect.signature(self.model.forward).parameters
        with refusing(f"model: a forward of {type(self.model).__name__} failed"):
            options = {"logits_to_keep": 1} if keeps_few else {}
            made = self.model(input_ids=ids, cache=cache, use_cache=True, **options).logits[0]
        return (made if all_rows else made[-1]).float()

    @contextmanager
    def eager_attention(self) -> Iterator[None]:
        """Run the block with transformers' own eager attention in place of "zinc"."""
        self.model.set_attn_implementation("eager")
        try:
            yield
        finally:
            self.model.set_attn_implementation(integration().NAME)


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
    """Turn what transformers, safetensors, gguf and torch raise into typed errors that begin with ``what``."""
    try:
        yield
    except ZincAttnError as error:
        raise type(error)(f"{what}: {error}") from error
    except MemoryError as error:
        raise DeviceMemoryError(f"{what}: no room in host memory") from error
    except Exception as error:  # what these libraries raise is not documented
        text = " ".join(str(error).split())[:400]
        raise UnsupportedError(f"{what}: {text or type(error).__name__}") from error
