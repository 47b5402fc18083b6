"""The layers of one shape, and the Attention that serves their calls."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...cache.kv_cache import KVCache
from ...decode.attention import Attention
from ...shapes import AttnShape
from .tensors import F32


@dataclass(frozen=True, eq=False)
class _Options:
    """The masking options of a layer's call; sinks: float32 (q_heads,) or None."""

    scale: float
    window: int | None
    softcap: float | None
    sinks: F32 | None

    def arguments(self) -> dict[str, Any]:
        """Those that are set."""
        named = {"window": self.window, "softcap": self.softcap, "sinks": self.sinks}
        return {name: value for name, value in named.items() if value is not None}


@dataclass(eq=False)
class _Calls:
    """An Attention and the options of its layers."""

    attention: Attention
    windows: list[int | None]
    sinks: list[F32 | None]


@dataclass(eq=False)
class _Group:
    """The layers of one shape: a KVCache, and an Attention per scale and softcap (nearly always one)."""

    shape: AttnShape
    layers: list[int]
    cache: KVCache | None = None
    calls: dict[tuple[float, float | None], _Calls] = field(default_factory=dict)

    def attention(self, layer: int, options: _Options, layout: dict[str, int]) -> tuple[Attention, int]:
        """The Attention of a call with these options, and the layer's place in the KVCache.

        Layers that have not called yet are taken to have the options of the first that did. Options that the
        Attention does not have make a new one, in which the other layers keep theirs.
        """
        assert self.cache is not None
        slot, key = self.layers.index(layer), (options.scale, options.softcap)
        found = self.calls.get(key)
        if found is None:
            windows, sinks = [options.window] * len(self.layers), [options.sinks] * len(self.layers)
        elif found.windows[slot] == options.window and _same(found.sinks[slot], options.sinks):
            return found.attention, slot
        else:
            windows, sinks = list(found.windows), list(found.sinks)
            windows[slot], sinks[slot] = options.window, options.sinks
        arguments: dict[str, Any] = dict(layout)
        if any(window is not None for window in windows):
            arguments["window"] = windows
        if any(one is not None for one in sinks):
            arguments["sinks"] = sinks
        if options.softcap is not None:
            arguments["softcap"] = options.softcap
        made = _Calls(Attention(self.cache, scale=options.scale, **arguments), windows, sinks)
        if found is not None:
            found.attention.close()
        self.calls[key] = made
        return made.attention, slot


def _same(a: F32 | None, b: F32 | None) -> bool:
    return (a is None and b is None) or (a is not None and b is not None and np.array_equal(a, b))
