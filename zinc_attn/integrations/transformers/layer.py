"""One attention layer of a ZincCache, and the rows that it hands to the attention function."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any, ClassVar

from ...errors import ClosedError, ShapeError, UnsupportedError
from ...shapes import AttnShape
from .groups import AttentionOptions
from .masks import MaskPattern
from .tensors import F32, NAME, dense_tensor
from .upstream import CacheLayerMixin, torch

if TYPE_CHECKING:
    from .cache import ZincCache


class ZincRows(torch.Tensor):
    """The new rows of a layer, which ``ZincCache.update`` returns for attention "zinc" and nothing else.

    The tokens before them are on the Vulkan device, so any operation on the rows alone would be wrong and is refused. A
    model may move them to another torch device.
    """

    layer: ZincLayer
    serial: int  # of the update() that returned them

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", str(func))
        if name in ("__get__", "size", "dim", "__repr__", "to", "contiguous"):
            with torch._C.DisableTorchFunctionSubclass():
                found = func(*args, **(kwargs or {}))
            if name not in ("to", "contiguous"):
                return found
            if found.dtype == args[0].dtype:
                return _as_rows(found, args[0].layer, args[0].serial)
        raise UnsupportedError(
            f"ZincCache: {name} was called on the rows that update() returned, expected them to reach attention "
            f'{NAME!r} as they are; register(), and select it with model.set_attn_implementation("{NAME}")'
        )


def _as_rows(x: Any, layer: ZincLayer, serial: int) -> ZincRows:
    with torch._C.DisableTorchFunctionSubclass():
        rows: ZincRows = x.detach().as_subclass(ZincRows)
    rows.layer, rows.serial = layer, serial
    return rows


@dataclass(frozen=True, eq=False)
class AttendedCall:
    """One attention call of a layer of a ZincCache, as its observer sees it.

    query: (batch, q_heads, q_len, head_dim) as the model made it. new: k and v (batch, kv_heads, q_len, head_dim), None
    where the module attends the rows of an earlier call. out: (batch, q_len, q_heads, head_dim) float32, before it is
    rounded to query's dtype; an observer that keeps it copies it. seconds: the call's time on the host's clock.
    """

    layer: int
    query: Any
    new: tuple[Any, Any] | None
    options: AttentionOptions
    out: F32
    seconds: float


class ZincLayer(CacheLayerMixin):
    """One attention layer of a ZincCache.

    A Sequence spans all layers, so a layer alone cannot be cropped, reset or reordered: call the cache's methods.
    """

    is_compileable: ClassVar[bool] = False
    is_croppable: ClassVar[bool] = True

    def __init__(self, cache: ZincCache, index: int, shape: AttnShape, sliding: bool) -> None:
        super().__init__()
        self._cache = weakref.ref(cache)
        self.index, self.shape, self.is_sliding = index, shape, sliding
        self.columns = 0  # how many the layer has seen
        self.pending: tuple[Any, Any] | None = None  # rows that update() has taken and attend() has not yet appended
        self.serial = 0  # counts update() and crops, so that older rows are recognized

    @property
    def cache(self) -> ZincCache:
        """The cache that this is a layer of."""
        cache = self._cache()
        if cache is None:
            raise ClosedError(
                "ZincLayer: got a call after its ZincCache was deleted; keep the cache while the model runs"
            )
        return cache

    def forked_to(self, cache: ZincCache) -> ZincLayer:
        """Return the layer of a fork of the cache, which has seen the same columns."""
        made = ZincLayer(cache, self.index, self.shape, self.is_sliding)
        made.columns, made.is_initialized = self.columns, self.is_initialized
        return made

    def lazy_initialization(self, key_states: Any, value_states: Any) -> None:
        """Allocate the memory of the whole cache, for keys of this dtype."""
        self.cache.allocate(key_states.dtype)

    def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Take new rows (batch, kv_heads, n, head_dim); attention "zinc" appends them when it gets what this returns.

        ShapeError: they do not fit the config or the batch; StepError: a forward has stopped between the layers.
        """
        self.cache.check_rows(self, key_states, value_states)
        self.lazy_initialization(key_states, value_states)
        self.serial += 1
        self.pending = key_states, value_states
        return _as_rows(key_states, self, self.serial), _as_rows(value_states, self, self.serial)

    def check_shapes(self, key: Any, value: Any) -> None:
        """Refuse new rows that do not have the shape of the config."""
        shape, got = self.shape, tuple(dense_tensor("key", key).shape)
        dense_tensor("value", value)
        if key.ndim != 4 or got[1] != shape.kv_heads or got[3] != shape.head_dim or 0 in got:
            raise ShapeError(
                f"key of layer {self.index}: got shape {got}, expected (batch, {shape.kv_heads}, tokens, "
                f"{shape.head_dim}) as in the config"
            )
        if tuple(value.shape) != got:
            raise ShapeError(f"value of layer {self.index}: got shape {tuple(value.shape)}, expected key's {got}")

    def attend(self, query: Any, rows: ZincRows, pattern: MaskPattern, options: AttentionOptions) -> F32:
        """Append what is pending, attend the rows of ``query``, and tell the observer. See ``ZincCache.attend``."""
        cache, new, begin = self.cache, self.pending, perf_counter()
        out = cache.attend(self, query, rows, pattern, options)
        if cache.observer is not None:
            cache.observer(AttendedCall(self.index, query, new, options, out, perf_counter() - begin))
        return out

    def cut(self, columns: int) -> None:
        """Keep ``columns`` columns. Rows that update() returned before are refused from now on."""
        self.columns, self.pending = columns, None
        self.serial += 1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return (keys, offset) of the mask. It covers all columns, also where a window hides some."""
        return self.columns + query_length, 0

    def get_seq_length(self) -> int:
        """Return how many columns the layer has seen, padding included."""
        return self.columns

    def get_max_length(self) -> int:
        """Return the cache's capacity in tokens per batch row."""
        return self.cache.capacity

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
