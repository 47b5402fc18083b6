"""``ZincCache``: a transformers cache whose attention layers live on a Vulkan device."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from ...cache.kv_cache import KVCache
from ...cache.pages import PagePool, StepError
from ...cache.sequence import Sequence
from ...canonical.state import F32
from ...checks import check_bool, check_int, described, shown
from ...decode.arithmetic import arithmetic_name
from ...decode.one_shot import default_device
from ...dtypes import storage_dtype
from ...errors import ArgumentError, ClosedError, DTypeError, UnsupportedError
from ...planning.arithmetic import Arithmetic
from ...runtime.device import Device
from .batch import BatchRows, append_and_attend
from .config import LayerSpec, layer_specs
from .groups import AttentionOptions, LayerGroups
from .layer import HybridLayer, ZincLayer
from .masks import Columns, MaskPattern, check_window
from .room import BatchRoom
from .rows import ZincRows
from .step import Step, cut
from .tensors import ADAPTED, DTYPES, NAME, batch_row_numbers
from .upstream import Cache, torch


class ZincCache(Cache):
    """A transformers cache whose attention layers live on a Vulkan device; for attn_implementation="zinc".

    config: the model's config; max_cache_len: tokens that a batch row holds at most, else CapacityError (capacity, its
    earlier name, is still taken; a KVCache's capacity counts the tokens of all sequences together); device: a Device,
    None for the best one, kept open; dtype: as ``KVCache`` takes it, or the dtype of torch; None: the dtype of the
    model's keys (a narrower dtype rounds the rows); page_size: in tokens; max_batch: batch rows, times beams;
    num_splits, split_size: a fixed split layout, on which no output bit depends. latent: multi-head latent attention
    attends its compressed rows, which are cached in place of every head's K and V. arithmetic: see ``Attention``; the
    first forward refuses an arithmetic that the device does not have.
    The first forward takes the memory. Pass the cache as ``generate(cache=...)``, also in the next turn.
    UnsupportedError: a layer type that is served neither here nor by transformers' linear-attention layers;
    ArgumentError: a head_dim beyond 576 or another argument.
    """

    def __init__(  # noqa: PLR0913 - all but two by name
        self,
        config: Any,
        max_cache_len: int | None = None,
        *,
        device: Device | None = None,
        dtype: object = None,
        page_size: int = 256,
        max_batch: int = 1,
        num_splits: int | None = None,
        split_size: int | None = None,
        latent: bool = False,
        arithmetic: Arithmetic = "canonical",
        capacity: int | None = None,
    ) -> None:
        if device is not None and not isinstance(device, Device):
            raise ArgumentError(f"device: got {type(device).__name__}, expected a Device; see Device.open()")
        if not hasattr(config, "get_text_config"):
            raise ArgumentError(f"config: got {type(config).__name__}, expected a transformers config: model.config")
        PagePool(1, page_size)  # refuses a wrong page size
        self._room = BatchRoom.checked(max_cache_len, capacity, max_batch, page_size)
        self.max_batch = self._room.max_batch
        self.config, self.device, self.page_size = config, device, page_size
        self.dtype = None if dtype is None else storage_dtype(dtype)
        self.arithmetic = arithmetic_name(arithmetic)
        self._groups = LayerGroups(self.arithmetic)
        layers: list[Any] = []
        for spec in layer_specs(config, check_bool("latent", latent)):
            if not isinstance(spec, LayerSpec):
                layers.append(spec)
                continue
            spec.shape.kv_bytes_per_token(self.dtype or "f32")  # refuses two types for a latent shape
            self._groups.add(spec.shape, spec.index)
            layers.append((HybridLayer if spec.states else ZincLayer)(self, spec))
        super().__init__(layers=layers)
        self._sort_layers()
        if not self._attention_layers:
            raise UnsupportedError("config: got no attention layer, expected at least one")
        self.set_layout(num_splits, split_size)
        self._batch = BatchRows()
        self._closed = False
        self._in_step = False
        self._broken = ""  # why no forward is possible before reset()

    def _sort_layers(self) -> None:
        """Tell the attention layers from transformers' own, which may be the recurrent states of an attention layer."""
        self._attention_layers: list[ZincLayer] = [layer for layer in self.layers if isinstance(layer, ZincLayer)]
        others = (getattr(layer, "states", layer) for layer in self.layers)
        self._other_layers = [layer for layer in others if not isinstance(layer, ZincLayer)]

    # --- memory -------------------------------------------------------------------------------------------

    @property
    def max_cache_len(self) -> int:
        """Tokens per batch row, as the cache was made for."""
        return self._room.max_cache_len

    capacity = max_cache_len  # its earlier name

    @property
    def caches(self) -> list[KVCache]:
        """The KVCaches, one per layer shape; none before the first forward."""
        return self._groups.caches

    @property
    def sequences(self) -> list[list[Sequence]]:
        """The sequences of each KVCache, one per batch row."""
        return list(self._batch.sequences.values())

    @property
    def batch_size(self) -> int:
        """The number of batch rows, -1 before the first forward."""
        return self._batch.size

    @property
    def is_initialized(self) -> bool:
        """Whether the device memory has been taken."""
        return all(layer.is_initialized for layer in self._attention_layers)

    def allocate(self, dtype: Any) -> None:
        """Take the device memory for keys of a torch dtype, like the first forward. DeviceMemoryError, LimitError."""
        self._check_open()
        if not isinstance(dtype, torch.dtype) or dtype not in DTYPES:
            raise DTypeError(f"key: got dtype {shown(dtype)}, expected float32, float16 or bfloat16")
        if self.is_initialized:
            return
        device = default_device() if self.device is None else self.device
        self._groups.allocate(device, self._room, self.dtype or storage_dtype(dtype))
        for layer in self._attention_layers:
            layer.is_initialized = True

    def prepare(self) -> None:
        """Compile and record the programs of decoding up to ``max_cache_len`` now, so that no step has to.

        Call it after a forward, such as the prompt's, which tells layers' options and batch rows; else StepError.
        """
        self._check_open()
        if not self.is_initialized or self.batch_size < 1:
            raise StepError("prepare: got a cache without tokens, expected a call after the first forward")
        self._groups.prepare(self.max_cache_len, self.batch_size)

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("ZincCache: used after close(); make a new one")

    def advice(self) -> str:
        """The advice where a model computes with rows that only attention "zinc" can use."""
        if self.config.get_text_config(decoder=True)._attn_implementation in (NAME, ADAPTED):
            return 'this model\'s attention computes with keys and values itself; use attn_implementation="eager"'
        return f'register(), and select it with model.set_attn_implementation("{NAME}")'

    def set_layout(self, num_splits: int | None = None, split_size: int | None = None) -> None:
        """Another split layout for the next calls of the cache and its forks; without arguments, the split rule's."""
        self._groups.set_layout(num_splits, split_size)

    def close(self) -> None:
        """Free the device memory, also that of forks."""
        self._closed = True
        self._groups.close()
        self._batch.sequences.clear()

    def __enter__(self) -> ZincCache:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    # --- a step -------------------------------------------------------------------------------------------

    @contextmanager
    def step(self) -> Iterator[None]:
        """Keep what the block adds to the cache if the block ends, and roll it back if the block raises.

        ``register`` makes every call of a model, ``model(...)`` or ``generate(...)``, with this cache as
        cache a step, so that a call that has failed anywhere, or was interrupted, can be made again. Use it
        yourself around ``model.forward(...)``, or around a whole turn. A step within a step is part of the outer one.
        A failed step that had cropped tokens from before it, or reordered their batch rows, cannot be rolled back:
        every forward is a StepError until reset().
        """
        if self._in_step:
            yield
            return
        self._check_open()
        step = Step(self._attention_layers, self._other_layers, self._batch)
        self._in_step = True
        try:
            yield
        except BaseException:
            try:
                self._roll_back(step)
            except BaseException:  # an interrupt: every part of the rollback can be done twice
                self._roll_back(step)
                raise
            raise
        finally:
            self._in_step = False
            step.end()

    def _roll_back(self, step: Step) -> None:
        """Restore the cache as it was when ``step`` began, or note why that is impossible."""
        if not self._closed and not step.roll_back():
            self._broken = (
                f"ZincCache: a call failed that had cropped or reordered the {step.columns} tokens from before it, "
                "which cannot be put back; reset() the cache, or use a fork() that was made before"
            )

    def check_rows(self, layer: ZincLayer, key: Any) -> None:
        """Refuse new rows that do not fit the batch, and rows for a layer that is ahead of another."""
        self._check_open()
        if self._broken:
            raise StepError(self._broken)
        self._batch.check_size(key.shape[0], self.max_batch)
        if layer.columns < self._batch.columns:
            return
        shortest = min(self._attention_layers, key=lambda other: other.columns)
        if layer.columns > shortest.columns:
            raise StepError(
                f"layer {layer.index}: got rows at {layer.columns} tokens while layer {shortest.index} has "
                f"{shortest.columns}: a forward stopped between layers; crop(0) drops its rows, reset() all of them"
            )

    def attend(
        self, layer: ZincLayer, query: Any, rows: ZincRows, pattern: MaskPattern, options: AttentionOptions
    ) -> F32:
        """Append the layer's pending rows, then attend those of ``query``: (batch, q_len, q_heads, v_head_dim).

        A failed call leaves the layer as it was.
        """
        shape, (batch, _, n, _) = layer.shape, query.shape
        if rows.serial != layer.serial:
            raise StepError(
                f"layer {layer.index}: got rows of an earlier update(), expected those of the last, uncropped"
            )
        new = layer.pending  # None where another module attends the rows of a layer that has appended them
        begin = layer.columns - (n if new is None else 0)
        stated, dense = pattern.kept, None
        if pattern.dense is not None:
            dense = pattern.dense.expanded(batch, n, begin + n)
            stated = self._batch.with_padding(~dense.padding(), begin + n) if stated is None else stated
        kept = self._batch.check_padding(stated, batch, begin + n)
        check_window(pattern, kept, options.window, begin + n)
        masks = None if dense is None else dense.of_rows(kept, options.window)
        if new is not None:
            tokens = (begin, begin + n) if kept is None else _longest_row(kept, begin)
            self._room.check_row(*tokens)
        attend, index = self._groups.attention(shape, layer.index, options)
        if not self._batch.columns and self.batch_size != batch:
            self._batch.start(self._groups.values(), batch)
        sequences, new_kept = self._batch.sequences[shape], None if kept is None else kept[:, begin:]
        with self._room.named():
            out = append_and_attend(attend, index, sequences, query, new, new_kept, masks)
        layer.pending = None
        if new is not None:
            layer.columns += n
            self._batch.advance(layer.columns, kept)
        return out

    # --- between steps ------------------------------------------------------------------------------------

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-tokens_to_remove`` tokens of every row; 0 drops a forward that stopped between layers.

        ArgumentError: a positive number, or more tokens than there are; UnsupportedError: there are layers of linear
        attention or convolution, whose state keeps no past. Either way nothing has changed.
        """
        columns = self._batch.columns
        count = -check_int("tokens_to_remove", tokens_to_remove, -columns, 0)
        target = min(layer.columns for layer in self._attention_layers) - count
        if target < 0:
            raise ArgumentError(f"tokens_to_remove: got {-count}, expected at least {-count - target}")
        if target < columns and any(map(_keeps_no_past, self._other_layers)):
            raise UnsupportedError(
                f"crop: got {columns} tokens to be cut to {target} in a model with layers of linear attention or "
                "convolution, whose state keeps no past; expected no cut; use reset() and run the prompt again, or "
                "fork() before the tokens"
            )
        for layer in self._other_layers:
            if getattr(layer, "record_past", False):
                layer.crop(-count)
        cut(self._attention_layers, self._batch, target)

    def reset(self) -> None:
        """Forget all tokens, and keep the memory."""
        for layer in self._other_layers:
            layer.reset()
        self._batch.free()
        cut(self._attention_layers, self._batch, 0)
        self._broken = ""

    def reorder_cache(self, beam_idx: Any) -> None:
        """Row i becomes what row beam_idx[i] was, for beam search. Rows that come from one row share its full pages.

        ArgumentError: there is no such row, or more rows than max_batch.
        """
        self._select("beam_idx", batch_row_numbers("beam_idx", beam_idx))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row ``repeats`` times. ArgumentError: there would be more rows than max_batch."""
        repeats = check_int("repeats", repeats, 1, self.max_batch)
        self._select("repeats", [i for i in range(max(self.batch_size, 0)) for _ in range(repeats)])

    def batch_select_indices(self, indices: Any) -> None:
        """Keep the rows ``indices``, in this order."""
        self._select("indices", batch_row_numbers("indices", indices))

    def _select(self, name: str, rows: list[int]) -> None:
        if self._batch.select(name, rows, self.max_batch):
            for layer in self._other_layers:
                layer.reorder_cache(torch.tensor(rows))

    def fork(self) -> ZincCache:
        """Return a second cache with the same tokens, for another continuation of the same prompt.

        Full pages are shared, and linear-attention states are copied. The fork takes its pages from this cache's
        memory: CapacityError where both together have more tokens than fit in max_batch rows.
        """
        twin = copy.copy(self)
        twin._in_step = False
        twin.layers = [
            layer.forked_to(twin) if isinstance(layer, ZincLayer) else copy.deepcopy(layer) for layer in self.layers
        ]
        twin._sort_layers()
        twin._batch = self._batch.fork()
        return twin

    def __repr__(self) -> str:
        return described(
            self,
            lambda: (
                f"{self._batch.columns:,} of {self.max_cache_len:,} tokens, {max(self.batch_size, 0)} of "
                f"{self.max_batch} batch rows, {len(self.layers)} layers{', closed' * self._closed}"
            ),
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> ZincCache:
        return self.fork()


def _keeps_no_past(layer: Any) -> bool:
    """Whether one of transformers' own cache layers has a state that cannot be cut."""
    recurrent = getattr(layer, "is_recurrent_states_initialized", {})
    conv = {} if getattr(layer, "record_past", True) else layer.is_conv_states_initialized
    return any(recurrent.values()) or any(conv.values())


def _longest_row(kept: Columns, begin: int) -> tuple[int, int]:
    """The tokens of the row of ``kept`` with the most tokens: those before column ``begin``, and all of them."""
    row = kept[int(kept.sum(axis=1).argmax())]
    return int(row[:begin].sum()), int(row.sum())
