"""``register()``: what transformers calls by the name "zinc"."""

from __future__ import annotations

import functools
from typing import Any

from .attention import attention_forward
from .cache import ZincCache
from .masks import attention_mask
from .tensors import NAME
from .upstream import AttentionInterface, AttentionMaskInterface, GenerationMixin, PreTrainedModel


def register() -> None:
    """Make ``attn_implementation="zinc"`` known to transformers: the attention and the mask function. Repeatable.

    From then on a model's call and ``generate`` are steps of the ZincCache that they are given, see ``ZincCache.step``.
    """
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, attention_mask)
    _make_step(PreTrainedModel, "__call__")
    _make_step(GenerationMixin, "generate")


def _make_step(owner: Any, name: str) -> None:
    """Make steps of a ZincCache of the calls of ``owner.name`` that are given one; others stay as they were."""
    found, inherited = getattr(owner, name), name not in vars(owner)
    if hasattr(found, "zinc"):
        return

    @functools.wraps(found)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        inner = getattr(super(owner, self), name) if inherited else functools.partial(found, self)
        given = next((one for one in (*args, *kwargs.values()) if isinstance(one, ZincCache)), None)
        if given is None:
            return inner(*args, **kwargs)
        with given.step():
            return inner(*args, **kwargs)

    call.zinc = True  # type: ignore[attr-defined]
    setattr(owner, name, call)
