"""A conversation: a chat template's turns on one cache, which keeps what the turns have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any, Final

from ...errors import ArgumentError, LimitError
from ...runtime.device import Device
from .generation import Settings, continue_text, open_cache, sampler, stream_text
from .hf_model import HFModel, integration, refusing

CAPACITY: Final = 4096  # tokens of a conversation's cache by default, if the model has as many positions


@dataclass(frozen=True)
class Turn:
    """One answer. text: what was shown of it. stopped: "eos", "length" or "interrupted".

    prompt_tokens: of the conversation up to the answer, of which the cache had ``kept_tokens`` from the turns before.
    """

    text: str
    ids: list[int]
    prompt_tokens: int
    kept_tokens: int
    stopped: str


@contextmanager
def open_conversation(model: HFModel, tokenizer: Any, device: Device, settings: Settings) -> Iterator[Conversation]:
    """A conversation on a cache of its own, of settings.capacity or CAPACITY tokens.

    ArgumentError: the tokenizer has no chat template. LimitError: a capacity beyond the model's positions.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise ArgumentError(
            f"chat: {model.name} has no chat template, expected a checkpoint that was tuned for conversations; "
            "--prompt continues a text"
        )
    capacity = settings.capacity or min(CAPACITY, model.max_positions or CAPACITY)
    model.check_positions(capacity, "capacity")
    with open_cache(model, device, settings, capacity) as cache:
        yield Conversation(model, tokenizer, cache, settings)


class Conversation:
    """A conversation on ``cache``, a ZincCache without tokens that holds as many as the conversation may have."""

    def __init__(self, model: HFModel, tokenizer: Any, cache: Any, settings: Settings) -> None:
        self._model, self._tokenizer, self._cache, self._settings = model, tokenizer, cache, settings
        self._choose = sampler(settings)
        self._messages: list[dict[str, str]] = []
        self._held: list[int] = []  # the tokens in the cache

    def answer(self, text: str, show: Callable[[str], None]) -> Turn:
        """Answer ``text``; ``show`` gets the answer in whole words as it comes.

        Ctrl-C ends the answer, and what there is of it stays in the conversation; an answer without a token leaves
        nothing there, its question neither. LimitError: the conversation no longer fits in the cache.
        """
        messages = [*self._messages, {"role": "user", "content": text}]
        with refusing(f"chat: the chat template of {self._model.name} fails"):
            ids = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        room = min(self._settings.max_new_tokens, self._cache.max_cache_len - len(ids) + 1)
        if room < 1:
            raise LimitError(
                f"chat: got a conversation of {len(ids):,} tokens, expected at most capacity = "
                f"{self._cache.max_cache_len:,}; begin a new one, or give a larger --capacity"
            )
        kept, new = self._keep_common(ids), list[int]()
        put, end = stream_text(self._tokenizer, show)

        def on_token(token: int) -> None:
            new.append(token)
            put(token)

        stopped, settings = "interrupted", replace(self._settings, max_new_tokens=room)
        try:
            stopped = continue_text(self._model, self._cache, ids[kept:], settings, self._choose, on_token).stopped
        except KeyboardInterrupt:
            pass
        finally:  # a token enters the cache only after on_token had it
            self._held = [*ids, *new][: self._cache.get_seq_length()]
        end()
        answer = self._tokenizer.decode(new, skip_special_tokens=True)
        if new:
            self._messages = [*messages, {"role": "assistant", "content": answer}]
        return Turn(answer, new, len(ids), kept, stopped)

    def _keep_common(self, ids: list[int]) -> int:
        """Cut the cache to the tokens that ``ids`` begins with, less the last of all ids: how many these are."""
        pairs = zip(self._held, ids[:-1], strict=False)
        common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        if common < len(self._held):
            if all(isinstance(layer, integration().ZincLayer) for layer in self._cache.layers):
                self._cache.crop(common - len(self._held))
            else:  # the state of a linear-attention layer cannot go back
                self._cache.reset()
                common = 0
        self._held = ids[:common]
        return common
