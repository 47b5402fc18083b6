"""A sequence of a KVCache in a file: ``save`` and ``load``.

The file is safetensors, one uint32 tensor ``layer.<i>`` (tokens, kv_heads, words) of stored rows per layer, as ``rows``
lays them out: neither page size nor placement is in it, and loading gives the same bits. The metadata name the cache's
shape and types, with the SHA-256 of the layers' data in ascending order. Saving and loading hold one layer in memory.
"""

import hashlib
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..canonical.tensorfile import Header, PathLike, TensorFileError, encode_header, read_header, read_into
from ..checks import check_path, plain
from ..errors import ArgumentError
from ..files import open_regular, refusing, remove_unfinished, replacing
from ..limits import MAX_CONTEXT
from . import rows
from .resident import ResidentRows
from .rows import Largest
from .sequence_pages import SequencePages
from .transaction import Transaction
from .unseen import examine

Made = TypeVar("Made")  # a sequence
FORMAT: Final = "zinc_attn kv cache"
VERSION: Final = "1"
CHECK_BYTES: Final = 4 << 20  # bytes of a layer's rows that are checked together


class CacheFileError(ArgumentError):
    """A file cannot be written, or is not one that this cache can load; the message names it and what differs."""


def _metadata(cache: ResidentRows, tokens: int, digest: str) -> dict[str, str]:
    scales = cache.head_scales
    return {
        **({} if scales is None else {"head_scales": scales.astype("<f4").tobytes().hex()}),
        "format": FORMAT,
        "version": VERSION,
        "shape": str(cache.shape),
        "dtype": cache.dtype,
        "num_layers": str(cache.num_layers),
        "tokens": str(tokens),
        "sha256": digest,
    }


def _row_shape(cache: ResidentRows, tokens: int) -> tuple[int, int, int]:
    return tokens, cache.shape.kv_heads, cache.row.words


def _names(cache: ResidentRows) -> list[str]:
    return [f"layer.{layer}" for layer in range(cache.num_layers)]


# --- saving ------------------------------------------------------------------------------------------------


def save(cache: ResidentRows, pages: SequencePages, path: PathLike) -> None:
    """Write the tokens of a sequence of ``cache`` to ``path``; other calls of the device wait meanwhile.

    The file appears under its name when it is complete. Its owner alone can read it, since it holds a conversation.
    CacheFileError: the file system refuses, or ``path`` is not a regular file; an older file then stays as it was, also
    where a read of the device fails. ArgumentError: ``path`` is no path. StepError: some layers have tokens that others
    lack. ValueRangeError: see ``unseen``.
    """
    target = check_path("path", path)
    with cache.lock:
        cache.check_pages(pages)
        pages.check_in_step("save")
        for layer in range(cache.num_layers):
            examine(cache, pages, layer)
        try:
            _write(cache, pages, target)
        except OSError as error:
            raise CacheFileError(f"{plain(target)}: cannot be written: {error.strerror or error}") from error


def _write(cache: ResidentRows, pages: SequencePages, target: Path) -> None:
    tokens, digest = len(pages), hashlib.sha256()
    tensors = {name: ("U32", _row_shape(cache, tokens)) for name in _names(cache)}
    with replacing(target, 0o600) as file:
        file.write(encode_header(_metadata(cache, tokens, "0" * 64), tensors))
        for layer in range(cache.num_layers):
            words = np.ascontiguousarray(cache.read_pages(pages, layer, 0, tokens), "<u4")
            digest.update(words.data)
            file.write(words.data)
        file.seek(0)
        file.write(encode_header(_metadata(cache, tokens, digest.hexdigest()), tensors))
        file.flush()
        os.fsync(file.fileno())


# --- loading -----------------------------------------------------------------------------------------------


def load(cache: ResidentRows, path: PathLike, make: Callable[[SequencePages], Made]) -> Made:
    """A new sequence of ``cache`` with the tokens of the file at ``path``; ``make`` makes it of its pages.

    The device is free for other calls while the file is read; only the upload of each layer keeps them waiting.
    CacheFileError: not a regular file of this format, truncated, damaged, or of another shape, dtype or number of
    layers; CapacityError, LimitError: no room for the tokens or for one more sequence; ArgumentError: ``path`` is no
    path. A failed call leaves the cache as it was.
    """
    target = check_path("path", path)
    with cache.lock:
        cache.check_open()
    remove_unfinished(target)
    try:
        with refusing(target, "a file of Sequence.save", CacheFileError), open_regular(target) as file:
            return _read(cache, target, file, make)
    except TensorFileError as error:
        raise CacheFileError(f"{plain(target)}: truncated, or not a safetensors file: {error}") from error


