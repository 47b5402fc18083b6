"""zinc_attn in Hugging Face transformers: ``register()``, then ``attn_implementation="zinc"`` and a ``ZincCache``.

The cache's layers live on the Vulkan device. ``ZincCache.update`` hands the model's attention module the new rows
only, as ``ZincRows`` that no other code can compute with; the attention function appends them and attends, in one
submission per layer. Every batch row is a Sequence of its own: padding columns are dropped, so left-padded batches
work, and beam search forks sequences. Linear-attention layers keep transformers' own cache layers.

Without a ZincCache the attention function attends the keys and values that it is given.
Source of the interface: transformers' AttentionInterface, AttentionMaskInterface and CacheLayerMixin.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from time import perf_counter
from types import FunctionType, TracebackType
from typing import Any, ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from ..cache.kv_cache import KVCache
from ..cache.pages import PagePool, StepError
from ..cache.sequence import Sequence
from ..checks import check_bool, check_float, check_int, shown
from ..decode.attention import Attention
from ..decode.one_shot import attention, default_device
from ..decode.scoring import check_scale, check_softcap, check_window
from ..errors import (
    ArgumentError,
    ClosedError,
    DTypeError,
    RuntimeUnavailableError,
    ShapeError,
    UnsupportedError,
    ValueRangeError,
)
from ..limits import MAX_CONTEXT
from ..planning.splits import SplitPlan
from ..runtime.device import Device
from ..shapes import AttnShape

try:
    import torch
    from transformers import AttentionInterface, AttentionMaskInterface, Cache, GenerationMixin, PreTrainedModel
    from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING, CacheLayerMixin, get_layer_types_and_kwargs
    from transformers.masking_utils import (
        causal_mask_function,
        sdpa_mask,
        sliding_window_causal_mask_function,
        sliding_window_overlay,
    )
except ImportError as error:
    raise RuntimeUnavailableError(
        f"zinc_attn.integrations.transformers: {error}; expected torch and a tested transformers: "
        "pip install torch 'zinc-attn[transformers]'"
    ) from error

NAME: Final = "zinc"
F32 = NDArray[np.float32]
Columns = NDArray[np.bool_]

_DTYPES: Final = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
_OURS: Final = ("full_attention", "sliding_attention")  # layer types that attend through this package
_THEIRS: Final = ("linear_attention", "conv", "dummy")  # layer types whose cache layers are transformers' own
# What models hand to every attention function and which says nothing about the attention.
_HARMLESS: Final = frozenset(
    {
        "cache_position",
        "inputs_embeds",
        "labels",
        "logits_to_keep",
        "num_items_in_batch",
        "output_hidden_states",
        "output_router_logits",
        "position_ids",
        "return_dict",
        "use_cache",
    }
)
_ROWS_BLOCK: Final = 256  # query rows of an unknown mask pattern that are looked at together


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


# --- masks -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Pattern:
    """What a mask says. kept: (batch, keys), None without padding; window: keys a row sees at most, None for all."""

    kept: Columns | None
    window: int | None
    known: bool = True  # False: ``window`` was not in the mask


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: Any = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Any = None,
    use_vmap: bool = False,
    device: Any = "cpu",
    **_: Any,
) -> Any:
    """The mask function of "zinc": a bool tensor (batch, keys), False at padding, that knows the layer's window.

    Arguments as transformers' AttentionMaskInterface passes them. UnsupportedError for a pattern other than causal
    or a causal sliding window; ShapeError for a 2-D mask that does not cover all keys.
    """
    batch_size = check_int("batch_size", batch_size, 0, MAX_CONTEXT)
    q_length = check_int("q_length", q_length, 0, MAX_CONTEXT)
    kv_length = check_int("kv_length", kv_length, 0, MAX_CONTEXT)
    q_begin = check_int("q_offset", q_offset, 0, MAX_CONTEXT)
    kv_begin = check_int("kv_offset", kv_offset, 0, MAX_CONTEXT)
    if not isinstance(mask_function, FunctionType):
        raise ArgumentError(f"mask_function: got {shown(mask_function)}, expected a mask function of transformers")
    use_vmap = check_bool("use_vmap", use_vmap)
    if q_begin + q_length != kv_begin + kv_length:
        raise UnsupportedError(
            f"attention_mask: got keys up to position {kv_begin + kv_length} for queries up to {q_begin + q_length}, "
            "expected the last key to be the last query's; use a ZincCache or a DynamicCache, not a static one"
        )
    window = _window(mask_function, q_length, kv_length, q_begin, kv_begin, use_vmap)
    kept = None
    if attention_mask is not None:
        shape = tuple(_tensor("attention_mask", attention_mask).shape)
        if shape != (batch_size, kv_begin + kv_length):
            raise ShapeError(
                f"attention_mask: got shape {shape}, expected ({batch_size}, "
                f"{kv_begin + kv_length}): a column for every token so far, padding included"
            )
        kept = _columns(attention_mask[:, kv_begin:])
    try:
        one = torch.ones((1, 1), dtype=torch.bool, device=device)
    except (RuntimeError, TypeError, ValueError, AssertionError) as error:  # torch's, of what is no device here
        raise ArgumentError(f"device: got {shown(device)}, expected a torch device: {error}") from error
    mask = one.expand(batch_size, kv_length) if kept is None else torch.from_numpy(kept).to(device)
    mask.zinc = _Pattern(kept, window)
    return mask


def _columns(mask: Any) -> Columns | None:
    """A 2-D mask as an array, None where nothing is masked. ValueRangeError for anything but 0 and 1."""
    other = torch.nonzero((mask != 0) & (mask != 1))  # NaN is neither
    if len(other):
        row, column = other[0].tolist()
        raise ValueRangeError(
            f"attention_mask[{row}, {column}]: got {mask[row, column].item()}, expected 0 for padding or 1 for a token"
        )
    kept: Columns = mask.to("cpu", torch.bool).numpy()
    return None if kept.all() else kept.copy()  # the caller's mask may change later


def _window(
    pattern: Callable[..., Any], q_length: int, kv_length: int, q_begin: int, kv_begin: int, use_vmap: bool
) -> int | None:
    """The window of a causal pattern, None where rows see all keys before them. UnsupportedError for any other."""
    if pattern is causal_mask_function:
        return None
    cells = [cell.cell_contents for cell in getattr(pattern, "__closure__", None) or ()]
    if getattr(pattern, "__code__", None) is sliding_window_causal_mask_function(1).__code__ and len(cells) == 1:
        parts = cells[0]  # and_masks' tuple: sliding_window_overlay, causal
        if len(parts) == 2 and parts[1] is causal_mask_function:
            overlay = parts[0]
            if getattr(overlay, "__code__", None) is sliding_window_overlay(1).__code__:
                return int(overlay.__closure__[0].cell_contents)
    # a pattern without a name: look at it
    window = None
    keys = kv_begin + np.arange(kv_length)
    edges = [*range(0, q_length, _ROWS_BLOCK), q_length]
    for begin, end in reversed(list(pairwise(edges))):
        got = sdpa_mask(
            1,
            end - begin,
            kv_length,
            q_begin + begin,
            kv_begin,
            pattern,
            allow_is_causal_skip=False,
            use_vmap=use_vmap,
        )[0, 0].numpy()
        if end == q_length:
            first = int(np.argmax(got[-1]))
            window = kv_length - first if first else None
        rows = q_begin + np.arange(begin, end)[:, None]
        want = (keys <= rows) & (keys > rows - (window or kv_begin + kv_length + 1))
        if not np.array_equal(got, want):
            raise UnsupportedError(
                "attention_mask: got a pattern that is neither causal nor a causal sliding window (bidirectional, "
                'chunked, packed or blockwise), expected one of the two; use attn_implementation="sdpa" for this model '
                "or input"
            )
    return window


def _tensor(name: str, x: Any) -> Any:
    """``x`` if it is a dense torch tensor of numbers, or ArgumentError naming ``name``."""
    if not isinstance(x, torch.Tensor) or x.layout != torch.strided or x.dtype.is_complex or x.is_quantized:
        given = f"a tensor of {x.dtype} and {x.layout}" if isinstance(x, torch.Tensor) else shown(x)
        raise ArgumentError(f"{name}: got {given}, expected a dense torch tensor of real numbers")
    return x


def _pattern(mask: Any) -> _Pattern:
    """What the attention function was given as its mask."""
    if mask is None:
        return _Pattern(None, None, known=False)
    found = getattr(mask, "zinc", None)
    if isinstance(found, _Pattern):
        return found
    shape = tuple(_tensor("attention_mask", mask).shape)
    if len(shape) != 2:
        raise UnsupportedError(
            f"attention_mask: got shape {shape}, expected a 2-D mask (batch, tokens) or none; a 4-D mask's pattern "
            'is not known, use attn_implementation="sdpa" with it'
        )
    return _Pattern(_columns(mask), None, known=False)


# --- the attention function --------------------------------------------------------------------------------


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


def attention_forward(
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Any = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Any, None]:
    """The attention function of "zinc": causal attention of new rows, from a ZincCache or over the whole key, value.

    query: (batch, q_heads, q_len, head_dim), key, value: (batch, kv_heads, tokens, head_dim), float32, float16 or
    bfloat16; attention_mask: None, or 2-D (batch, tokens). sliding_window: keys at most, the row's own included;
    softcap: of the scores; s_aux: attention sinks, raw logits (q_heads,). Returns (batch, q_len, q_heads, head_dim) of
    query's dtype, and None for the weights. Rows at padding columns are 0.
    UnsupportedError names what a model asks for and this function does not do; ShapeError, DTypeError and the
    package's other errors as ``zinc_attn.attention``.
    """
    _refuse(module, query, key, value, dropout, is_causal, kwargs)
    if isinstance(scaling, torch.Tensor) and scaling.ndim == 0:
        scaling = scaling.item()
    sinks = None
    if s_aux is not None:
        sinks = _tensor("s_aux", s_aux).detach().to("cpu", torch.float32).reshape(-1).numpy().copy()
    options = _Options(
        check_scale(scaling, query.shape[-1]), check_window(sliding_window), check_softcap(softcap), sinks
    )
    pattern = _pattern(attention_mask)
    if isinstance(key, ZincRows):
        out = key.layer.attend(query, key, pattern, options)
    else:
        out = _attend_all(query, key, value, pattern, options)
    return torch.from_numpy(out).to(query.device, query.dtype), None


def _refuse(
    module: Any, query: Any, key: Any, value: Any, dropout: float, is_causal: bool | None, kwargs: dict[str, Any]
) -> None:
    """Refuse, by name, what the model asks for and nobody here would do."""
    where = type(module).__name__
    for name, x in (("query", query), ("key", key), ("value", value)):
        if _tensor(name, x).ndim != 4 or 0 in x.shape:
            raise ShapeError(f"{name}: got shape {tuple(x.shape)}, expected (batch, heads, tokens, head_dim)")
    if key.shape[0] != query.shape[0]:
        raise ShapeError(f"key: got a batch of {key.shape[0]}, expected query's {query.shape[0]}")
    dropout = check_float("dropout", dropout)
    if is_causal is not None:
        is_causal = check_bool("is_causal", is_causal)
    if dropout:
        raise UnsupportedError(f"{where}: got dropout = {dropout:g}, expected 0; call model.eval()")
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        raise UnsupportedError(
            f"{where}: got is_causal = False, expected causal attention; give that part of the model another "
            "attn_implementation, for example {'text_config': 'zinc', 'vision_config': 'sdpa'}"
        )
    for name, given in kwargs.items():
        if name not in _HARMLESS and given is not None and given is not False:
            raise UnsupportedError(
                f"{where}: got {name}, which attention {NAME!r} does not do; expected none of it, or use "
                'attn_implementation="eager"'
            )
    if torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value)):
        raise UnsupportedError(f"{where}: got tensors that require a gradient, expected none; use torch.no_grad()")
    if key.shape != value.shape:
        raise UnsupportedError(
            f"{where}: got key of shape {tuple(key.shape)} and value of shape {tuple(value.shape)}, expected equal "
            'shapes; use attn_implementation="sdpa" for this model'
        )
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.dtype not in _DTYPES:
            raise DTypeError(f"{name}: got dtype {x.dtype}, expected float32, float16 or bfloat16")


def _rows(x: Any, dtype: str) -> NDArray[Any]:
    """(batch, heads, n, head_dim) as an array (batch, n, heads, head_dim) that a cache of ``dtype`` takes.

    bf16: float32 values that bfloat16 holds. A tensor of a wider type is rounded to nearest even.
    """
    x = x.detach().to("cpu")
    if dtype == "f16" or (dtype == "q8_0" and x.dtype == torch.float16):
        x = x.to(torch.float16)
    else:
        x = (x.to(torch.bfloat16) if dtype == "bf16" else x).to(torch.float32)
    array: NDArray[Any] = x.transpose(1, 2).contiguous().numpy()
    return array


def _query(x: Any) -> NDArray[Any]:
    return _rows(x, "f16" if x.dtype == torch.float16 else "f32")


def _check_window(pattern: _Pattern, window: int | None, keys: int) -> None:
    """Refuse a window that the mask has and the attention was not told of, or the other way round."""
    if pattern.known and min(pattern.window or keys, keys) != min(window or keys, keys):
        raise UnsupportedError(
            f"sliding_window: got {window} for a layer whose mask has a window of {pattern.window}, expected the same "
            'in both; use attn_implementation="sdpa" for this model'
        )


def _check_gaps(kept: Columns, window: int | None) -> None:
    """Refuse padding between a row's tokens where a window counts columns."""
    if window is None:
        return
    for i, row in enumerate(kept):
        tokens = np.flatnonzero(row)
        if tokens.size and tokens[-1] - tokens[0] + 1 != tokens.size:
            raise UnsupportedError(
                f"attention_mask: row {i} has padding between its tokens, and the layer a window of {window}; expected "
                'padding in front of the tokens; use padding_side="left"'
            )


