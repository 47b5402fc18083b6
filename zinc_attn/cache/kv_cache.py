"""The resident KV cache: K and V of many layers on the device, in pages that sequences share.

A page id names the same slot in every layer; ``layer_storage`` says in which buffers a layer lies. ``pages`` keeps the
books; this module moves the bytes, and ``files`` writes a sequence to a file.
"""

from __future__ import annotations

import os
from collections.abc import Sequence as Seq
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from ..canonical.constants import KEYS_PER_LEAF
from ..checks import Uncopied, check_array, check_bool, check_int, described
from ..dtypes import storage_dtype
from ..errors import ArgumentError, ClosedError, LimitError, ShapeError
from ..limits import MAX_CONTEXT
from ..runtime.device import Device
from ..runtime.devices import memory_budget
from ..runtime.protocol import Buffer
from ..runtime.refusals import closed_device, no_room
from ..runtime.registry import Registry
from ..shapes import TILES, AttnShape, check_kv_layout, row_format, row_strides
from ..storage import storage_types
from . import rows
from .encoded import check_encoded, encoded_rows
from .files import CacheFileError, load  # noqa: F401  (the error is also imported from here)
from .head_scales import check_head_scales
from .layer_storage import LayerStorage, StoragePlan
from .mover import PageGeometry, RowMover
from .pages import MIN_PAGE_SIZE, PagePool
from .rows import Largest
from .sequence import Sequence
from .sequence_pages import Commit, SequencePages
from .transaction import Reservation, Transaction

MAX_LAYERS: Final = 1 << 16


class Unfinished(Protocol):
    """A call that was submitted and is not complete."""

    def complete(self) -> None:
        """Wait for it, and let its new rows count or give their places back; raises nothing but an interrupt."""


