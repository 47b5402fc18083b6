"""``register()``: transformers calls this package by the name "zinc", and makes its calls steps of a ZincCache."""

import functools
from typing import Any

from ...errors import ArgumentError
from .attention import attention_forward
from .cache import ZincCache
from .hard_coded import refuse_selection
from .masks import adapted_attention_mask, attention_mask
from .tensors import ADAPTED, NAME
from .upstream import AttentionInterface, AttentionMaskInterface, GenerationMixin, PreTrainedModel, torch


def register() -> None:
    """Make ``attn_implementation="zinc"`` known to transformers; calling it again changes nothing.

    From then on a call of a model, or of its ``generate``, is a ``step`` of the ZincCache among its arguments.
    """
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, attention_mask)
    AttentionMaskInterface.register(ADAPTED, adapted_attention_mask)
    for name in ("set_attn_implementation", "_check_and_adjust_attn_implementation"):  # the second when it is built
        _make_selection_checked(name)
    _make_calls_steps(PreTrainedModel, "__call__")
    _make_calls_steps(GenerationMixin, "generate")


def _make_selection_checked(name: str) -> None:
    """Let the method ``name`` of models refuse "zinc" where the model would fail, or not attend by it."""
    method = getattr(PreTrainedModel, name)
    if hasattr(method, "zinc"):
        return

    @functools.wraps(method)
    def select(self: Any, attn_implementation: Any, *args: Any, **kwargs: Any) -> Any:
        chosen = attn_implementation
        if (chosen.get("") if isinstance(chosen, dict) else chosen) == NAME:
            refuse_selection(self.config)
        return method(self, attn_implementation, *args, **kwargs)

    select.zinc = True  # type: ignore[attr-defined]
    setattr(PreTrainedModel, name, select)


def _make_calls_steps(owner: Any, name: str) -> None:
    """Let a call of the method ``owner.name`` be a step of the ZincCache among its arguments."""
    method, inherited = getattr(owner, name), name not in vars(owner)
    if hasattr(method, "zinc"):
        return

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        inner = getattr(super(owner, self), name) if inherited else functools.partial(method, self)
        cache = next((argument for argument in (*args, *kwargs.values()) if isinstance(argument, ZincCache)), None)
        if cache is None:
            return inner(*args, **kwargs)
        if name == "generate":
            _check_text(cache, kwargs.get("inputs", kwargs.get("input_ids", args[0] if args else None)))
        with cache.step():
            return inner(*args, **kwargs)

    call.zinc = True  # type: ignore[attr-defined]
    setattr(owner, name, call)


def _check_text(cache: ZincCache, ids: Any) -> None:
    """Refuse ids (batch, columns) that the cache has already: transformers would compute some of them again."""
    columns = cache.get_seq_length()
    if columns and isinstance(ids, torch.Tensor) and ids.ndim == 2 and ids.shape[1] <= columns:
        raise ArgumentError(
            f"input_ids: got {ids.shape[1]} tokens, with a cache that has {columns} already, expected more; pass the "
            "whole text, its new tokens at the end, or reset() the cache for a text of its own"
        )
