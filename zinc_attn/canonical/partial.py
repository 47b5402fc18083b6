"""Partial states as values: what pass 1 computes for whole nodes of 512 keys, unnormalized.

``fold`` gives the bits of one device that attends everything, in whatever order the parts come.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ..checks import check_text, plain, shown
from ..errors import ArgumentError
from ..limits import MAX_CONTEXT
from . import constants
from .state import F32, State, fold_ascending, merge, normalize, sink_state
from .tensorfile import LENGTH_BYTES, decimal, decode_header, encode_header, header_size

FORMAT: Final = "zinc_attn partial state"
VERSION: Final = "2"
_TENSORS: Final[dict[str, tuple[np.dtype[Any], str]]] = {  # name: in NumPy, in safetensors
    "nodes": (np.dtype("<i8"), "I64"),
    "m": (np.dtype("<f4"), "F32"),
    "l": (np.dtype("<f4"), "F32"),
    "o": (np.dtype("<f4"), "F32"),
    "sinks": (np.dtype("<f4"), "F32"),
}
MAX_NODES: Final = MAX_CONTEXT // constants.KEYS_PER_NODE
_MAX_M: Final = 3 * constants.MAX_SCORE  # for the roundings of scores, and of a tiny K in blocks
_MIN_L: Final = 0.7  # one key's weight is at least 2**-0.5
_MAX_L: Final = 2.0 * constants.KEYS_PER_NODE  # and at most 2**0.5
_MAX_O: Final = _MAX_L * constants.MAX_INPUT
_MAX_SINK: Final = 2 * constants.MAX_INPUT  # log2(e) times a logit


class PartialStateError(ArgumentError):
    """Partial states do not make up one call: a node is missing or there twice, or a part is of another call."""


def _wrong(got: object, expected: str) -> PartialStateError:
    return PartialStateError(f"partial state: got {got}, expected {expected}")


@dataclass(frozen=True, eq=False)
class PartialState:
    """Unnormalized attention of query rows over some nodes of 512 keys: the canonical fold's operands.

    nodes: (n,) int64, ascending absolute node numbers; m, l: (q_len, n, q_heads), o: (q_len, n, q_heads, head_dim),
    float32, the state of no keys where a row sees none of a node. span: (first, end), the range of nodes that the
    call's rows see. call: names what was attended, so that parts of different calls cannot be folded. sinks: (q_heads,)
    scores in log2 units that join last, or None. Made by ``Attention.partial``.
    """

    nodes: NDArray[np.int64]
    m: F32
    l: F32  # noqa: E741  (the literature's name)
    o: F32
    span: tuple[int, int]
    call: str
    sinks: F32 | None = None

    def __post_init__(self) -> None:
        for name, dtype in (("nodes", "int64"), ("m", "float32"), ("l", "float32"), ("o", "float32")):
            _check_field(name, getattr(self, name), dtype)
        if self.sinks is not None:
            _check_field("sinks", self.sinks, "float32")
        if not isinstance(self.span, tuple) or len(self.span) != 2:
            raise _wrong(f"span {shown(self.span)}", "(first, end), node numbers")
        if any(isinstance(node, bool) or not isinstance(node, int) for node in self.span):
            raise _wrong(f"span {shown(self.span)}", "(first, end), ints")
        check_text("call", self.call, "the name of what was attended")

    def __repr__(self) -> str:
        return f"PartialState({len(self.nodes)} nodes of {self.span}, m {self.m.shape}, o {self.o.shape})"

    @property
    def nbytes(self) -> int:
        """Bytes of m, l and o."""
        return self.m.nbytes + self.l.nbytes + self.o.nbytes

    def to_bytes(self) -> bytes:
        """A safetensors file's bytes: tensors nodes, m, l, o and sinks; the metadata have span, call and a checksum.

        The metadata's sha256 is the digest of these bytes with 64 zeros in its place.
        """
        arrays = self._arrays()
        data = [np.ascontiguousarray(array).tobytes() for array in arrays.values()]
        digest = hashlib.sha256(self._header(arrays, "0" * 64))
        for piece in data:
            digest.update(piece)
        return b"".join((self._header(arrays, digest.hexdigest()), *data))

    def _arrays(self) -> dict[str, NDArray[Any]]:
        arrays: dict[str, NDArray[Any]] = {"nodes": self.nodes, "m": self.m, "l": self.l, "o": self.o}
        return arrays if self.sinks is None else {**arrays, "sinks": self.sinks}

    def _header(self, arrays: dict[str, NDArray[Any]], digest: str) -> bytes:
        span = f"{self.span[0]} {self.span[1]}"
        metadata = {"format": FORMAT, "version": VERSION, "span": span, "call": self.call, "sha256": digest}
        kinds = {name: _TENSORS[name][1] for name in arrays}
        return encode_header(metadata, {name: (kinds[name], array.shape) for name, array in arrays.items()})

    @classmethod
    def from_bytes(cls, data: bytes) -> PartialState:
        """The inverse of ``to_bytes``. PartialStateError for any other bytes."""
        if not isinstance(data, (bytes, bytearray, memoryview)):
            raise _wrong(type(data).__name__, "the bytes that to_bytes gives")
        data = bytes(data)  # a copy, since the owner may change the bytes
        try:
            return cls._decoded(data)
        except PartialStateError:
            raise
        except ValueError as error:  # also a TensorFileError
            got = f"{len(data):,} bytes that do not hold one ({error})"
            raise _wrong(got, "what to_bytes gives") from error

    @classmethod
    def _decoded(cls, data: bytes) -> PartialState:
        size = header_size(data[:LENGTH_BYTES], len(data)) + LENGTH_BYTES
        header = decode_header(data[LENGTH_BYTES:size], len(data) - size)
        metadata = header.metadata
        if (metadata.get("format"), metadata.get("version")) != (FORMAT, VERSION):
            got = f"{plain(metadata.get('format'))!r} version {plain(metadata.get('version'))!r}"
            raise _wrong(got, f"{FORMAT!r} version {VERSION!r}")
        kinds = {name: _TENSORS[name][1] for name in _TENSORS if name != "sinks" or name in header.tensors}
        if {name: tensor.dtype for name, tensor in header.tensors.items()} != kinds:
            raise _wrong(f"tensors {plain(sorted(header.tensors))}", f"{list(kinds)}")
        arrays = {
            name: np.frombuffer(data[size + place.begin : size + place.end], _TENSORS[name][0]).reshape(place.shape)
            for name, place in header.tensors.items()
        }
        first, _, end = metadata.get("span", "").partition(" ")
        state = cls(span=(decimal(first), decimal(end)), call=metadata.get("call", ""), **arrays)
        state.check()
        digest = hashlib.sha256(state._header(arrays, "0" * 64))
        digest.update(memoryview(data)[size:])
        if data[:size] != state._header(arrays, digest.hexdigest()):
            expected = f"{digest.hexdigest()}, and the header that to_bytes writes; the bytes are damaged"
            raise _wrong(f"sha256 {plain(metadata.get('sha256'))}", expected)
        return state

    def check(self) -> None:
        """PartialStateError where the arrays do not fit each other, or hold what no kernel makes."""
        shape = self.o.shape
        for name, array in self._arrays().items():
            if array.dtype != _TENSORS[name][0]:
                raise _wrong(f"{name} of {array.dtype}", f"{_TENSORS[name][0]}")
        if self.o.ndim != 4 or self.m.shape != shape[:3] or self.l.shape != shape[:3] or self.nodes.shape != shape[1:2]:
            got = f"m {self.m.shape}, l {self.l.shape}, o {shape}, nodes {self.nodes.shape}"
            raise _wrong(got, "(q_len, n, q_heads), twice, (q_len, n, q_heads, head_dim) and (n,)")
        if 0 in (shape[0], *shape[2:]):
            raise _wrong(f"o {shape}", "at least one query row, query head and head dimension")
        first, end = self.span
        if not 0 <= first <= end <= MAX_NODES:
            raise _wrong(f"span {plain(self.span)}", f"(first, end), at most {MAX_NODES} nodes")
        if np.any(self.nodes[1:] <= self.nodes[:-1]) or np.any(self.nodes < first) or np.any(self.nodes >= end):
            raise _wrong(f"nodes {plain(self.nodes.tolist())}", f"ascending numbers from {first} to {end - 1}")
        if self.sinks is not None and self.sinks.shape != shape[2:3]:
            raise _wrong(f"sinks {self.sinks.shape}", f"{shape[2:3]}, one per head")
        self._check_values()

    def _check_values(self) -> None:
        """PartialStateError for numbers that no kernel makes: l and o of a state are sums of at most 512 weights."""
        if not isinstance(self.call, str) or not self.call.isprintable():
            raise _wrong(f"call {plain(repr(self.call))}", "a printable text")
        if self.sinks is not None and not np.all(np.abs(self.sinks) <= _MAX_SINK):  # NaN is not, either
            raise _wrong(f"sinks {plain(self.sinks.tolist())}", "at most 2**61")
        empty = self.m == np.float32(constants.EMPTY_M)
        for name, x, most in (("m", self.m, _MAX_M), ("l", self.l, _MAX_L), ("o", self.o, _MAX_O)):
            size = np.where(empty, np.float32(0), x) if name == "m" else x
            least, largest = (size.min(), size.max()) if size.size else (np.float32(0), np.float32(0))  # NaN, if in x
            if not (least >= (0 if name == "l" else -most) and largest <= most):
                expected = f"finite numbers {'from 0 to' if name == 'l' else 'of a magnitude up to'} {most:g}"
                raise _wrong(f"{name} from {least:g} to {largest:g}", expected)
        if np.any(self.m != np.rint(self.m)):
            raise _wrong("an m that is no integer", "integers in log2 units")
        if np.any(empty != (self.l == 0)) or np.any(self.l[~empty] < _MIN_L) or np.any(self.o[empty] != 0):
            expected = f"at least {_MIN_L:g}; in a state of no keys, m = {constants.EMPTY_M:g}, l and o are 0"
            raise _wrong("an l that does not fit its m", expected)


def _check_field(name: str, value: Any, dtype: str) -> None:
    """Refuse a value that is no plain array of a native dtype; ``PartialState.check`` looks at shapes and values."""
    if not isinstance(value, np.ndarray) or isinstance(value, np.ma.MaskedArray) or value.dtype != np.dtype(dtype):
        got = f"an array of {value.dtype}" if isinstance(value, np.ndarray) else shown(value)
        raise _wrong(f"{name} {got}", f"a plain array of {dtype}")


def gather(parts: Iterable[PartialState]) -> PartialState:
    """One state of all nodes of a call from the parts in any order. PartialStateError: see there."""
    single = isinstance(parts, (PartialState, np.ndarray)) or not isinstance(parts, Iterable)
    states: list[Any] = [] if single else list(parts)
    if not states or not all(isinstance(part, PartialState) for part in states):
        got = ", ".join(sorted({type(part).__name__ for part in states})) or "none"
        got = f"one {type(parts).__name__}" if single else got
        raise PartialStateError(f"partial states: got {got}, expected a list of the PartialStates of one call")
    sample = states[0]
    for other in states:
        other.check()
        if (other.call, other.span, other.o.shape[2:]) != (sample.call, sample.span, sample.o.shape[2:]):
            raise PartialStateError(
                f"partial states: got parts of different calls: {sample.call[:12]} with nodes {sample.span} and "
                f"{other.call[:12]} with nodes {other.span}, expected one query, one sequence and one scoring"
            )
    nodes = np.concatenate([part.nodes for part in states])
    numbers, counts = np.unique(nodes, return_counts=True)
    if np.any(counts > 1):
        raise PartialStateError(f"partial states: got node {numbers[counts > 1][0]} more than once, expected it once")
    first, end = sample.span
    if numbers.size < end - first:  # time and memory follow the nodes that are held, not the span
        jumps = np.flatnonzero(np.diff(numbers) != 1)
        missing = first
        if numbers.size and numbers[0] == first:
            missing = int(numbers[jumps[0] if jumps.size else -1]) + 1
        raise PartialStateError(
            f"partial states: node {missing} is missing ({end - first - numbers.size} in all), expected every node "
            f"from {first} to {end - 1}"
        )
    order = np.argsort(nodes)
    m, total, o = (np.concatenate([getattr(part, x) for part in states], axis=1)[:, order] for x in "mlo")
    return PartialState(nodes[order], m, total, o, sample.span, sample.call, sample.sinks)


def fold(parts: Iterable[PartialState]) -> tuple[F32, F32]:
    """out (q_len, q_heads, head_dim) and lse (q_len, q_heads), float32, from the parts of a call, in any order.

    The bits are those of ``Attention`` on one device; ``Fold`` does the same on a device. PartialStateError: nodes
    missing, twice, or of another call.
    """
    whole = gather(parts)
    q_len, head_dim = len(whole.o), whole.o.shape[-1]
    total = fold_ascending(State(*(x.swapaxes(0, 1) for x in (whole.m, whole.l, whole.o))))
    if whole.sinks is not None:
        total = merge(total, sink_state(np.repeat(whole.sinks[None], q_len, axis=0), head_dim))
    return normalize(total)
