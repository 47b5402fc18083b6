"""The resident KV cache: sequences whose rows lie in the pages of a device's memory, see ``resident``."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..checks import described
from ..errors import ArgumentError
from .encoded import check_encoded, encoded_rows
from .files import CacheFileError, load  # noqa: F401  (the error is also imported from here)
from .resident import ResidentRows
from .sequence import Sequence
from .sequence_pages import SequencePages


class KVCache(ResidentRows):
    """K and V of ``num_layers`` layers for ``capacity`` tokens over all sequences, on a device.

    device: an open Device; shape: of every layer. A sequence takes whole pages of ``page_size`` tokens, and
    ``capacity`` is rounded up to whole pages.
    dtype: a name of ``storage.STORAGE``, or the dtype of NumPy or torch, or two of these for K and V, ("q8_0", "q4_0")
    or "q8_0/q4_0" (``rows`` says which rows a type takes, ``blocks`` how block types quantize); page_size: tokens, a
    power of two from 1 on; max_sequences: a limit on live sequences, None for none; k_scale, v_scale: of fp8_e4m3, a
    number, (kv_heads,) or (num_layers, kv_heads) float32, None for 1 (vLLM's k_scale and v_scale); round_rows: whether
    f16 and bf16 caches round float32 and other wider rows to nearest even, or refuse them; page_order: a permutation of
    the page ids in which they are handed out; kv_layout: "tiles", which kernels read fastest, or "NHD", rows as most
    engines keep them, (token, KV head, values), of block types ggml's blocks. All memory is the device's, and is
    checked against the budget first: DeviceMemoryError, LimitError. ArgumentError: another argument.
    """

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
            self.settle()
            return Sequence(self, SequencePages(self.pool, self.num_layers))

    def load(self, path: str | os.PathLike[str]) -> Sequence:
        """A new sequence with the tokens of a file that ``Sequence.save`` wrote; see ``files.load``."""
        return load(self, path, lambda pages: Sequence(self, pages))

    @property
    def sequences(self) -> list[Sequence]:
        """The live sequences, oldest first. A dropped sequence gives its pages back."""
        return sorted(self.living, key=lambda sequence: sequence.serial)

    def check_sequence(self, sequence: Any) -> Sequence:
        """``sequence`` if it is a live one of this cache."""
        self.check_open()
        self.settle()
        if not isinstance(sequence, Sequence):
            raise ArgumentError(f"seq: got {type(sequence).__name__}, expected a Sequence of this cache")
        if sequence.cache is not self:
            raise ArgumentError("seq: got a sequence of another cache, expected one of this cache")
        sequence.pages.check_open()
        return sequence

    # --- rows ---------------------------------------------------------------------------------------------

    def read_rows(self, sequence: Sequence, layer: int, begin: int, end: int) -> NDArray[np.uint32]:
        """The rows [begin, end) of a layer as they are stored, (n, kv_heads, words)."""
        return self.read_pages(sequence.pages, layer, begin, end)

    def append(self, sequence: Sequence, layer: int, k: Any, v: Any = None) -> None:
        """Append tokens to one layer: k (tokens, kv_heads, head_dim) and v (tokens, kv_heads, v_head_dim), or each
        without the first axis for one token; a latent cache takes k alone.

        Dtypes: see ``rows.stored_values``. StepError: a layer would get more tokens before all layers have the same;
        CapacityError: there is no room; ArgumentError and its kinds: wrong arrays. A failed call changes nothing.
        """
        with self.lock:
            self.check_sequence(sequence)
            keys, values, largest = self.check_rows(k, v, self.check_layer(layer))
            try:
                transaction = self.transaction()
                reservation = transaction.reserve(sequence.pages, layer, len(keys))
                self.copy_pages(reservation.copies)
                self.write_values(sequence.table(reservation), layer, reservation, keys, values)
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
            encoded = check_encoded(k, v, self.shape, self.dtype)
            try:
                transaction = self.transaction()
                reservation = transaction.reserve(sequence.pages, self.check_layer(layer), len(encoded[0]))
                words, largest = encoded_rows(encoded, self.shape, self.dtype, self.scales_of(layer))
                self.copy_pages(reservation.copies)
                self.write_rows(sequence.table(reservation), layer, reservation, words)
                self.commit(transaction, largest)
            finally:
                self.end()
