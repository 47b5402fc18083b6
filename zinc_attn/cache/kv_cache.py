"""The resident KV cache: K and V of many layers on the device, in pages that sequences share.

Each layer has its own K and V buffers in the kernels' layout; a page id names the same slot in all of them. Where one
buffer would be beyond the device's limit, a layer is cut into shards of KV heads, which nobody sees. ``pages`` keeps
the books; this module moves the bytes.

A sequence in a file is safetensors, one uint32 tensor ``layer.<i>`` (tokens, kv_heads, words) of stored rows per layer,
as ``rows`` lays them out: neither page size nor placement is in it, and loading gives the same bits. The metadata say
what it is of, with the SHA-256 of the data (all bytes behind the header). Either way one layer is in host memory.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import struct
import tempfile
import weakref
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ..errors import ArgumentError, ClosedError, LimitError, RuntimeUnavailableError, ShapeError
from ..kernels import contract as kernels
from ..kernels.contract import APPEND_KERNEL, COPY_KERNEL, GATHER_KERNEL, KernelDecl
from ..runtime.device import Device
from ..runtime.protocol import Buffer, Dispatch, Recording, Use, memory_budget, no_room
from ..shapes import (
    CHUNK,
    LEAF,
    MAX_CONTEXT,
    MAX_INPUT,
    MIN_INPUT,
    AttnShape,
    check_array,
    check_int,
    check_path,
    scale_words,
    value_words,
)
from . import rows
from .pages import PagePool, Reservation, SequencePages
from .rows import Work

MAX_LAYERS: Final = 1 << 16
ROWS_BYTES: Final = 4 << 20  # rows that one append submission uploads


@dataclass(frozen=True)
class Shard:
    """K and V of ``heads`` KV heads of one layer, from KV head ``first`` on."""

    first: int
    heads: int
    k: Buffer
    v: Buffer


_serials = itertools.count()


class Sequence:
    """One token sequence of a KVCache, from ``new_sequence``. ``len`` counts the tokens that all layers have."""

    def __init__(self, cache: KVCache, pages: SequencePages) -> None:
        self.cache, self.pages = cache, pages
        self.serial = next(_serials)
        self.stamp = 0  # counts changes of the block table
        self._table = np.zeros(16, np.uint32)
        self._known = 0  # entries of _table that are the block table's

    def __len__(self) -> int:
        return len(self.pages)

    def __bool__(self) -> bool:
        return True

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each layer; they differ only while a step goes through the layers."""
        return tuple(self.pages.lengths)

    def fork(self) -> Sequence:
        """A second sequence with the same tokens. Full pages stay shared; the partial one is copied when written."""
        with self.cache.lock:
            self.cache.check_open()
            return self.cache.adopt(self.pages.fork())

    def truncate(self, n: int) -> None:
        """Keep the first ``n`` tokens (at most len(self)); for the rollback of speculative tokens."""
        with self.cache.lock:
            self.cache.check_open()
            kept = self.pages.pool.pages_for(check_int("n", n, 0, len(self)))
            if kept < len(self.pages.pages):
                # first: an interrupt behind the cut must not leave entries of pages that are gone
                self.stamp += 1
                self._known = min(self._known, kept)
            self.pages.truncate(n)

    def retract(self, layer: int, n: int) -> None:
        """Keep the first ``n`` tokens of one layer, whatever the others have: undoes an append of that layer."""
        with self.cache.lock:
            kept = self.pages.pool.pages_for(max(n, *(m for i, m in enumerate(self.pages.lengths) if i != layer), 0))
            if kept < len(self.pages.pages):
                self.stamp += 1
                self._known = min(self._known, kept)
            self.pages.retract(layer, n)

    def free(self) -> None:
        """Give the pages back. The sequence cannot be used any more."""
        with self.cache.lock:
            self.pages.free()
            self.cache.forget(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the tokens that every layer has to a file that ``KVCache.load`` reads; see ``save``."""
        save(self, path)

    def table(self, reservation: Reservation | None = None) -> NDArray[np.uint32]:
        """The block table (pages,), with a reservation's pages where one is given. A view, good until the next call."""
        pages = self.pages.pages
        fixed = len(pages) if reservation is None else reservation.table_start
        new = () if reservation is None else reservation.new_pages
        total = fixed + len(new)
        if total > len(self._table):
            self._table = np.concatenate([self._table, np.zeros(2 * total, np.uint32)])
        if self._known < fixed:
            # entries that a rolled back reservation left make the table another one; those of a committed one are it
            self.stamp += int(np.any(self._table[self._known : fixed] != pages[self._known : fixed]))
            self._table[self._known : fixed] = pages[self._known : fixed]
        self._known = min(self._known, fixed)  # before the reservation's pages, which a rollback gives back
        if new:
            self._table[fixed:total] = new
            self.stamp += 1
        self._known = min(fixed, total)
        return self._table[:total]


class KVCache:
    """K and V of ``num_layers`` layers for ``capacity`` tokens over all sequences, on a device.

    dtype: f32, f16, bf16 or q8_0 (see ``rows`` for what each takes and how q8_0 quantises); page_size: tokens, a
    power of two from 16 on; max_sequences: a limit on live sequences, None for none; page_order: a permutation of the
    page ids in which they are handed out. Memory is device memory only, checked against the budget before any is
    taken: DeviceMemoryError, LimitError.
    """

    def __init__(
        self,
        device: Device,
        shape: AttnShape,
        num_layers: int,
        capacity: int,
        dtype: str = "f16",
        page_size: int = 256,
        max_sequences: int | None = None,
        *,
        page_order: Seq[int] | None = None,
    ) -> None:
        self.device, self.shape, self.dtype = device, shape, dtype
        self.num_layers = check_int("num_layers", num_layers, 1, MAX_LAYERS)
        capacity = check_int("capacity", capacity, 1, MAX_CONTEXT)
        if not isinstance(device, Device):
            raise ArgumentError(f"device: got {type(device).__name__}, expected a Device")
        if not isinstance(shape, AttnShape):
            raise ArgumentError(f"shape: got {type(shape).__name__}, expected an AttnShape")
        self.max_sequences = None if max_sequences is None else check_int("max_sequences", max_sequences, 1)
        self.value_words = value_words(shape.head_dim, dtype)
        self.scale_words = scale_words(shape.head_dim, dtype)
        page_size = check_int("page_size", page_size, 16)
        self.pool = PagePool(-(-capacity // page_size), page_size, page_order)
        self.tile = min(LEAF, page_size)
        self.page_tiles = page_size // self.tile
        self.lock = device.lock
        self.max_k = 0.0  # largest |k| ever appended: bounds the scores
        self._live: weakref.WeakSet[Sequence] = weakref.WeakSet()
        self._rigs: dict[tuple[Any, ...], tuple[list[Buffer], Work]] = {}  # shared by the layers
        self._recordings: dict[tuple[Any, ...], Recording] = {}
        self.users: weakref.WeakSet[Any] = weakref.WeakSet()  # what close() must close first
        self._open = True
        self._buffers: list[Buffer] = []
        self.layers = self._allocate()

    # --- memory -------------------------------------------------------------------------------------------

    @property
    def tile_words(self) -> int:
        """Words of K (or V) of one tile of one KV head."""
        return self.tile * (self.value_words + self.scale_words)

    @property
    def nbytes(self) -> int:
        """Device memory of K and V, bytes."""
        per_head = 4 * self.pool.num_pages * self.page_tiles * self.tile_words
        return 2 * self.num_layers * self.shape.kv_heads * per_head

    @property
    def bytes_per_token(self) -> int:
        """Bytes of K and V that a token takes over all layers."""
        return self.num_layers * self.shape.kv_bytes_per_token(self.dtype)

    @property
    def capacity(self) -> int:
        """Tokens over all sequences; whole pages."""
        return self.pool.capacity

    @property
    def free_tokens(self) -> int:
        """Tokens for which pages are free."""
        return self.pool.free_pages * self.pool.page_size

    def _allocate(self) -> list[list[Shard]]:
        runtime, heads = self.device.runtime, self.shape.kv_heads
        per_head = self.nbytes // (2 * self.num_layers * heads)
        limit = self.device.info.max_buffer_bytes
        if per_head > limit:
            raise LimitError(
                f"capacity: {self.capacity:,} tokens need {per_head:,} bytes per KV head, {self.device.info.name} "
                f"takes at most {limit:,} in one storage buffer; use a smaller capacity or dtype"
            )
        _, free = memory_budget(self.device.info.index)
        if self.nbytes > free:
            raise no_room(self.nbytes, free, self.device.info)
        shards = math.ceil(heads / min(heads, limit // per_head))
        edges = [heads * i // shards for i in range(shards + 1)]
        layers: list[list[Shard]] = []
        try:
            for _ in range(self.num_layers):
                layer = []
                for first, end in pairwise(edges):
                    for _ in "kv":
                        self._buffers.append(runtime.buffer((end - first) * per_head, Use.CACHE))
                    layer.append(Shard(first, end - first, self._buffers[-2], self._buffers[-1]))
                layers.append(layer)
        except BaseException:
            self.close()
            raise
        return layers

    def check_open(self) -> None:
        """ClosedError after ``close``."""
        if not self._open:
            raise ClosedError("KVCache: used after close()")

    def close(self) -> None:
        """Free the device memory and every sequence."""
        self._open = False
        for user in list(self.users):
            user.close()
        for recording in self._recordings.values():
            recording.close()
        for buffers, _ in self._rigs.values():
            for buffer in buffers:
                buffer.close()
        self._recordings.clear()
        self._rigs.clear()
        for buffer in self._buffers:
            buffer.close()
        self._buffers.clear()

    def __enter__(self) -> KVCache:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # --- sequences ----------------------------------------------------------------------------------------

    def new_sequence(self) -> Sequence:
        """An empty sequence."""
        with self.lock:
            self.check_open()
            return self.adopt(SequencePages(self.pool, self.num_layers))

    def load(self, path: str | os.PathLike[str]) -> Sequence:
        """A new sequence with the tokens of a file that ``Sequence.save`` wrote; see ``load``."""
        return load(self, path)

    @property
    def sequences(self) -> list[Sequence]:
        """The live sequences, oldest first. One that is dropped gives its pages back."""
        return sorted(self._live, key=lambda sequence: sequence.serial)

    def adopt(self, pages: SequencePages) -> Sequence:
        """A Sequence for ``pages``, counted against max_sequences."""
        if self.max_sequences is not None and len(self.sequences) >= self.max_sequences:
            pages.free()
            raise LimitError(
                f"max_sequences: {len(self.sequences)} sequences are live, expected at most {self.max_sequences}; "
                "free() one"
            )
        sequence = Sequence(self, pages)
        self._live.add(sequence)
        return sequence

    def forget(self, sequence: Sequence) -> None:
        """Take a freed sequence off the list of live ones."""
        self._live.discard(sequence)

    def check_sequence(self, sequence: Any) -> Sequence:
        """``sequence`` if it is a live one of this cache."""
        self.check_open()
        if not isinstance(sequence, Sequence):
            raise ArgumentError(f"seq: got {type(sequence).__name__}, expected a Sequence of this cache")
        if sequence.cache is not self:
            raise ArgumentError("seq: got a sequence of another cache, expected one of this cache")
        sequence.pages.check_open()
        return sequence

    def check_layer(self, layer: int) -> int:
        """``layer`` if the cache has it."""
        return check_int("layer", layer, 0, self.num_layers - 1)

    # --- rows ---------------------------------------------------------------------------------------------

    def check_rows(self, k: Any, v: Any) -> tuple[NDArray[Any], NDArray[Any], float]:
        """Stored values k, v (n, kv_heads, head_dim) of new tokens, and max |k|. One token may lack axis 0."""
        want = (self.shape.kv_heads, self.shape.head_dim)
        found = []
        for name, x in (("k", k), ("v", v)):
            array = check_array(name, x)
            if array.ndim not in (2, 3) or array.shape[-2:] != want:
                raise ShapeError(f"{name}: got shape {array.shape}, expected (tokens, {want[0]}, {want[1]})")
            found.append(array[None] if array.ndim == 2 else array)
        if found[0].shape != found[1].shape:
            raise ShapeError(f"v: got shape {found[1].shape}, expected k's {found[0].shape}")
        if len(found[0]) == 0:
            raise ShapeError(f"k: got shape {found[0].shape}, expected at least one token")
        values, largest = rows.stored_values("k", found[0], self.dtype)
        return values, rows.stored_values("v", found[1], self.dtype)[0], largest

    @property
    def row_words(self) -> int:
        """Words of one token's row: K and V of every KV head."""
        return self.shape.kv_heads * 2 * (self.value_words + self.scale_words)

    def append(self, sequence: Sequence, layer: int, k: Any, v: Any) -> None:
        """Append tokens to one layer: k, v (tokens, kv_heads, head_dim), or (kv_heads, head_dim) for one.

        Every layer must get the same tokens before any gets more. A failed call changes nothing.
        """
        with self.lock:
            self.check_sequence(sequence)
            keys, values, largest = self.check_rows(k, v)
            with sequence.pages.reserve(self.check_layer(layer), len(keys)) as reservation:
                self.copy_pages(reservation.copies)
                self.write_rows(sequence, layer, reservation, rows.encode(keys, values, self.dtype))
                self.max_k = max(self.max_k, largest)  # before the commit: too large is safe, too small is not

    def write_rows(self, sequence: Sequence, layer: int, reservation: Reservation, words: NDArray[np.uint32]) -> None:
        """Upload rows (n, kv_heads, words) to where the reservation says."""
        table = sequence.table(reservation)
        most = max(1, ROWS_BYTES // (4 * self.row_words))
        for at in range(0, len(words), most):
            part = words[at : at + most]
            self._move(APPEND_KERNEL, layer, np.arange(len(part)) + reservation.start + at, table, part)

    def read_rows(self, sequence: Sequence, layer: int, begin: int, end: int) -> NDArray[np.uint32]:
        """The rows [begin, end) of a layer as they are stored, (n, kv_heads, words)."""
        table, parts = sequence.table(), []
        most = max(1, ROWS_BYTES // (4 * self.row_words))
        for at in range(begin, end, most):
            positions = np.arange(at, min(at + most, end))
            parts.append(self._move(GATHER_KERNEL, layer, positions, table, None))
        empty = np.zeros((0, self.shape.kv_heads, self.row_words // self.shape.kv_heads), np.uint32)
        return np.concatenate([empty, *parts])

    def copy_pages(self, copies: list[tuple[int, int, int]]) -> None:
        """Copy pages (source, target, ...) of every layer."""
        for source, target, _ in copies:
            for layer in range(self.num_layers):
                buffers, work, recording = self._step(layer)
                work.appends[0] = source, target
                self.device.runtime.write(buffers[0], work.words)
                self.device.runtime.run(recording)

    def set_cache(self, work: Work, shard: Shard) -> None:
        """The header's words about the cache."""
        work.set_shape(self.shape, shard.heads, shard.first)
        work.set(page_shift=self.page_tiles.bit_length() - 1, page_tiles=self.page_tiles)

    def append_spec(self) -> tuple[int, ...]:
        """Specialisation constants of the append and gather kernels."""
        return (self.value_words, self.scale_words, self.value_words // (self.shape.head_dim // CHUNK), self.tile)

    def _move(
        self,
        decl: KernelDecl,
        layer: int,
        positions: NDArray[Any],
        table: NDArray[np.uint32],
        words: NDArray[np.uint32] | None,
    ) -> NDArray[np.uint32]:
        """Run the append or gather kernel for tokens at ``positions``; words are the rows to append."""
        runtime, n = self.device.runtime, len(positions)
        bucket, tables = power_of_two(n), power_of_two(len(table))
        found = np.zeros((0, 0, 0), np.uint32)
        for shard in range(len(self.layers[layer])):
            buffers, work, recording = self._step(layer, decl, shard, bucket, tables)
            work.appends[:n, 0] = positions
            work.appends[n:, 0] = kernels.NO_TOKEN
            work.appends[:, 1] = work.tables_at
            work.tables[: len(table)] = table
            runtime.write(buffers[0], work.words)
            if words is not None:
                runtime.write(buffers[1], words.reshape(-1))
            runtime.run(recording)
            if words is None:
                got = runtime.read(buffers[1])[: n * self.row_words].reshape(n, self.shape.kv_heads, -1)
                heads = self.layers[layer][shard]
                if shard == 0:
                    found = got
                found[:, heads.first : heads.first + heads.heads] = got[:, heads.first : heads.first + heads.heads]
        return found

    def _step(self, layer: int, *key: Any) -> tuple[list[Buffer], Work, Recording]:
        """Buffers, work words and the recording of a page copy (no key), or of an append or a gather.

        key: kernel, shard, rows and page-table words, both powers of two. Made once per key (and layer).
        """
        runtime = self.device.runtime
        if key not in self._rigs:
            self._rigs[key] = self._rig(*key)
        buffers, work = self._rigs[key]
        if (layer, *key) not in self._recordings:
            shards = self.layers[layer]
            if not key:
                kernel = self.device.kernel(COPY_KERNEL, (self.tile_words,))
                steps = [Dispatch(kernel, (buffers[0], s.k, s.v), (1, s.heads, self.page_tiles)) for s in shards]
            else:
                shard = shards[key[1]]
                kernel = self.device.kernel(key[0], self.append_spec())
                steps = [Dispatch(kernel, (buffers[0], buffers[1], shard.k, shard.v), (key[2], shard.heads, 1))]
            self._recordings[(layer, *key)] = runtime.record(steps)
        return buffers, work, self._recordings[(layer, *key)]

    def _rig(self, *key: Any) -> tuple[list[Buffer], Work]:
        runtime = self.device.runtime
        work = Work(0, 0, key[2], key[3]) if key else Work(0, 0, 1, 0)
        buffers = [runtime.buffer(4 * work.words.size, Use.INPUT)]
        if key:
            self.set_cache(work, self.layers[0][key[1]])
            use = Use.INPUT if key[0] is APPEND_KERNEL else Use.OUTPUT
            try:
                buffers.append(runtime.buffer(4 * key[2] * self.row_words, use))
            except BaseException:
                buffers[0].close()
                raise
        return buffers, work


def power_of_two(n: int) -> int:
    """The least power of two that is at least ``n`` and 1."""
    return 1 << max(n - 1, 0).bit_length()


# --- files ---------------------------------------------------------------------------------------------------

FORMAT: Final = "zinc_attn kv cache"
VERSION: Final = "1"
PathLike = str | os.PathLike[str]


class CacheFileError(ArgumentError):
    """A file cannot be written, or is not one that this cache can load; the message names it and what differs."""


def _metadata(cache: KVCache, tokens: int, digest: str) -> dict[str, str]:
    return {
        "format": FORMAT,
        "version": VERSION,
        "shape": str(cache.shape),
        "dtype": cache.dtype,
        "num_layers": str(cache.num_layers),
        "tokens": str(tokens),
        "sha256": digest,
    }


def _row_shape(cache: KVCache, tokens: int) -> list[int]:
    return [tokens, cache.shape.kv_heads, cache.row_words // cache.shape.kv_heads]


def _header(cache: KVCache, tokens: int, digest: str) -> bytes:
    """The file up to its data: the length of a JSON text, and the text. Its size does not depend on ``digest``."""
    size = 4 * tokens * cache.row_words
    entries: dict[str, Any] = {"__metadata__": _metadata(cache, tokens, digest)}
    for layer in range(cache.num_layers):
        offsets = [layer * size, (layer + 1) * size]
        entries[f"layer.{layer}"] = {"dtype": "U32", "shape": _row_shape(cache, tokens), "data_offsets": offsets}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def save(sequence: Sequence, path: PathLike) -> None:
    """Write the len(sequence) tokens that all layers have to ``path``; other calls of the device wait meanwhile.

    The file appears under its name when it is complete; it is readable by its owner alone, as it holds a
    conversation. CacheFileError where the file system refuses, and what a read of the device raises; an older file
    of that name is then as it was.
    """
    target, cache = check_path("path", path), sequence.cache
    with cache.lock:
        cache.check_sequence(sequence)
        try:
            _write(sequence, target)
        except OSError as error:
            raise CacheFileError(f"{target}: cannot be written: {error.strerror or error}") from error


def _write(sequence: Sequence, target: Path) -> None:
    cache, tokens, digest = sequence.cache, len(sequence), hashlib.sha256()
    temporary = Path(tempfile.mktemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent))
    try:
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(_header(cache, tokens, "0" * 64))
            for layer in range(cache.num_layers):
                data = np.ascontiguousarray(cache.read_rows(sequence, layer, 0, tokens), "<u4").tobytes()
                digest.update(data)
                file.write(data)
            file.seek(0)
            file.write(_header(cache, tokens, digest.hexdigest()))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def load(cache: KVCache, path: PathLike) -> Sequence:
    """A new sequence of ``cache`` with the tokens of the file at ``path``.

    CacheFileError: not a file of this format, truncated, damaged, or of another shape, dtype or number of layers;
    CapacityError, LimitError: no room for the tokens or for one more sequence; RuntimeUnavailableError without the
    package safetensors. A failed call leaves the cache as it was.
    """
    target = check_path("path", path)
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise RuntimeUnavailableError(
            "KVCache.load needs the package safetensors, which is not installed; pip install 'zinc-attn[files]'"
        ) from error
    with cache.lock:
        cache.check_open()
        try:
            with safe_open(target, framework="numpy") as file:
                return _read(cache, target, file)
        except SafetensorError as error:
            raise CacheFileError(f"{target}: truncated, or not a safetensors file: {error}") from error
        except OSError as error:
            raise CacheFileError(f"{target}: cannot be read: {error.strerror or error}") from error


def _check(cache: KVCache, target: Path, file: Any) -> tuple[int, str]:
    """(tokens, checksum) of an open file whose header is one that ``cache`` takes."""
    found = file.metadata() or {}
    if found.get("format") != FORMAT:
        raise CacheFileError(f"{target}: format: got {found.get('format')!r}, expected {FORMAT!r}")
    if found.get("version") != VERSION:
        raise CacheFileError(f"{target}: version: got {found.get('version')!r}, expected {VERSION!r}")
    want = _metadata(cache, 0, "")
    differing = [
        f"{name}: got {found.get(name)}, expected {want[name]}, the cache's"
        for name in ("shape", "dtype", "num_layers")
        if found.get(name) != want[name]
    ]
    if differing:
        raise CacheFileError(f"{target}: {'; '.join(differing)}")
    tokens, names = found.get("tokens", ""), [f"layer.{i}" for i in range(cache.num_layers)]
    if not (tokens.isascii() and tokens.isdigit()):
        raise CacheFileError(f"{target}: tokens: got {tokens!r}, expected a number")
    if sorted(file.keys()) != sorted(names):
        raise CacheFileError(f"{target}: got tensors {sorted(file.keys())}, expected {sorted(names)}")
    for name in names:
        part, shape = file.get_slice(name), _row_shape(cache, int(tokens))
        if part.get_dtype() != "U32" or part.get_shape() != shape:
            raise CacheFileError(
                f"{target}: {name}: got {part.get_dtype()} {part.get_shape()}, expected U32 {shape} for {tokens} tokens"
            )
    return int(tokens), found.get("sha256", "")


def _read(cache: KVCache, target: Path, file: Any) -> Sequence:
    tokens, checksum = _check(cache, target, file)
    pages, digest, largest = SequencePages(cache.pool, cache.num_layers), hashlib.sha256(), cache.max_k
    try:
        sequence = cache.adopt(pages)
        for layer in range(cache.num_layers if tokens else 0):
            words = np.ascontiguousarray(file.get_tensor(f"layer.{layer}"), np.uint32)
            digest.update(words.astype("<u4", copy=False).tobytes())
            largest = max(largest, _largest_key(cache, target, layer, words))
            with pages.reserve(layer, tokens) as reservation:
                cache.write_rows(sequence, layer, reservation, words)
        if digest.hexdigest() != checksum:
            raise CacheFileError(
                f"{target}: sha256 of the data: got {digest.hexdigest()}, expected {checksum}; the file is damaged"
            )
        cache.max_k = largest
        return sequence
    except BaseException:
        pages.free()
        for left in [s for s in cache.sequences if s.pages is pages]:
            cache.forget(left)
        raise


def _largest_key(cache: KVCache, target: Path, layer: int, words: NDArray[np.uint32]) -> float:
    """max |k| of a layer's rows, whose values must be such as ``rows.stored_values`` lets in."""
    largest, most = 0.0, max(1, ROWS_BYTES // (4 * cache.row_words))
    for at in range(0, len(words), most):
        with np.errstate(all="ignore"):
            values = np.abs(np.stack(rows.decode(words[at : at + most], cache.shape.head_dim, cache.dtype)))
            fits = (values == 0) | ((values >= MIN_INPUT) & (values <= MAX_INPUT))
        if not np.all(fits):
            raise CacheFileError(
                f"{target}: layer.{layer}: a value that no cache stores in tokens {at} to {at + most - 1}; "
                "the file is damaged"
            )
        largest = max(largest, float(values[0].max()))
    return largest
