"""The masking options of a case, and their text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import numpy as np

from ...canonical.arguments import check_window
from ...decode.scoring import check_scale, check_softcap
from ...errors import ArgumentError
from ...shapes import AttnShape
from .data import MASKS, mask_of, values

_NUMBERS: Final[Mapping[str, Callable[[str], Any]]] = {"window": int, "softcap": float, "scale": float}
_FLAGS: Final = {"sinks": ("sinks", True), "alibi": ("alibi", True), "noncausal": ("causal", False)}  # field and value


class Masking(NamedTuple):
    """The masking options of a case.

    sinks: whether it has them, their values are seeded; alibi: slopes of 2**-(1 + head % 8); mask: a name of
    ``data.mask_of``; causal: False where rows see the keys behind them, too.
    """

    window: int | None = None
    softcap: float | None = None
    scale: float | None = None
    sinks: bool = False
    alibi: bool = False
    mask: str | None = None
    causal: bool = True

    def __str__(self) -> str:
        numbers = {name: getattr(self, name) for name in _NUMBERS}
        said = [f"{name}={str(value).removesuffix('.0')}" for name, value in numbers.items() if value is not None]
        said += [word for word in ("sinks", "alibi") if getattr(self, word)]
        said += [f"mask={self.mask}"] if self.mask else []
        said += [] if self.causal else ["noncausal"]
        return "+".join(said) or "none"

    @classmethod
    def parse(cls, text: str) -> Masking:
        """``none``, or words joined by +, each once: ``window=128``, ``softcap=50``, ``scale=0.125``, ``sinks``,
        ``alibi``, ``mask=tree``, ``noncausal``."""
        found: dict[str, Any] = {}
        words = [] if text.strip() == "none" else [word.strip() for word in text.split("+")]
        try:
            for word in words:
                name, value = _FLAGS.get(word) or _parse_word(word)
                if name in found:
                    raise ValueError(word)
                found[name] = value
        except ValueError:
            raise ArgumentError(
                f"masking: got {text!r}, expected none, or words joined by + of window=KEYS, softcap=X, scale=X, "
                f"sinks, alibi, noncausal and mask=KIND (of {', '.join(MASKS)}), each once (window=128+sinks)"
            ) from None
        check_window(found.get("window"))
        check_softcap(found.get("softcap"))
        check_scale(found.get("scale"), 64)
        return cls(**found)

    def options(self, shape: AttnShape) -> dict[str, Any]:
        """Those that ``Attention`` and the oracle take."""
        heads = np.arange(shape.q_heads)
        sinks = values(f"{shape} sinks", (shape.q_heads,)) * np.float32(4) if self.sinks else None
        alibi = np.exp2(-(1.0 + heads % 8)).astype(np.float32) if self.alibi else None
        numbers = {name: getattr(self, name) for name in _NUMBERS}
        return {**numbers, "sinks": sinks, "alibi": alibi}

    def call(self, rows: int, tokens: int) -> dict[str, Any]:
        """Those of a call and of the oracle: of the last ``rows`` of ``tokens`` tokens."""
        mask = mask_of(self.mask, rows, tokens) if self.mask else None
        return {"causal": self.causal, "mask": mask}


def _parse_word(word: str) -> tuple[str, Any]:
    """A field and its value. ValueError: it has no such text."""
    name, _, value = word.partition("=")
    if name in _NUMBERS:
        return name, _NUMBERS[name](value)
    if name == "mask" and value in MASKS:
        return name, value
    raise ValueError(word)