def _attend_all(query: Any, key: Any, value: Any, pattern: _Pattern, options: _Options) -> F32:
    """Attend whole keys and values, uploaded for this call: (batch, q_len, q_heads, head_dim)."""
    dtype = "f16" if key.dtype == torch.float16 else "f32"
    q, k, v = _query(query), _rows(key, dtype), _rows(value, dtype)
    batch, keys, q_len = len(k), k.shape[1], q.shape[1]
    _check_window(pattern, options.window, keys)
    if pattern.kept is None:
        if q_len > keys:
            raise ShapeError(f"key: got {keys} tokens for {q_len} query rows, expected at least as many")
        arguments = options.arguments()
        return np.stack([attention(q[i], k[i], v[i], scale=options.scale, **arguments) for i in range(batch)])
    kept = pattern.kept
    if kept.shape != (batch, keys):
        raise ShapeError(f"attention_mask: got shape {kept.shape}, expected ({batch}, {keys})")
    _check_gaps(kept, options.window)
    out = np.zeros(q.shape, np.float32)
    for i, columns in enumerate(kept):
        mine = columns[keys - q_len :]
        if mine.any():
            out[i, mine] = attention(
                q[i, mine], k[i, columns], v[i, columns], scale=options.scale, **options.arguments()
            )
    return out