def _check(cache: ResidentRows, target: Path, header: Header) -> int:
    """The number of tokens in a file. CacheFileError: ``cache`` takes no such file."""
    metadata, name = header.metadata, plain(target)
    if metadata.get("format") != FORMAT:
        raise CacheFileError(f"{name}: format: got {_quoted(metadata.get('format'))}, expected {FORMAT!r}")
    if metadata.get("version") != VERSION:
        raise CacheFileError(f"{name}: version: got {_quoted(metadata.get('version'))}, expected {VERSION!r}")
    want = _metadata(cache, 0, "")
    differing = [
        f"{key}: got {plain(metadata.get(key))}, expected {want.get(key)}, the cache's"
        for key in ("shape", "dtype", "num_layers", "head_scales")
        if metadata.get(key) != want.get(key)
    ]
    if differing:
        raise CacheFileError(f"{name}: {'; '.join(differing)}")
    digits, names = metadata.get("tokens", ""), _names(cache)
    if not (digits.isascii() and digits.isdigit() and len(digits) <= len(str(MAX_CONTEXT))):
        raise CacheFileError(f"{name}: tokens: got {_quoted(digits)}, expected a number")
    if header.tensors.keys() != set(names):
        raise CacheFileError(f"{name}: got tensors {plain(sorted(header.tensors))}, expected {plain(sorted(names))}")
    shape = _row_shape(cache, int(digits))
    for layer in names:
        tensor = header.tensors[layer]
        if tensor.dtype != "U32" or tensor.shape != shape:
            raise CacheFileError(
                f"{name}: {layer}: got {plain(tensor.dtype)} {plain(list(tensor.shape))}, expected U32 {list(shape)} "
                f"for {digits} tokens"
            )
    return int(digits)


def _quoted(text: str | None) -> str:
    return plain(repr(text))


def _read(cache: ResidentRows, target: Path, file: io.FileIO, make: Callable[[SequencePages], Made]) -> Made:
    header = read_header(file)
    tokens, checksum = _check(cache, target, header), header.metadata.get("sha256", "")
    pages, digest = SequencePages(cache.pool, cache.num_layers), hashlib.sha256()
    try:
        with cache.lock:
            cache.check_open()
            sequence = make(pages)
        for layer, name in enumerate(_names(cache) if tokens else []):
            with cache.lock:  # before a layer is read: a layer without room takes no memory
                transaction = Transaction()
                reservation = transaction.reserve(pages, layer, tokens)
            words = np.empty(_row_shape(cache, tokens), "<u4")
            read_into(file, header.nbytes + header.tensors[name].begin, words.data.cast("B"))
            digest.update(words.data)
            largest = _largest(cache, target, layer, words)
            with cache.lock:
                cache.check_open()
                pages.check_open()  # another thread may have freed it, and the reserved pages may be others' now
                table = np.array(reservation.table, np.uint32)
                cache.write_rows(table, layer, reservation, words.astype(np.uint32, copy=False))
                transaction.commit(largest)
        if digest.hexdigest() != checksum:
            raise CacheFileError(
                f"{plain(target)}: sha256 of the data: got {digest.hexdigest()}, expected {plain(checksum)}; the file "
                "is damaged"
            )
        with cache.lock:
            cache.check_open()
        return sequence
    except BaseException:
        with cache.lock:
            pages.free()
            for left in [s for s in cache.living if s.pages is pages]:
                cache.forget(left)
        raise


def _largest(cache: ResidentRows, target: Path, layer: int, words: NDArray[np.uint32]) -> Largest:
    """The largest magnitudes of a layer's rows. CacheFileError: a value that ``rows.stored_values`` refuses."""
    largest = Largest()
    for part in rows.pieces(len(words), 4 * cache.row_words, CHECK_BYTES):
        part_largest, fits = rows.row_magnitudes(words[part], cache.shape, cache.dtype, cache.scales_of(layer))
        if not fits.all():
            raise CacheFileError(
                f"{plain(target)}: layer.{layer}: a value that no cache stores in tokens {part.start} to "
                f"{part.stop - 1}; the file is damaged"
            )
        largest = largest.maximum(part_largest)
    return largest
