"""One attention layer of a ZincCache."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, ClassVar

from ...errors import ClosedError, UnsupportedError
from ...shapes import AttnShape
from .groups import _Options
from .masks import _Pattern
from .tensors import F32, NAME
from .upstream import CacheLayerMixin, torch

if TYPE_CHECKING:
    from .cache import ZincCache


class ZincRows(torch.Tensor):
    """The new rows of a layer, as ``ZincCache.update`` returns them: for attention "zinc", and nothing else.

    The tokens before them are on the device, so an operation on them is refused; a move to a torch device is none.
    """

    layer: ZincLayer
    serial: int

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", str(func))
        if name in ("__get__", "size", "dim", "__repr__", "to", "contiguous"):
            with torch._C.DisableTorchFunctionSubclass():
                found = func(*args, **(kwargs or {}))
            if name not in ("to", "contiguous"):
                return found
            if found.dtype == args[0].dtype:
                return _marked(found, args[0].layer, args[0].serial)
        raise UnsupportedError(
            f"ZincCache: {name} was called on the rows that update() returned, expected them to reach attention "
            f'{NAME!r} as they are; register(), and select it with model.set_attn_implementation("{NAME}")'
        )


def _marked(x: Any, layer: ZincLayer, serial: int) -> ZincRows:
    with torch._C.DisableTorchFunctionSubclass():
        rows: ZincRows = x.detach().as_subclass(ZincRows)
    rows.layer, rows.serial = layer, serial
    return rows


class ZincLayer(CacheLayerMixin):
    """One attention layer of a ZincCache. Sequences span the layers: crop, reset and reorder the cache, not a layer."""

    is_compileable: ClassVar[bool] = False
    is_croppable: ClassVar[bool] = True

    def __init__(self, cache: ZincCache, index: int, shape: AttnShape, sliding: bool) -> None:
        super().__init__()
        self._cache = weakref.ref(cache)
        self.index, self.shape, self.is_sliding = index, shape, sliding
        self.columns = 0  # tokens seen, padding included
        self.pending: tuple[Any, Any] | None = None  # rows that update() was given and attend() has not appended
        self.serial = 0  # of the last update() or crop

    @property
    def cache(self) -> ZincCache:
        """The cache that this is a layer of."""
        cache = self._cache()
        if cache is None:
            raise ClosedError("ZincLayer: its ZincCache is gone; keep the cache while the model runs")
        return cache

    def lazy_initialization(self, key_states: Any, value_states: Any) -> None:
        """Allocate the whole cache for keys of this dtype."""
        self.cache.allocate(key_states.dtype)

    def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Take new rows (batch, kv_heads, n, head_dim); attention "zinc" appends them when it gets what this returns.

        ShapeError where they do not fit the config or the batch; StepError while a forward stopped between layers.
        """
        self.cache.check_rows(self, key_states, value_states)
        self.lazy_initialization(key_states, value_states)
        self.serial += 1
        self.pending = key_states, value_states
        return _marked(key_states, self, self.serial), _marked(value_states, self, self.serial)

    def attend(self, query: Any, rows: ZincRows, pattern: _Pattern, options: _Options) -> F32:
        """Append what is pending, then attend ``query``'s rows: (batch, q_len, q_heads, head_dim)."""
        return self.cache.attend(self, query, rows, pattern, options)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(keys, offset) of the mask: all tokens, also where a window hides some."""
        return self.columns + query_length, 0

    def get_seq_length(self) -> int:
        """Tokens seen, padding included."""
        return self.columns

    def get_max_length(self) -> int:
        """The cache's capacity, tokens per batch row."""
        return self.cache.capacity

    def _whole(self, name: str) -> UnsupportedError:
        return UnsupportedError(f"{name}: got one layer of a ZincCache, expected the cache; call ZincCache.{name}")

    def reset(self) -> None:
        """UnsupportedError: reset the cache."""
        raise self._whole("reset")

    def crop(self, tokens_to_remove: int) -> None:
        """UnsupportedError: crop the cache."""
        raise self._whole("crop")

    def reorder_cache(self, beam_idx: Any) -> None:
        """UnsupportedError: reorder the cache."""
        raise self._whole("reorder_cache")

    def offload(self) -> None:
        """UnsupportedError: the rows are on the Vulkan device already."""
        raise UnsupportedError(
            "offload: got a layer of a ZincCache, whose rows are on the Vulkan device and stay there"
        )

    prefetch = offload