class KVCache(Uncopied, instead="Sequence.save and KVCache.load take tokens to another one"):
    """K and V of ``num_layers`` layers for ``capacity`` tokens over all sequences, on a device.

    device: an open Device; shape: of every layer. A sequence takes whole pages of ``page_size`` tokens, and
    ``capacity`` is rounded up to whole pages.
    dtype: a name of ``storage.STORAGE``, or the dtype of NumPy or torch, or two of these for K and V, ("q8_0", "q4_0")
    or "q8_0/q4_0" (see ``rows`` for what each takes, and ``blocks`` for how block types quantize); page_size: tokens, a
    power of two from 1 on; max_sequences: a limit on live sequences, None for none; k_scale, v_scale: of fp8_e4m3, a
    number, (kv_heads,) or (num_layers, kv_heads) float32, None for 1 (vLLM's k_scale and v_scale); round_rows: whether
    f16 and bf16 caches round float32 rows, and other wider ones, to nearest even, or refuse them; page_order: a
    permutation of the page ids in which they are handed out; kv_layout: "tiles", which kernels read fastest, or "NHD",
    rows as most engines keep them, (token, KV head, values), of block types ggml's blocks. Memory is device memory
    only, checked against the budget before any is taken: DeviceMemoryError, LimitError. ArgumentError: another
    argument.
    """

    def __init__(  # noqa: PLR0913  (public; the last ones are keywords with a default)
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
        self._largest = Largest(), Largest(), Commit()  # before a commit, after it, and the commit
        self._live: Registry[Sequence] = Registry()
        self._current: Transaction | None = None  # of the call that is under way, or was cut short
        self.unfinished: Unfinished | None = None  # a call that was submitted, and holds places
        self.users: Registry[Any] = Registry()  # what close() must close first
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
        """Tokens over all sequences, as the cache was made for."""
        return self.pool.asked

    @property
    def free_tokens(self) -> int:
        """Tokens for which pages are free; in whole pages, so it may be more than ``capacity`` in an empty cache."""
        return self.pool.free_pages * self.pool.page_size

    def _allocate(self) -> None:
        """Make the K and V buffers."""
        heads = self.shape.kv_heads
        k_bytes, v_bytes = self._head_bytes()
        per_head = max(k_bytes, v_bytes)
        limit = self.device.info.max_buffer_bytes
        if per_head > limit:
            raise LimitError(
                f"capacity: {self.capacity:,} tokens need {per_head:,} bytes per KV head, {self.device.info.name} "
                f"takes at most {limit:,} in one storage buffer; use a smaller capacity or dtype"
            )
        _, free = memory_budget(self.device.info.index)
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

    def begin(self) -> None:
        """Under the lock, before a call looks at sequences: complete the call that was submitted before it, and give
        back what an interrupted call could not."""
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

    def __repr__(self) -> str:
        return described(
            self,
            lambda: (
                f"{self.shape}, {self.dtype}, {self.num_layers} layers, {self.free_tokens:,} of {self.capacity:,} "
                f"tokens free in pages of {self.pool.page_size}, {self.device!r}{'' if self._open else ', closed'}"
            ),
        )

    def __enter__(self) -> KVCache:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # --- sequences ----------------------------------------------------------------------------------------

    def new_sequence(self) -> Sequence:
        """An empty sequence. LimitError: max_sequences are live."""
        with self.lock:
            self.check_open()
            self.begin()
            return self.adopt(SequencePages(self.pool, self.num_layers))

    def load(self, path: str | os.PathLike[str]) -> Sequence:
        """A new sequence with the tokens of a file that ``Sequence.save`` wrote; see ``files.load``."""
        return load(self, path)

    @property
    def sequences(self) -> list[Sequence]:
        """The live sequences, oldest first. One that is dropped gives its pages back."""
        return sorted((s for s in self._live if not s.pages.closed), key=lambda sequence: sequence.serial)

    def adopt(self, pages: SequencePages) -> Sequence:
        """A Sequence for ``pages``, counted against max_sequences."""
        if self.max_sequences is not None and len(self.sequences) >= self.max_sequences:
            pages.free()
            raise LimitError(
                f"max_sequences: {len(self.sequences)} sequences are live, expected at most {self.max_sequences}; "
                "free() one"
            )
        sequence = Sequence(self, pages)
        self._live.purge()
        self._live.add(sequence)
        return sequence

    def forget(self, sequence: Sequence) -> None:
        """Take a freed sequence off the list of live ones."""
        self._live.discard(sequence)

    def check_sequence(self, sequence: Any) -> Sequence:
        """``sequence`` if it is a live one of this cache."""
        self.check_open()
        self.begin()
        if not isinstance(sequence, Sequence):
            raise ArgumentError(f"seq: got {type(sequence).__name__}, expected a Sequence of this cache")
        if sequence.cache is not self:
            raise ArgumentError("seq: got a sequence of another cache, expected one of this cache")
        sequence.pages.check_open()
        return sequence

    def check_layer(self, layer: int) -> int:
        """``layer`` if the cache has it."""
        if isinstance(layer, np.ndarray) and layer.ndim:
            raise ArgumentError("layer: got an array, expected an int, which comes behind seq and before k and v")
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
        at, scales = "kv".index(name), self.scales_of(layer)
        kind = storage_types(self.dtype)[at].name
        return rows.stored_values(name, x, kind, self.round_rows, None if scales is None else scales[at])

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

    def append(self, sequence: Sequence, layer: int, k: Any, v: Any = None) -> None:
        """Append tokens to one layer: k (tokens, kv_heads, head_dim) and v (tokens, kv_heads, v_head_dim), or each
        without the first axis for one token; a latent cache takes k alone.

        Dtypes: see ``rows.stored_values``. Every layer must get the same tokens before any gets more, or it is a
        StepError; CapacityError: there is no room; ArgumentError and its kinds: wrong arrays. A failed call changes
        nothing.
        """
        with self.lock:
            self.check_sequence(sequence)
            keys, values, largest = self.check_rows(k, v, self.check_layer(layer))
            try:
                transaction = self.transaction()
                reservation = transaction.reserve(sequence.pages, layer, len(keys))
                self.copy_pages(reservation.copies)
                self.write_values(sequence, layer, reservation, keys, values)
                self.commit(transaction, largest)
            finally:
                self.end()

    def append_encoded(self, sequence: Sequence, layer: int, k: Any, v: Any = None) -> None:
        """Append tokens whose rows are stored already, in the cache's types: k and v uint8 (tokens, kv_heads, bytes),
        ggml's blocks or plain values, see ``encoded``; a latent cache takes k alone. Otherwise like ``append``.

        ValueRangeError: a scale or a value is no finite number.
        """
        with self.lock:
            self.check_sequence(sequence)
            given = check_encoded(k, v, self.shape, self.dtype)
            try:
                transaction = self.transaction()
                reservation = transaction.reserve(sequence.pages, self.check_layer(layer), len(given[0]))
                words, largest = encoded_rows(given, self.shape, self.dtype, self.scales_of(layer))
                self.copy_pages(reservation.copies)
                self.write_rows(sequence, layer, reservation, words)
                self.commit(transaction, largest)
            finally:
                self.end()

    @property
    def largest(self) -> Largest:
        """The largest |k| and |v| ever appended, by a recording once ``unseen.examine`` has seen them: |k| bounds the
        scores, and matrix units take both up to a limit."""
        before, after, commit = self._largest
        return after if commit.made else before

    @largest.setter
    def largest(self, value: Largest) -> None:
        self._largest = value, value, Commit()

    def transaction(self) -> Transaction:
        """The transaction of a call that begins; the call ``commit``s it and then calls ``end``.

        Where an interrupt cuts its clean-up short, too, the next call rolls it back.
        """
        self._current = made = Transaction()
        return made

    def commit(self, transaction: Transaction | None, largest: Largest) -> None:
        """The rows of ``transaction`` count, and their ``largest`` magnitudes: one store, all or nothing."""
        if transaction is None:  # of a call without new rows
            return
        if transaction.reservations:
            before = self.largest
            self._largest = before, before.joined(largest), transaction.mark
        transaction.commit()

    def end(self) -> None:
        """The end of a call that has a ``transaction``: one that did not commit it is undone."""
        if self._current and self._current.state == "open":
            self.device.flush()  # what may write to its places, or to results that another call will have
            self._current.rollback()  # also where an interrupt came before the first of them was noted
        self._current = None

    def encode_into(self, out: NDArray[np.uint32], k: NDArray[Any], v: NDArray[Any], layer: int) -> None:
        """Write the rows of stored values k, v (n, kv_heads, head_dim) of a layer to ``out`` (n, kv_heads, words)."""
        rows.encode_into(out, k, v, self.shape, self.dtype, self.scales_of(layer))

    def write_values(
        self, sequence: Sequence, layer: int, reservation: Reservation, k: NDArray[Any], v: NDArray[Any]
    ) -> None:
        """Upload stored values k, v (n, kv_heads, head_dim) to where the reservation says."""
        scales = self.scales_of(layer)
        if not self.layout.encodes(len(k)):
            words = rows.encode(k, v, self.shape, self.dtype, scales)
            self.write_rows(sequence, layer, reservation, words)
            return
        table, positions = sequence.table(reservation), reservation.start + np.arange(len(k))
        self.mover.append_values(layer, positions, table, (k, v), scales)

    def write_rows(self, sequence: Sequence, layer: int, reservation: Reservation, words: NDArray[np.uint32]) -> None:
        """Upload rows (n, kv_heads, words) to where the reservation says."""
        table, positions = sequence.table(reservation), reservation.start + np.arange(len(words))
        self.mover.append(layer, positions, table, words)

    def read_rows(self, sequence: Sequence, layer: int, begin: int, end: int) -> NDArray[np.uint32]:
        """The rows [begin, end) of a layer as they are stored, (n, kv_heads, words)."""
        return self.mover.gather(layer, np.arange(begin, end), sequence.table())

    def copy_pages(self, copies: list[tuple[int, int, int]]) -> None:
        """Copy pages (source, target, ...) of every layer."""
        for source, target, _ in copies:
            self.mover.copy(source, target)
