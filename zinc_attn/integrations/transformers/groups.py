"""Layers of one shape share a KVCache, and an ``Attention`` serves those of their calls that have the same options."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ...cache.kv_cache import KVCache
from ...decode.arithmetic import check_arithmetic
from ...decode.attention import Attention
from ...planning.arithmetic import Arithmetic
from ...runtime.device import Device
from ...shapes import AttnShape
from .tensors import F32


@dataclass(frozen=True, eq=False)
class AttentionOptions:
    """The scale of a layer's call, and what changes its scores; sinks, alibi: float32 (q_heads,) or None.

    The fields have the names of the arguments of ``zinc_attn.attention``.
    """

    scale: float
    window: int | None
    softcap: float | None
    sinks: F32 | None
    alibi: F32 | None = None

    @property
    def shared(self) -> tuple[float, float | None, bytes | None]:
        """What an Attention has once for all layers."""
        return self.scale, self.softcap, None if self.alibi is None else self.alibi.tobytes()

    @property
    def own(self) -> tuple[int | None, bytes | None]:
        """What an Attention has for each layer."""
        return self.window, None if self.sinks is None else self.sinks.tobytes()


@dataclass(eq=False)
class ConfiguredAttention:
    """An Attention, and the options that it was made with for each layer."""

    attention: Attention
    options: list[AttentionOptions]


@dataclass(eq=False)
class LayerGroup:
    """The layers of one shape: their KVCache, and an Attention for each scale, softcap and ALiBi slopes.

    Most models have one of each.
    """

    shape: AttnShape
    layers: list[int]
    arithmetic: Arithmetic = "canonical"
    cache: KVCache | None = None
    calls: dict[tuple[float, float | None, bytes | None], ConfiguredAttention] = field(default_factory=dict)

    @property
    def kv_cache(self) -> KVCache:
        """The KVCache, which ``allocate`` has made."""
        assert self.cache is not None
        return self.cache

    def allocate(self, device: Device, tokens: int, dtype: str, page_size: int) -> None:
        """Take the device memory, unless it is there already."""
        if self.cache is None:
            check_arithmetic(self.arithmetic, device, dtype, self.shape)
            self.cache = KVCache(device, self.shape, len(self.layers), tokens, dtype, page_size, round_rows=True)

    def attention(self, layer: int, options: AttentionOptions, layout: dict[str, int | None]) -> tuple[Attention, int]:
        """Return the Attention for a call of model layer ``layer``, and the layer's index in the KVCache.

        The first call decides for all layers: the others are assumed to have its options. A layer that calls with
        different ones gets a new Attention, in which the other layers keep their options.
        """
        index, key = self.layers.index(layer), options.shared
        found = self.calls.get(key)
        if found is not None and found.options[index].own == options.own:
            return found.attention, index
        each = [options] * len(self.layers) if found is None else list(found.options)
        each[index] = options
        by_layer = {"window": [one.window for one in each], "sinks": [one.sinks for one in each]}
        arguments: dict[str, Any] = vars(options) | by_layer | layout
        made = Attention(self.kv_cache, arithmetic=self.arithmetic, **arguments)
        if found is not None:
            found.attention.close()
        self.calls[key] = ConfiguredAttention(made, each)
        return made, index

    def close_attentions(self) -> None:
        """Close every Attention; the next call of a layer makes a new one."""
        for calls in self.calls.values():
            calls.attention.close()
        self.calls.clear()
