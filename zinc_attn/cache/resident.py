"""The resident rows of a cache: K and V of many layers on the device, in pages that sequences share.

``layer_storage`` says in which buffers a layer lies, ``pages`` which sequence holds which page.
"""

from collections.abc import Sequence as Seq
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from ..canonical.constants import KEYS_PER_LEAF
from ..checks import Uncopied, check_array, check_bool, check_int
from ..dtypes import storage_dtype
from ..errors import ArgumentError, ClosedError, LimitError, ShapeError
from ..kernels.records import Words
from ..limits import MAX_CONTEXT
from ..runtime.device import Device
from ..runtime.devices import memory_budget
from ..runtime.protocol import Buffer
from ..runtime.refusals import closed_device, no_room
from ..runtime.registry import Registry
from ..shapes import TILES, AttnShape, check_kv_layout, row_format, row_strides
from ..storage import storage_types
from . import rows
from .head_scales import check_head_scales
from .layer_storage import LayerStorage, StoragePlan
from .mover import PageGeometry, RowMover
from .pages import MIN_PAGE_SIZE, PagePool
from .rows import Largest
from .sequence_pages import SequencePages
from .transaction import Reservation, Transaction

MAX_LAYERS: Final = 1 << 16


class Unfinished(Protocol):
    """A call that was submitted and is not complete."""

    def complete(self) -> None:
        """Wait for it, and let its new rows count or give their pages back; raises nothing but an interrupt."""


