"""The places of K and V: several layers share two buffers, or a layer too large for them is cut by KV heads.

A recorded submission is bound to buffers, so one serves every layer that shares them.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from ..runtime.protocol import Buffer, Runtime, Use


@dataclass(frozen=True)
class HeadSlice:
    """K and V of ``heads`` KV heads, from KV head ``first`` on: the content of one storage buffer each."""

    first: int
    heads: int
    k: Buffer
    v: Buffer


class LayerStorage(NamedTuple):
    """The place of one layer.

    number: layers with the same number share their buffers; first_page: where the layer's page 0 lies in them;
    slices: the buffers, one pair for all KV heads or several.
    """

    number: int
    first_page: int
    slices: tuple[HeadSlice, ...]


@dataclass(frozen=True)
class StoragePlan:
    """The layout of ``num_layers`` layers in buffers of at most ``limit`` bytes.

    k_bytes, v_bytes: K and V of one KV head of one layer, at most ``limit``; v_bytes is 0 where V is part of K, and K's
    buffer serves as both. kv_heads, num_pages: of a layer.
    """

    num_layers: int
    kv_heads: int
    k_bytes: int
    v_bytes: int
    num_pages: int
    limit: int

    @property
    def layers_each(self) -> int:
        """Layers that share a pair of buffers."""
        most = max(self.limit // (self.kv_heads * max(self.k_bytes, self.v_bytes)), 1)
        pairs = -(-self.num_layers // most)
        return -(-self.num_layers // pairs)

    @property
    def edges(self) -> list[int]:
        """The first KV head of every slice of a layer, and the end of the last."""
        slices = -(-self.kv_heads // min(self.kv_heads, self.limit // max(self.k_bytes, self.v_bytes)))
        return [self.kv_heads * i // slices for i in range(slices + 1)]

    def allocate(self, runtime: Runtime, owned: list[Buffer]) -> list[LayerStorage]:
        """The storage of every layer in new buffers; these also go to ``owned``, whose owner closes them."""
        storages: list[LayerStorage] = []
        while len(storages) < self.num_layers:
            layers = min(self.layers_each, self.num_layers - len(storages))
            slices = tuple(self._slice(runtime, owned, layers, *pair) for pair in pairwise(self.edges))
            number = storages[-1].number + 1 if storages else 0
            storages += [LayerStorage(number, i * self.num_pages, slices) for i in range(layers)]
        return storages

    def _slice(self, runtime: Runtime, owned: list[Buffer], layers: int, first: int, end: int) -> HeadSlice:
        buffers = []
        for head_bytes in (self.k_bytes, self.v_bytes) if self.v_bytes else (self.k_bytes,):
            buffers.append(runtime.buffer(layers * (end - first) * head_bytes, Use.CACHE))
            owned.append(buffers[-1])
        return HeadSlice(first, end - first, buffers[0], buffers[-1])
