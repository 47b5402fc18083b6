"""One sequence of a KVCache in a file: safetensors, one uint32 tensor of stored rows per layer.

Tensor ``layer.<i>`` (tokens, kv_heads, words) holds a layer's rows as ``rows`` lays them out, so neither page size
nor placement is in the file, and loading gives the same bits. The metadata say what it is of, with the SHA-256 of the
data (all bytes behind the header). Both directions hold one layer in host memory at a time.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import tempfile
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from . import rows
from .cache import ROWS_BYTES, KVCache, Sequence
from .errors import ArgumentError, RuntimeUnavailableError
from .pages import SequencePages
from .shapes import MAX_INPUT, MIN_INPUT

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
    target, cache = Path(path), sequence.cache
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
    target = Path(path)
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