class ResidentRows(Uncopied, instead="Sequence.save and KVCache.load take tokens to another one"):
    """The memory of a KVCache, see there for the arguments; its rows, and the transactions of its calls."""

    def __init__(  # noqa: PLR0913  (the arguments of a KVCache)
        self,
        device: Device,
        shape: AttnShape,
        num_layers: int,
        capacity: int,
        dtype: object = "f16",
        page_size: int = 256,
        max_sequences: int | None = None,
        *,
        round_rows: bool = False,
        k_scale: Any = None,
        v_scale: Any = None,
        page_order: Seq[int] | None = None,
        kv_layout: str = "tiles",
    ) -> None:
        dtype = storage_dtype(dtype)
        self.device, self.shape, self.dtype = device, shape, dtype
        self.round_rows = check_bool("round_rows", round_rows)
        self.num_layers = check_int("num_layers", num_layers, 1, MAX_LAYERS)
        capacity = check_int("capacity", capacity, 1, MAX_CONTEXT)
        if not isinstance(device, Device):
            raise ArgumentError(f"device: got {type(device).__name__}, expected a Device")
        if not isinstance(shape, AttnShape):
            raise ArgumentError(f"shape: got {type(shape).__name__}, expected an AttnShape")
        self.max_sequences = None if max_sequences is None else check_int("max_sequences", max_sequences, 1)
        self.row = row_format(shape, dtype)  # words of a token's row, per KV head
        self.head_scales = check_head_scales(dtype, shape, self.num_layers, k_scale, v_scale)
        page_size = check_int("page_size", page_size, MIN_PAGE_SIZE)
        self.pool = PagePool(-(-capacity // page_size), page_size, page_order, capacity)
        tile = min(KEYS_PER_LEAF, page_size)
        strides = row_strides(shape, dtype) if check_kv_layout(kv_layout) == "NHD" else TILES
        self.layout = PageGeometry(shape, dtype, tile, page_size // tile, strides)
        self.lock = device.lock
        self._live: Registry[Any] = Registry()  # its sequences
        self._current: Transaction | None = None  # of the call that is under way, or was cut short
        self.unfinished: Unfinished | None = None  # a call that was submitted, and holds pages
        self.users: Registry[Any] = Registry()  # objects that close() must close first
        self._open = True
        self._buffers: list[Buffer] = []
        self.layers: list[LayerStorage] = []
        self.mover = RowMover(device, self.layout, self.layers)
        self._allocate()

    # --- memory -------------------------------------------------------------------------------------------

    @property
    def nbytes(self) -> int:
        """Device memory of K and V, bytes."""
        return self.num_layers * self.shape.kv_heads * sum(self._head_bytes())

    def _head_bytes(self) -> tuple[int, int]:
        """Bytes of K, and of V, of one KV head of one layer."""
        tiles = self.pool.num_pages * self.layout.page_tiles
        k_words, v_words = self.layout.tile_words
        return 4 * tiles * k_words, 4 * tiles * v_words

    @property
    def bytes_per_token(self) -> int:
        """Bytes of K and V that a token takes over all layers."""
        return self.num_layers * self.shape.kv_bytes_per_token(self.dtype)

    @property
    def capacity(self) -> int:
        """Tokens over all sequences, as the cache was asked for."""
        return self.pool.asked

    @property
    def free_tokens(self) -> int:
        """Tokens for which pages are free; in whole pages, so it may be more than ``capacity`` in an empty cache."""
        return self.pool.free_pages * self.pool.page_size

    def _allocate(self) -> None:
        heads = self.shape.kv_heads
        k_bytes, v_bytes = self._head_bytes()
        per_head = max(k_bytes, v_bytes)
        limit = self.device.info.max_buffer_bytes
        if per_head > limit:
            raise LimitError(
                f"capacity: {self.capacity:,} tokens need {per_head:,} bytes per KV head, {self.device.info.name} "
                f"takes at most {limit:,} in one storage buffer; use a smaller capacity or dtype"
            )
        _, free = memory_budget(self.device.info)
        if self.nbytes > free:
            raise no_room(self.nbytes, free, self.device.info)
        plan = StoragePlan(self.num_layers, heads, k_bytes, v_bytes, self.pool.num_pages, limit)
        try:
            self.layers += plan.allocate(self.device.runtime, self._buffers)
        except BaseException:
            self.close()
            raise

    def check_open(self) -> None:
        """ClosedError after ``close``, of the cache or of its device."""
        if not self._open:
            raise ClosedError("KVCache: used after close()")
        if self.device.closed:
            raise closed_device(self.device.info)

    def settle(self) -> None:
        """Complete a submitted call, undo an interrupted one. Calls do so under the lock before they see sequences."""
        if self.unfinished is not None:
            self.unfinished.complete()
        if self._current:
            self.end()

    def close(self) -> None:
        """Free the device memory and every sequence."""
        self._open = False
        for user in list(self.users):
            user.close()
        self.mover.close()
        for buffer in self._buffers:
            buffer.close()
        self._buffers.clear()

    # --- sequences ----------------------------------------------------------------------------------------

    @property
    def living(self) -> list[Any]:
        """The sequences that are neither freed nor dropped, in no order."""
        return [sequence for sequence in self._live if not sequence.pages.closed]

    def admit(self, sequence: Any) -> None:
        """Count a new sequence. LimitError, after which its pages are free: max_sequences are live."""
        if self.max_sequences is not None and (live := len(self.living)) >= self.max_sequences:
            sequence.pages.free()
            raise LimitError(
                f"max_sequences: {live} sequences are live, expected at most {self.max_sequences}; free() one"
            )
        self._live.purge()
        self._live.add(sequence)

    def check_pages(self, pages: SequencePages) -> None:
        """ClosedError unless the pages are a live sequence's, in an open cache. Completes a submitted call first."""
        self.check_open()
        self.settle()
        pages.check_open()

    def forget(self, sequence: Any) -> None:
        """Take a freed sequence off the list of live ones."""
        self._live.discard(sequence)

    def check_layer(self, layer: int) -> int:
        """``layer`` if the cache has it."""
        if isinstance(layer, np.ndarray) and layer.ndim:
            raise ArgumentError("layer: got an array, expected an int, which comes after seq and before k and v")
        return check_int("layer", layer, 0, self.num_layers - 1)

    # --- rows ---------------------------------------------------------------------------------------------

    def scales_of(self, layer: int) -> NDArray[np.float32] | None:
        """K's and V's scales of a layer's heads, (2, kv_heads), where a type has them."""
        return None if self.head_scales is None else self.head_scales[layer]

    def check_rows(self, k: Any, v: Any, layer: int) -> tuple[NDArray[Any], NDArray[Any], Largest]:
        """Stored values k (n, kv_heads, head_dim), v (n, kv_heads, v_head_dim) of new tokens of a layer, and their
        largest magnitudes. One token may lack axis 0; a latent cache takes no v."""
        keys = self._check_rows("k", k, self.shape.head_dim)
        if self.shape.latent:
            if v is not None:
                raise ArgumentError("v: got an array, expected None: the values of a latent cache are part of k")
            keys, largest = self._stored_values("k", keys, layer)
            return keys, keys[..., : self.shape.v_head_dim], Largest(largest, largest)
        values = self._check_rows("v", v, self.shape.v_head_dim)
        if len(keys) != len(values):
            want = len(keys), *values.shape[1:]
            raise ShapeError(f"v: got shape {values.shape}, expected k's tokens: {want}")
        keys, largest_k = self._stored_values("k", keys, layer)
        values, largest_v = self._stored_values("v", values, layer)
        return keys, values, Largest(largest_k, largest_v)

    def _stored_values(self, name: str, x: NDArray[Any], layer: int) -> tuple[NDArray[Any], float]:
        index, scales = "kv".index(name), self.scales_of(layer)
        kind = storage_types(self.dtype)[index].name
        return rows.stored_values(name, x, kind, self.round_rows, None if scales is None else scales[index])

    def _check_rows(self, name: str, x: Any, dims: int) -> NDArray[Any]:
        """``x`` as (tokens, kv_heads, dims), at least one token."""
        array, heads = check_array(name, x), self.shape.kv_heads
        if array.ndim not in (2, 3) or array.shape[-2:] != (heads, dims):
            raise ShapeError(f"{name}: got shape {array.shape}, expected (tokens, {heads}, {dims})")
        if 0 in array.shape:
            raise ShapeError(f"{name}: got shape {array.shape}, expected at least one token")
        return array[None] if array.ndim == 2 else array

    @property
    def row_words(self) -> int:
        """Words of one token's row: K and V of every KV head."""
        return self.shape.kv_heads * self.row.words

    def transaction(self) -> Transaction:
        """A transaction for a call, which must ``commit`` it and then call ``end``.

        If an interrupt cuts the call's clean-up short, the next call rolls the transaction back.
        """
        self._current = transaction = Transaction()
        return transaction

    def commit(self, transaction: Transaction | None, largest: Largest) -> None:
        """Let the rows of ``transaction`` count, and their ``largest`` magnitudes: one store, all or nothing."""
        if transaction is not None:  # it is None in a call without new rows
            transaction.commit(largest)

    def end(self) -> None:
        """End a call that has a ``transaction``; roll this back unless it was committed."""
        if self._current and self._current.state == "open":
            self.device.flush()  # submissions that may write to its pages, or to another call's results
            self._current.rollback()  # also where an interrupt came before the first of them was noted
        self._current = None

    def encode_into(self, out: NDArray[np.uint32], k: NDArray[Any], v: NDArray[Any], layer: int) -> None:
        """Write the rows of stored values k, v (n, kv_heads, head_dim) of a layer to ``out`` (n, kv_heads, words)."""
        rows.encode_into(out, k, v, self.shape, self.dtype, self.scales_of(layer))

    def write_values(
        self, table: Words, layer: int, reservation: Reservation, k: NDArray[Any], v: NDArray[Any]
    ) -> None:
        """Upload stored values k, v (n, kv_heads, head_dim) to the places of the reservation. table: its pages."""
        scales = self.scales_of(layer)
        if not self.layout.encodes(len(k)):
            self.write_rows(table, layer, reservation, rows.encode(k, v, self.shape, self.dtype, scales))
            return
        self.mover.append_values(layer, reservation.start + np.arange(len(k)), table, (k, v), scales)

    def write_rows(self, table: Words, layer: int, reservation: Reservation, words: Words) -> None:
        """Upload rows (n, kv_heads, words) to the places of the reservation. table: its pages."""
        self.mover.append(layer, reservation.start + np.arange(len(words)), table, words)

    def read_pages(self, pages: SequencePages, layer: int, begin: int, end: int) -> Words:
        """The rows [begin, end) of a sequence's layer as they are stored, (n, kv_heads, words)."""
        return self.mover.gather(layer, np.arange(begin, end), np.array(pages.table, np.uint32))

    def copy_pages(self, copies: list[tuple[int, int]]) -> None:
        """Copy pages (source, target) of every layer."""
        for pair in copies:
            self.mover.copy(*pair)
