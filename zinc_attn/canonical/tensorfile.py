"""The safetensors container, written and read strictly with the standard library: an 8-byte length, JSON, data.

Files are read and never mapped, so that an error, not a signal, tells of a file that another process cuts short.
The reader checks sizes, places and numbers before it takes memory for them.
"""

import io
import json
import math
import os
import struct
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from ..checks import plain
from ..errors import ArgumentError
from ..files import INTEGER_DIGITS, no_integer, parse_json

LENGTH_BYTES: Final = 8  # of the header's length, before the header
HEADER_BYTES: Final = 16 << 20  # longest header that is read, that of about 150,000 tensors
ITEM_BYTES: Final = {"U32": 4, "F32": 4, "I64": 8}
PathLike = str | os.PathLike[str]


class TensorFileError(ArgumentError):
    """Bytes are not a whole safetensors file; the message says why. Readers raise it as an error of their own."""


class Tensor(NamedTuple):
    """A tensor's place: ``begin`` and ``end`` count from the end of the header."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class Header:
    """The part before the data. nbytes: its bytes, the length included; tensors fill the rest of the file."""

    metadata: dict[str, str]
    tensors: dict[str, Tensor]
    nbytes: int


def encode_header(metadata: Mapping[str, str], tensors: Mapping[str, tuple[str, Seq[int]]]) -> bytes:
    """The bytes before the data of ``tensors``, name to (dtype, shape), which follow each other in this order.

    The number of bytes depends on the lengths of the metadata's values, not on what they say.
    """
    entries: dict[str, Any] = {"__metadata__": dict(metadata)}
    offset = 0
    for name, (dtype, shape) in tensors.items():
        end = offset + ITEM_BYTES[dtype] * math.prod(shape)
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def header_size(start: bytes, total: int) -> int:
    """Bytes of the JSON text, from the first 8 bytes of ``total`` bytes. TensorFileError where that cannot be."""
    if len(start) < LENGTH_BYTES:
        raise TensorFileError(f"got {len(start)} bytes, expected at least {LENGTH_BYTES}")
    (size,) = struct.unpack_from("<Q", start)
    most = min(HEADER_BYTES, total - LENGTH_BYTES)
    if size > most:
        raise TensorFileError(f"got a header of {size:,} bytes, expected at most {most:,}")
    return int(size)


def decode_header(text: bytes, data_bytes: int) -> Header:
    """The header whose JSON is ``text``, before ``data_bytes`` bytes of data. TensorFileError: see there."""
    try:
        entries = parse_json(
            text.decode(), object_pairs_hook=_object, parse_float=no_integer, parse_constant=no_integer
        )
    except ValueError as error:
        raise TensorFileError(f"got a header that is not JSON of this kind: {plain(str(error))}") from None
    if not isinstance(entries, dict):
        raise TensorFileError(f"got a header of type {type(entries).__name__}, expected an object")
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise TensorFileError("got __metadata__ of another form, expected an object of strings")
    tensors = {name: _tensor(name, entry) for name, entry in entries.items()}
    offset = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        if tensor.begin != offset:
            raise TensorFileError(f"got tensor {plain(name)} at byte {tensor.begin:,}, expected it at {offset:,}")
        offset = tensor.end
    if offset != data_bytes:
        raise TensorFileError(f"got {data_bytes:,} bytes of data, expected {offset:,}")
    return Header(metadata, tensors, LENGTH_BYTES + len(text))


def decimal(text: str) -> int:
    """The number that ``text`` from a file writes in digits. TensorFileError for anything else."""
    if not (text.isascii() and text.isdigit() and len(text) <= INTEGER_DIGITS):
        raise TensorFileError(f"got {plain(repr(text))}, expected a number of at most {INTEGER_DIGITS} digits")
    return int(text)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) != len(pairs):
        raise ValueError("a name is there more than once")
    return entries


def _tensor(name: str, entry: Any) -> Tensor:
    if isinstance(entry, dict) and entry.keys() == {"dtype", "shape", "data_offsets"}:
        dtype, shape, place = entry["dtype"], entry["shape"], entry["data_offsets"]
        if isinstance(dtype, str) and _sizes(shape) and _sizes(place) and len(place) == 2:
            begin, end = place
            wanted = ITEM_BYTES.get(dtype, 0) * math.prod(shape)
            if begin <= end and (dtype not in ITEM_BYTES or end - begin == wanted):
                return Tensor(dtype, tuple(shape), begin, end)
    raise TensorFileError(f"got tensor {plain(name)} with another entry than a dtype, a shape and offsets that fit it")


def _sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(n) is int and n >= 0 for n in value)


# --- files -------------------------------------------------------------------------------------------------


def read_into(file: io.FileIO, offset: int, data: memoryview) -> None:
    """Fill ``data`` with the file's bytes from ``offset`` on. TensorFileError where the file ends before."""
    file.seek(offset)
    got = 0
    while got < len(data):
        count = file.readinto(data[got:])
        if not count:
            ended = f"it ended at byte {offset + got:,} while it was read"
            raise TensorFileError(f"{ended}, expected {offset + len(data):,} bytes")
        got += count


def read_header(file: io.FileIO) -> Header:
    """The header of an open file, from its first byte on. TensorFileError: see there."""
    total = os.fstat(file.fileno()).st_size
    start = bytearray(min(LENGTH_BYTES, total))
    read_into(file, 0, memoryview(start))
    text = bytearray(header_size(bytes(start), total))
    read_into(file, LENGTH_BYTES, memoryview(text))
    return decode_header(bytes(text), total - LENGTH_BYTES - len(text))
