"""One attention layer of a ZincCache."""

from __future__ import annotations

import copy
import weakref
from typing import Any, ClassVar, Protocol, Self

from ...canonical.state import F32
from ...errors import ClosedError, ShapeError, UnsupportedError
from .boundary import untraced
from .config import LayerSpec
from .groups import AttentionOptions
from .latent import Absorption
from .masks import MaskPattern
from .rows import CompressedRows, ZincRows
from .tensors import dense_tensor
from .upstream import DYNAMIC_LAYER_TYPE_MAPPING, CacheLayerMixin, LinearAttentionCacheLayerMixin, torch


class LayerCache(Protocol):
    """A ZincCache, as its layers see it."""

    @property
    def max_cache_len(self) -> int: ...

    def advice(self) -> str: ...

    def allocate(self, dtype: Any) -> None: ...

    def check_rows(self, layer: ZincLayer, key: Any) -> None: ...

    def attend(
        self, layer: ZincLayer, query: Any, rows: ZincRows, pattern: MaskPattern, options: AttentionOptions
    ) -> F32: ...


class ZincLayer(CacheLayerMixin):
    """One attention layer of a ZincCache.

    A Sequence spans all layers, so a layer alone cannot be cropped, reset or reordered: call the cache's methods.
    """

    is_compileable: ClassVar[bool] = False
    is_croppable: ClassVar[bool] = True

    def __init__(self, cache: LayerCache, spec: LayerSpec) -> None:
        super().__init__()
        self._cache = weakref.ref(cache)
        self.spec, self.shape, self.expanded = spec, spec.shape, spec.expanded
        self.index, self.is_sliding = spec.index, spec.is_sliding
        self.columns = 0  # how many the layer has seen
        self.pending: tuple[Any, Any | None] | None = None  # known k and v that attend() has not yet appended
        self.expanding = False  # update() was given compressed rows, whose k and v the attention function will get
        self.serial = 0  # counts update() and crops, so that older rows are recognized

    @property
    def cache(self) -> LayerCache:
        """The cache that this is a layer of."""
        cache = self._cache()
        if cache is None:
            raise ClosedError(
                "ZincLayer: got a call after its ZincCache was deleted; keep the cache while the model runs"
            )
        return cache

    def forked_to(self, cache: LayerCache) -> Self:
        """Return the layer of a fork of the cache, which has seen the same columns."""
        fork = type(self)(cache, self.spec)
        fork.columns, fork.is_initialized = self.columns, self.is_initialized
        return fork

    def lazy_initialization(self, key_states: Any, value_states: Any) -> None:
        """Allocate the memory of the whole cache, for keys of this dtype."""
        self.cache.allocate(key_states.dtype)

    @untraced
    def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Take new k (batch, kv_heads, n, head_dim) and v (batch, kv_heads, n, v_head_dim), or their compressed form.

        Attention "zinc" appends the rows when it gets this return value, or the model's expansion of it; the rows of a
        latent shape are appended as they are given here.
        ShapeError: they do not fit the config or the batch; StepError: a forward has stopped between the layers.
        """
        compressed = self._is_compressed(key_states, value_states)
        if self.shape.latent and not compressed:
            self._refuse_expanded(key_states, value_states)
        if not compressed:
            self.check_shapes(key_states, value_states)
        self.cache.check_rows(self, key_states)
        self.lazy_initialization(key_states, value_states)
        self.serial += 1
        self.expanding, self.pending = False, (key_states, value_states)
        if self.shape.latent:
            self.pending = (torch.cat((key_states, value_states), dim=-1), None)
        elif compressed:
            self.expanding, self.pending = True, None
        kind = CompressedRows if compressed else ZincRows
        return kind.of(key_states, self, self.serial), kind.of(value_states, self, self.serial)

    def _is_compressed(self, key: Any, value: Any) -> bool:
        """Whether these are one row (batch, 1, n, ...) per token for all heads, of the compressed sizes."""
        shapes = [tuple(dense_tensor(name, x).shape) for name, x in (("key", key), ("value", value))]
        if self.spec.compressed is None or any(len(shape) != 4 or 0 in shape for shape in shapes):
            return False
        batch, _, n, _ = shapes[0]
        return shapes == [(batch, 1, n, size) for size in self.spec.compressed]

    def _refuse_expanded(self, key: Any, value: Any) -> None:
        expected = " and ".join(f"(batch, 1, tokens, {size})" for size in self.spec.compressed or ())
        raise ShapeError(
            f"key, value of layer {self.index}: got shapes {tuple(key.shape)} and {tuple(value.shape)}, expected the "
            f"compressed rows {expected}, which transformers 5.24 hands to a cache; make the "
            "ZincCache without latent=True"
        )

    def check_shapes(self, key: Any, value: Any) -> None:
        """Refuse new rows that do not have the shape of the config."""
        shape, got = self.expanded, tuple(dense_tensor("key", key).shape)
        value_shape = tuple(dense_tensor("value", value).shape)
        if key.ndim != 4 or got[1] != shape.kv_heads or got[3] != shape.head_dim or 0 in got:
            raise ShapeError(
                f"key of layer {self.index}: got shape {got}, expected (batch, {shape.kv_heads}, tokens, "
                f"{shape.head_dim}) as in the config"
            )
        if value_shape != (*got[:3], shape.v_head_dim):
            raise ShapeError(
                f"value of layer {self.index}: got shape {value_shape}, expected {(*got[:3], shape.v_head_dim)}, key's "
                f"with the config's {shape.v_head_dim} dimensions"
            )

    def check_query(self, query: Any, rows: ZincRows) -> None:
        """Refuse a query that does not have the shape of the config, or that is for other rows.

        Where the rows have been appended, for another layer that shares them, the query may be of the last ones.
        """
        expected = rows.shape[0], self.expanded.q_heads, rows.shape[2], self.expanded.head_dim
        got = tuple(query.shape)
        last = self.pending is None and len(got) == 4 and 0 < got[2] < expected[2]
        if got != expected and not (last and got[:2] + got[3:] == expected[:2] + expected[3:]):
            raise ShapeError(f"query of layer {self.index}: got shape {tuple(query.shape)}, expected {expected}")

    def attend(
        self, module: Any, query: Any, key: ZincRows, value: ZincRows, pattern: MaskPattern, options: AttentionOptions
    ) -> F32:
        """Append the pending rows, and attend the rows of ``query``. See ``ZincCache.attend``.

        key, value: the return value of update(). Compressed rows arrive expanded, and are pending from here on. A
        latent shape takes their sizes alone, and from ``module`` the weight that has expanded them.
        """
        if self.expanding and key.serial == self.serial:
            self.check_shapes(key, value)
            self.pending, self.expanding = (key.plain(), value.plain()), False
        self.check_query(query, key)
        absorption = None
        if self.shape.latent and self.spec.compressed is not None:
            self.check_shapes(key, value)
            absorption = Absorption.of(module, self.index, self.expanded, self.spec.compressed)
            query = absorption.query(query)
        out = self.cache.attend(self, query, key, pattern, options)
        return out if absorption is None else absorption.output(out)

    def cut(self, columns: int) -> None:
        """Keep ``columns`` columns. Rows that update() returned before are refused from now on."""
        self.columns, self.pending, self.expanding = columns, None, False
        self.serial += 1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return (keys, offset) of the mask. It covers all columns, also where a window hides some."""
        return self.columns + query_length, 0

    def get_seq_length(self) -> int:
        """Return how many columns the layer has seen, padding included."""
        return self.columns

    def get_max_length(self) -> int:
        """Return the cache's ``max_cache_len``, tokens per batch row."""
        return self.cache.max_cache_len

    def _needs_the_cache(self, name: str) -> UnsupportedError:
        return UnsupportedError(f"{name}: got one layer of a ZincCache, expected the cache; call ZincCache.{name}")

    def reset(self) -> None:
        """Always an UnsupportedError: reset the cache."""
        raise self._needs_the_cache("reset")

    def crop(self, tokens_to_remove: int) -> None:
        """Always an UnsupportedError: crop the cache."""
        raise self._needs_the_cache("crop")

    def reorder_cache(self, beam_idx: Any) -> None:
        """Always an UnsupportedError: reorder the cache."""
        raise self._needs_the_cache("reorder_cache")

    def offload(self) -> None:
        """Always an UnsupportedError: the rows are on the Vulkan device and stay there."""
        raise UnsupportedError(
            "offload: got a layer of a ZincCache, whose rows are on the Vulkan device and stay there; expected no "
            "offloading, so leave it off"
        )

    prefetch = offload


class HybridLayer(ZincLayer):
    """An attention layer that has recurrent states, too, which ``states``, transformers' own cache layer, keeps."""

    is_croppable: ClassVar[bool] = False

    def __init__(self, cache: LayerCache, spec: LayerSpec) -> None:
        super().__init__(cache, spec)
        self.states: Any = DYNAMIC_LAYER_TYPE_MAPPING["linear_attention"](**(spec.states or {}))

    def __getattr__(self, name: str) -> Any:
        if name == "states":  # of an object that is being made or copied
            raise AttributeError(name)
        return getattr(self.states, name)

    def forked_to(self, cache: LayerCache) -> Self:
        """Return the layer of a fork of the cache, with a copy of the states."""
        fork = super().forked_to(cache)
        fork.states = copy.deepcopy(self.states)
        return fork


LinearAttentionCacheLayerMixin.register(HybridLayer)  # transformers checks it before it reads or writes states
