"""A transformers cache whose attention layers live on a Vulkan device."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Final

import numpy as np

from ...cache.kv_cache import KVCache
from ...cache.pages import PagePool, StepError
from ...cache.sequence import Sequence
from ...decode.attention import Attention
from ...decode.one_shot import default_device
from ...errors import ArgumentError, ClosedError, DTypeError, ShapeError, UnsupportedError
from ...planning.splits import SplitPlan
from ...runtime.device import Device
from ...shapes import AttnShape, check_int, shown
from .groups import _Group, _Options
from .layer import ZincLayer, ZincRows
from .masks import Columns, _check_gaps, _check_window, _Pattern
from .tensors import _DTYPES, F32, _query, _row_numbers, _rows, _tensor
from .upstream import DYNAMIC_LAYER_TYPE_MAPPING, Cache, get_layer_types_and_kwargs, torch

_OURS: Final = ("full_attention", "sliding_attention")  # layer types that attend through this package
_THEIRS: Final = ("linear_attention", "conv", "dummy")  # layer types whose cache layers are transformers' own


class ZincCache(Cache):
    """A transformers cache whose attention layers live on a Vulkan device; for attn_implementation="zinc".

    config: the model's config; capacity: tokens per batch row; device: a Device, None for the best one, kept open;
    dtype: f32, f16, bf16 or q8_0, None for that of the model's keys (a narrower one rounds the rows); page_size:
    tokens; max_batch: batch rows, times beams; num_splits, split_size: a fixed layout, which no bit depends on.
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


def _recurrent(layer: Any) -> bool:
    """Whether a layer of transformers' own has a state that cannot go back."""
    return any(getattr(layer, "is_recurrent_states_initialized", {}).values())