# --- the cache ---------------------------------------------------------------------------------------------


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
    options: _Options
    out: F32
    seconds: float


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
        cache, new, begin = self.cache, self.pending, perf_counter()
        out = cache.attend(self, query, rows, pattern, options)
        if cache.observer is not None:
            cache.observer(AttendedCall(self.index, query, new, options, out, perf_counter() - begin))
        return out

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


class ZincCache(Cache):
    """A transformers cache whose attention layers live on a Vulkan device; for attn_implementation="zinc".

    config: the model's config; capacity: tokens per batch row; device: a Device, None for the best one, kept open;
    dtype: f32, f16, bf16 or q8_0, None for that of the model's keys (a narrower one rounds the rows); page_size:
    tokens; max_batch: batch rows, times beams; num_splits, split_size: a fixed layout, which no bit depends on.
    observer: called after each attention call of a layer; it may be set at any time, and forks begin with it.
    Memory is taken by the first forward. Pass it as ``generate(past_key_values=...)``, also of the next turn.
    UnsupportedError: a layer type that neither this nor transformers' linear-attention layers serve; ArgumentError:
    a head_dim or another argument that is not supported.
    """

    def __init__(
        self,
        config: Any,
        capacity: int,
        *,
        device: Device | None = None,
        dtype: str | None = None,
        page_size: int = 256,
        max_batch: int = 1,
        num_splits: int | None = None,
        split_size: int | None = None,
    ) -> None:
        if device is not None and not isinstance(device, Device):
            raise ArgumentError(f"device: got {type(device).__name__}, expected a Device; see Device.open()")
        if not hasattr(config, "get_text_config"):
            raise ArgumentError(f"config: got {type(config).__name__}, expected a transformers config: model.config")
        self.capacity, self.max_batch = check_int("capacity", capacity, 1), check_int("max_batch", max_batch, 1)
        self.device, self.dtype, self.page_size = device, dtype, page_size
        layout = {"num_splits": num_splits, "split_size": split_size}
        self._layout = {name: value for name, value in layout.items() if value is not None}
        self.observer: Callable[[AttendedCall], None] | None = None
        PagePool(1, page_size)  # refuses what is no page size
        text = config.get_text_config(decoder=True)
        kinds, arguments = get_layer_types_and_kwargs(text)
        self._groups: dict[AttnShape, _Group] = {}
        layers: list[Any] = []
        # layers at the end that share the keys and values of others have no cache layer in some releases
        per_layer = text.per_layer_config[: len(kinds)]
        for i, (kind, given, layer) in enumerate(zip(kinds, arguments, per_layer, strict=True)):
            if kind in _OURS:
                shape = _shape(layer)
                shape.kv_bytes_per_token("f32" if dtype is None else dtype)  # refuses a dtype
                if self._layout:
                    SplitPlan.fixed(0, shape, num_splits=num_splits, split_size=split_size)
                self._groups.setdefault(shape, _Group(shape, [])).layers.append(i)
                layers.append(ZincLayer(self, i, shape, kind == "sliding_attention"))
            elif kind in _THEIRS:
                layers.append(DYNAMIC_LAYER_TYPE_MAPPING[kind](**given))
            else:
                raise UnsupportedError(
                    f"config: layer {i} is of type {kind!r}, expected one of {', '.join((*_OURS, *_THEIRS))}"
                )
        super().__init__(layers=layers)
        self._ours: list[ZincLayer] = [one for one in layers if isinstance(one, ZincLayer)]
        self._theirs = [one for one in layers if not isinstance(one, ZincLayer)]
        if not self._ours:
            raise UnsupportedError("config: got no attention layer, expected at least one")
        self._sequences: dict[AttnShape, list[Sequence]] = {}  # one per batch row
        self._kept: Columns | None = None  # (batch, columns), None while nothing was padding
        self._columns = 0  # of the layer that is furthest
        self._closed = False
        self._steps = 0  # that are under way, one within the other
        self._origin: list[int] | None = None  # the row that each row was when the step began; None: itself
        self._broken = ""  # why no forward is possible before reset()

    # --- memory -------------------------------------------------------------------------------------------

    @property
    def caches(self) -> list[KVCache]:
        """The KVCaches, one per layer shape; none before the first forward."""
        return [group.cache for group in self._groups.values() if group.cache is not None]

    @property
    def sequences(self) -> list[list[Sequence]]:
        """The sequences of each KVCache, one per batch row."""
        return list(self._sequences.values())

    @property
    def batch_size(self) -> int:
        """Batch rows, -1 before the first forward."""
        return len(next(iter(self._sequences.values()))) if self._sequences else -1

    def allocate(self, dtype: Any) -> None:
        """Take the device memory for keys of a torch dtype, in the first forward. DeviceMemoryError, LimitError."""
        self._check_open()
        if not isinstance(dtype, torch.dtype) or dtype not in _DTYPES:
            raise DTypeError(f"key: got dtype {shown(dtype)}, expected float32, float16 or bfloat16")
        if all(layer.is_initialized for layer in self._ours):
            return
        device = default_device() if self.device is None else self.device
        pages = -(-self.capacity // self.page_size) * self.max_batch
        pages += self.max_batch if self.max_batch > 1 else 0  # what beams that share a page copy
        for group in self._groups.values():
            if group.cache is None:
                tokens = pages * self.page_size
                layers = len(group.layers)
                group.cache = KVCache(device, group.shape, layers, tokens, self.dtype or _DTYPES[dtype], self.page_size)
        for layer in self._ours:
            layer.is_initialized = True

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("ZincCache: used after close()")

    def append(self, rows: Callable[[ZincLayer], tuple[Any, Any]], dtype: Any) -> None:
        """Append tokens to the attention layers without a forward; for a cache of at most one batch row.

        rows: from a layer to k, v (tokens, kv_heads, head_dim) as KVCache.append takes them, as many for every layer;
        dtype: the model's torch dtype, as ``allocate`` takes it. Linear-attention layers keep the state they have.
        ArgumentError: more batch rows, or padding among the tokens; errors of KVCache.append: crop(0) drops what went
        before.
        """
        if not callable(rows):
            raise ArgumentError(f"rows: got {shown(rows)}, expected a function of a layer that returns its k, v")
        self.allocate(dtype)
        if self.batch_size > 1 or self._kept is not None:
            raise ArgumentError(
                f"append: got a cache of {self.batch_size} batch rows or with padding, expected one row without padding"
            )
        for group in self._groups.values():
            assert group.cache is not None
            if group.shape not in self._sequences:
                self._sequences[group.shape] = [group.cache.new_sequence()]
        for layer in self._ours:
            group = self._groups[layer.shape]
            assert group.cache is not None
            k, v = rows(layer)
            group.cache.append(self._sequences[layer.shape][0], group.layers.index(layer.index), k, v)
            layer.columns += len(k)
        self._columns = max(layer.columns for layer in self._ours)

    def set_layout(self, num_splits: int | None = None, split_size: int | None = None) -> None:
        """Attend by another split layout from the next call on, in this cache and its forks; none: the split rule."""
        layout = {"num_splits": num_splits, "split_size": split_size}
        if num_splits is not None or split_size is not None:
            SplitPlan.fixed(0, self._ours[0].shape, num_splits=num_splits, split_size=split_size)
        self._layout.clear()
        self._layout.update({name: value for name, value in layout.items() if value is not None})
        for group in self._groups.values():
            for calls in group.calls.values():
                calls.attention.close()
            group.calls.clear()

    def close(self) -> None:
        """Free the device memory, also that of forks."""
        self._closed = True
        for group in self._groups.values():
            group.calls.clear()
            if group.cache is not None:
                group.cache.close()
        self._sequences.clear()

    def __enter__(self) -> ZincCache:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    # --- a step -------------------------------------------------------------------------------------------

    @contextmanager
    def step(self) -> Iterator[None]:
        """What the block adds to the cache counts if the block ends; where it raises, the tokens are as before it.

        ``register`` makes a step of every call of a model, ``model(...)`` or ``generate(...)``, with this cache as
        past_key_values, so that one that failed anywhere, or was interrupted, can be made again. Use it yourself around
        ``model.forward(...)``, or around a whole turn. Steps within a step are part of it. Where a failed step cropped
        tokens from before it, or reordered their batch rows, they are lost: StepError from then on, until reset().
        """
        if self._steps:
            yield
            return
        before = self._begin()
        self._steps = 1
        try:
            yield
        except BaseException:
            try:
                self._undo(before)
            except BaseException:  # an interrupt: each part of it can be done again
                self._undo(before)
                raise
            raise
        finally:
            self._steps, self._origin = 0, None

    def _begin(self) -> tuple[int, int, list[Any]]:
        """What ``_undo`` needs: columns, batch rows, and copies of the layers of transformers' own."""
        self._check_open()
        self._origin = None
        columns = min(layer.columns for layer in self._ours)
        return columns, self.batch_size, [copy.deepcopy(vars(layer)) for layer in self._theirs]

    def _undo(self, before: tuple[int, int, list[Any]]) -> None:
        """The cache as it was at ``_begin``."""
        columns, rows, theirs = before
        if self._closed:
            return
        moved = self.batch_size != rows or self._origin not in (None, list(range(rows)))
        if (columns and moved) or min(layer.columns for layer in self._ours) < columns:
            self._broken = (
                f"ZincCache: a call failed that had cropped or reordered the {columns} tokens from before it, which "
                "cannot be put back; reset() the cache, or use a fork() that was made before"
            )
            return
        for layer, was in zip(self._theirs, theirs, strict=True):
            vars(layer).clear()
            vars(layer).update(was)
        if rows < 0:
            self._free()
        self._cut(columns)

    def check_rows(self, layer: ZincLayer, key: Any, value: Any) -> None:
        """Refuse rows that do not fit ``layer`` or the batch, or a layer that is ahead of others."""
        self._check_open()
        if self._broken:
            raise StepError(self._broken)
        shape, got = layer.shape, tuple(_tensor("key", key).shape)
        _tensor("value", value)
        if key.ndim != 4 or got[1] != shape.kv_heads or got[3] != shape.head_dim or 0 in got:
            raise ShapeError(
                f"key of layer {layer.index}: got shape {got}, expected (batch, {shape.kv_heads}, tokens, "
                f"{shape.head_dim}) as in the config"
            )
        if tuple(value.shape) != got:
            raise ShapeError(f"value of layer {layer.index}: got shape {tuple(value.shape)}, expected key's {got}")
        if got[0] > self.max_batch:
            raise ArgumentError(
                f"batch: got {got[0]} rows (times beams), expected at most max_batch = {self.max_batch}; make the "
                "ZincCache with a larger max_batch"
            )
        if self._columns and self.batch_size != got[0]:
            raise ShapeError(
                f"batch: got {got[0]} rows, expected the {self.batch_size} that the cache holds; reset() it first"
            )
        if layer.columns < self._columns:
            return
        behind = min(self._ours, key=lambda one: one.columns)
        if layer.columns > behind.columns:
            raise StepError(
                f"layer {layer.index}: got rows at {layer.columns} tokens while layer {behind.index} has "
                f"{behind.columns}: a forward stopped between layers; crop(0) drops its rows, reset() all of them"
            )

    def attend(self, layer: ZincLayer, query: Any, rows: ZincRows, pattern: _Pattern, options: _Options) -> F32:
        """See ``ZincLayer.attend``. A failed call leaves this layer as it was."""
        shape, (batch, heads, n, head_dim) = layer.shape, query.shape
        if (heads, head_dim) != (shape.q_heads, shape.head_dim) or (batch, n) != (rows.shape[0], rows.shape[2]):
            raise ShapeError(
                f"query of layer {layer.index}: got shape {tuple(query.shape)}, expected ({rows.shape[0]}, "
                f"{shape.q_heads}, {rows.shape[2]}, {shape.head_dim})"
            )
        if rows.serial != layer.serial:
            raise StepError(
                f"layer {layer.index}: got rows of an earlier update(), expected those of the last, uncropped"
            )
        new = layer.pending  # None: another module attends the rows of a layer that has appended them
        begin = layer.columns - (n if new is None else 0)
        kept = self._step(pattern, batch, begin, n)
        _check_window(pattern, options.window, begin + n)
        if kept is not None:
            _check_gaps(kept, options.window)
        attend, slot = self._groups[shape].attention(layer.index, options, self._layout)
        out = self._call(attend, slot, query, new, None if kept is None else kept[:, begin:])
        layer.pending = None
        if new is not None:
            layer.columns += n
            if layer.columns > self._columns:
                self._columns, self._kept = layer.columns, kept
        return out

    def _step(self, pattern: _Pattern, batch: int, begin: int, n: int) -> Columns | None:
        """Which of the columns up to ``begin + n`` are tokens, (batch, columns); None: all.

        What an earlier call said about a column stands: its rows were stored, or dropped.
        """
        end, kept = begin + n, pattern.kept
        if kept is not None and kept.shape != (batch, end):
            raise ShapeError(f"attention_mask: got shape {kept.shape}, expected ({batch}, {end})")
        if kept is self._kept:
            return kept
        full = np.ones((batch, end), np.bool_) if kept is None else kept
        known = np.ones((batch, self._columns), np.bool_) if self._kept is None else self._kept
        both = min(end, self._columns)
        if not np.array_equal(full[:, :both], known[:, :both]):
            raise UnsupportedError(
                "attention_mask: got another padding for tokens that the cache has seen already, expected the same "
                "columns as before; pass the whole 2-D mask with every forward, or reset() the cache"
            )
        return kept

    def _call(self, attend: Attention, slot: int, query: Any, new: Any, kept: Columns | None) -> F32:
        """Append and attend, one submission for the batch. kept: (batch, q_len), None for all."""
        q, cache = _query(query), attend.cache
        k, v = (None, None) if new is None else (_rows(x, cache.dtype) for x in new)
        shape = cache.shape
        if not self._columns and self.batch_size != len(q):
            for group in self._groups.values():
                assert group.cache is not None
                self._sequences[group.shape] = [group.cache.new_sequence() for _ in range(len(q))]
        sequences = self._sequences[shape]
        if len(q) == 1 and kept is None:
            rows = (None, None) if k is None or v is None else (k[0], v[0])
            out: F32 = attend(q[0], sequences[0], slot, *rows)
            return out[None]
        found = np.zeros(q.shape, np.float32)
        mine = np.ones(q.shape[:2], np.bool_) if kept is None else kept
        live = [i for i, columns in enumerate(mine) if columns.any()]
        ks, vs = (None if x is None else [x[i][mine[i]] for i in live] for x in (k, v))
        outs = attend([q[i][mine[i]] for i in live], [sequences[i] for i in live], slot, ks, vs)
        for i, one in zip(live, outs, strict=True):
            found[i, mine[i]] = one
        return found

    # --- between steps ------------------------------------------------------------------------------------

    @property
    def is_initialized(self) -> bool:
        """Whether the device memory is there."""
        return all(layer.is_initialized for layer in self._ours)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-tokens_to_remove`` tokens of every row; 0 drops a forward that stopped between layers.

        ArgumentError: a positive number, or more tokens than there are; UnsupportedError: linear-attention layers,
        whose recurrent state cannot go back. Either way nothing has changed.
        """
        count = -check_int("tokens_to_remove", tokens_to_remove, -self._columns, 0)
        target = min(layer.columns for layer in self._ours) - count
        if target < 0:
            raise ArgumentError(f"tokens_to_remove: got {-count}, expected at least {-count - target}")
        if target < self._columns and any(_recurrent(layer) for layer in self._theirs):
            raise UnsupportedError(
                f"crop: got {self._columns} tokens to be cut to {target} in a model with linear-attention layers, "
                "whose recurrent state keeps no past; expected no cut; use reset() and run the prompt again, or "
                "fork() before the tokens"
            )
        for layer in self._theirs:
            if count or getattr(layer, "record_past", False):
                layer.crop(-count)
        self._cut(target)

    def _cut(self, target: int) -> None:
        """Keep ``target`` columns."""
        for sequences in self._sequences.values():
            for i, sequence in enumerate(sequences):
                sequence.truncate(target if self._kept is None else int(self._kept[i, :target].sum()))
        if self._kept is not None:
            kept = self._kept[:, :target]
            self._kept = None if kept.all() else kept
        self._columns = target
        for layer in self._ours:
            layer.columns, layer.pending = target, None
            layer.serial += 1  # rows that update() returned before are not attended any more

    def reset(self) -> None:
        """Forget all tokens; the memory stays."""
        for layer in self._theirs:
            layer.reset()
        self._free()
        self._cut(0)
        self._broken = ""

    def _free(self) -> None:
        for sequences in self._sequences.values():
            for sequence in sequences:
                sequence.free()
        self._sequences.clear()

    def reorder_cache(self, beam_idx: Any) -> None:
        """Row i becomes what row beam_idx[i] was, for beam search; rows that come from one share its pages.

        ArgumentError: more rows than max_batch, or no such row.
        """
        self._select("beam_idx", _row_numbers("beam_idx", beam_idx))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row ``repeats`` times. ArgumentError: more rows than max_batch."""
        repeats = check_int("repeats", repeats, 1, self.max_batch)
        self._select("repeats", [i for i in range(max(self.batch_size, 0)) for _ in range(repeats)])

    def batch_select_indices(self, indices: Any) -> None:
        """Keep the rows ``indices``, in this order."""
        self._select("indices", _row_numbers("indices", indices))

    def _select(self, name: str, rows: list[int]) -> None:
        if not self._sequences or rows == list(range(self.batch_size)):
            return
        for i in rows:
            check_int(name, i, 0, self.batch_size - 1)
        if not 1 <= len(rows) <= self.max_batch:
            raise ArgumentError(f"batch: got {len(rows)} rows, expected 1 to max_batch = {self.max_batch}")
        chosen = {}
        for shape, sequences in self._sequences.items():
            chosen[shape] = [sequences[row].fork() if row in rows[:i] else sequences[row] for i, row in enumerate(rows)]
        for shape, sequences in self._sequences.items():
            for i, sequence in enumerate(sequences):
                if i not in rows:
                    sequence.free()
            self._sequences[shape] = chosen[shape]
        self._origin = [row if self._origin is None else self._origin[row] for row in rows]
        if self._kept is not None:
            self._kept = self._kept[rows]
        for layer in self._theirs:
            layer.reorder_cache(torch.tensor(rows))

    def fork(self) -> ZincCache:
        """A second cache with the same tokens, for another continuation of the same prompt.

        Full pages are shared, linear-attention states copied. It takes its pages from this cache's memory:
        CapacityError where both together have more tokens than max_batch rows hold.
        """
        twin = copy.copy(self)
        twin._steps, twin._origin = 0, None
        twin.layers = []
        for layer in self.layers:
            if isinstance(layer, ZincLayer):
                made = ZincLayer(twin, layer.index, layer.shape, layer.is_sliding)
                made.columns, made.is_initialized = layer.columns, layer.is_initialized
                twin.layers.append(made)
            else:
                twin.layers.append(copy.deepcopy(layer))
        twin._ours = [one for one in twin.layers if isinstance(one, ZincLayer)]
        twin._theirs = [one for one in twin.layers if not isinstance(one, ZincLayer)]
        twin._sequences = {shape: [one.fork() for one in rows] for shape, rows in self._sequences.items()}
        return twin

    def __deepcopy__(self, memo: dict[int, Any]) -> ZincCache:
        return self.fork()


def _shape(config: Any) -> AttnShape:
    """The shape of a layer with this config."""
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return AttnShape(heads, getattr(config, "num_key_value_heads", None) or heads, head_dim)


def _row_numbers(name: str, numbers: Any) -> list[int]:
    """Numbers of batch rows, from a list, an array or a tensor of one axis."""
    if not isinstance(numbers, (list, tuple, range, np.ndarray, torch.Tensor)) or getattr(numbers, "ndim", 1) != 1:
        raise ArgumentError(f"{name}: got {shown(numbers)}, expected a list or a tensor of batch row numbers")
    return [check_int(name, i, 0) for i in numbers]


def _recurrent(layer: Any) -> bool:
    """Whether a layer of transformers' own has a state that cannot go back."""
    return any(getattr(layer, "is_recurrent_states_initialized", {}).values())
