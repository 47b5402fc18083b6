"""Layers of a shape share a KVCache. An ``Attention`` serves all calls of these layers that have the same options."""

from dataclasses import dataclass, field
from typing import Any

from ...cache.kv_cache import KVCache
from ...canonical.state import F32
from ...decode.arithmetic import check_arithmetic
from ...decode.attention import Attention
from ...errors import DeviceMemoryError, LimitError
from ...planning.arithmetic import Arithmetic
from ...planning.splits import SplitPlan
from ...runtime.device import Device
from ...shapes import AttnShape
from .room import BatchRoom


@dataclass(frozen=True, eq=False)
class AttentionOptions:
    """The scale of a layer's call, and the options that change its scores; sinks, alibi: float32 (q_heads,) or None.

    The fields have the names of the arguments of ``zinc_attn.attention``.
    """

    scale: float
    window: int | None
    softcap: float | None
    sinks: F32 | None
    alibi: F32 | None = None

    @property
    def shared(self) -> tuple[float, float | None, bytes | None]:
        """The options that an Attention has once for all layers."""
        return self.scale, self.softcap, None if self.alibi is None else self.alibi.tobytes()

    @property
    def per_layer(self) -> tuple[int | None, bytes | None]:
        """The options that an Attention has for each layer."""
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
        configured = self.calls.get(key)
        if configured is not None and configured.options[index].per_layer == options.per_layer:
            return configured.attention, index
        each = [options] * len(self.layers) if configured is None else list(configured.options)
        each[index] = options
        by_layer = {name: [getattr(choice, name) for choice in each] for name in ("window", "sinks")}
        arguments: dict[str, Any] = vars(options) | by_layer | layout
        attention = Attention(self.kv_cache, arithmetic=self.arithmetic, **arguments)
        if configured is not None:
            configured.attention.close()
        self.calls[key] = ConfiguredAttention(attention, each)
        return attention, index


class LayerGroups(dict[AttnShape, LayerGroup]):
    """The groups of a ZincCache and its forks, by shape. layout: the arguments of Attention that fix a split layout."""

    def __init__(self, arithmetic: Arithmetic) -> None:
        super().__init__()
        self.arithmetic = arithmetic
        self.layout: dict[str, int | None] = {}

    def add(self, shape: AttnShape, layer: int) -> None:
        self.setdefault(shape, LayerGroup(shape, [], self.arithmetic)).layers.append(layer)

    @property
    def caches(self) -> list[KVCache]:
        return [group.cache for group in self.values() if group.cache is not None]

    def allocate(self, device: Device, room: BatchRoom, dtype: str) -> None:
        """Take the device memory. DeviceMemoryError, LimitError: in terms of max_cache_len and max_batch."""
        try:
            for group in self.values():
                group.allocate(device, room.tokens, dtype, room.page_size)
        except (LimitError, DeviceMemoryError) as error:
            raise type(error)(f"{room}, expected what the device has room for: {error}") from error

    def prepare(self, tokens: int, batch: int) -> None:
        """Record the submissions of decode up to ``tokens`` tokens, with the options of the layers' calls."""
        for group in self.values():
            for configured in group.calls.values():
                configured.attention.prepare(tokens, batch=batch)

    def attention(self, shape: AttnShape, layer: int, options: AttentionOptions) -> tuple[Attention, int]:
        """See ``LayerGroup.attention``."""
        return self[shape].attention(layer, options, self.layout)

    def set_layout(self, num_splits: int | None, split_size: int | None) -> None:
        """Another layout for the next calls. ArgumentError: it is no layout."""
        if num_splits is not None or split_size is not None:
            SplitPlan.fixed(0, next(iter(self)), num_splits=num_splits, split_size=split_size)  # refuses a wrong one
        self.layout.update(num_splits=num_splits, split_size=split_size)
        for group in self.values():  # the next call of a layer makes a new Attention
            for configured in group.calls.values():
                configured.attention.close()
            group.calls.clear()

    def close(self) -> None:
        """Free the device memory, and with it every Attention."""
        for group in self.values():
            group.calls.clear()
        for cache in self.caches:
            cache.close()
