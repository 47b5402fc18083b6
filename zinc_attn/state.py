"""Attention states as values: canonical partial states, and FlashInfer's normalised ones.

``PartialState`` holds what pass 1 computes for whole nodes of 512 keys, unnormalised; ``fold`` gives the bits of one
device attending everything, in whatever order and from wherever the parts come.

``merge_state`` and ``merge_states`` take (v, s), s = natural log-sum-exp. They are accurate (float64 inside) but not
bit-canonical: the result rounds once per merge, so the order shows in the last bits. A state of no keys has v = 0 and
s = -inf and changes nothing.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from .errors import ArgumentError, DTypeError, ShapeError
from .reference import State, empty_state, finish, merge, sink_state

F32 = NDArray[np.float32]
FORMAT: Final = "zinc_attn partial state"
VERSION: Final = "1"


class PartialStateError(ArgumentError):
    """Partial states do not make up one call: a node is missing or there twice, or a part is of another call."""


@dataclass(frozen=True, eq=False)
class PartialState:
    """Unnormalised attention of query rows over some nodes of 512 keys: the canonical fold's operands.

    nodes: (n,) int64, ascending absolute node numbers; m, l: (q_len, n, q_heads), o: (q_len, n, q_heads, head_dim),
    float32, the state of no keys where a row sees none of a node. span: (first, end), the nodes that the rows of the
    call see in all. call: names what was attended, so that parts of different calls cannot be folded. sinks: (q_heads,)
    scores in log2 units that join last, or None. Made by ``Attention.partial``.
    """

    nodes: NDArray[np.int64]
    m: F32
    l: F32  # noqa: E741  (the literature's name)
    o: F32
    span: tuple[int, int]
    call: str
    sinks: F32 | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of m, l and o."""
        return self.m.nbytes + self.l.nbytes + self.o.nbytes

    def to_bytes(self) -> bytes:
        """A safetensors file's bytes: tensors nodes, m, l, o and sinks; span and call in the metadata."""
        arrays: dict[str, NDArray[Any]] = {"nodes": self.nodes, "m": self.m, "l": self.l, "o": self.o}
        if self.sinks is not None:
            arrays["sinks"] = self.sinks
        metadata = {"format": FORMAT, "version": VERSION, "span": f"{self.span[0]} {self.span[1]}", "call": self.call}
        entries: dict[str, Any] = {"__metadata__": metadata}
        at = 0
        for name, array in arrays.items():
            kind = "I64" if name == "nodes" else "F32"
            entries[name] = {"dtype": kind, "shape": list(array.shape), "data_offsets": [at, at + array.nbytes]}
            at += array.nbytes
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        data = (np.ascontiguousarray(array).tobytes() for array in arrays.values())
        return b"".join((struct.pack("<Q", len(text)), text, *data))

    @classmethod
    def from_bytes(cls, data: bytes) -> PartialState:
        """The inverse of ``to_bytes``. PartialStateError for anything else."""
        try:
            (size,) = struct.unpack_from("<Q", data)
            entries = json.loads(data[8 : 8 + size])
            metadata = entries.pop("__metadata__")
            if (metadata["format"], metadata["version"]) != (FORMAT, VERSION):
                raise PartialStateError(
                    f"partial state: got {metadata['format']!r} version {metadata['version']!r}, expected {FORMAT!r} "
                    f"version {VERSION!r}"
                )
            arrays = {}
            for name, entry in entries.items():
                begin, end = entry["data_offsets"]
                piece = data[8 + size + begin : 8 + size + end]
                kind = np.dtype("<i8" if entry["dtype"] == "I64" else "<f4")
                arrays[name] = np.frombuffer(piece, kind).reshape(entry["shape"])
            first, end = map(int, metadata["span"].split())
            state = cls(span=(first, end), call=str(metadata["call"]), **arrays)
            state.check()
        except (struct.error, KeyError, TypeError, ValueError, AttributeError) as error:
            if isinstance(error, PartialStateError):
                raise
            raise PartialStateError(
                f"partial state: got {len(data):,} bytes that do not hold one ({error}), expected what to_bytes gives"
            ) from error
        return state

    def check(self) -> None:
        """PartialStateError where the arrays do not fit each other."""
        shape = self.o.shape
        if self.o.ndim != 4 or self.m.shape != shape[:3] or self.l.shape != shape[:3] or self.nodes.shape != shape[1:2]:
            raise PartialStateError(
                f"partial state: got m {self.m.shape}, l {self.l.shape}, o {shape}, nodes {self.nodes.shape}, expected "
                "(q_len, n, q_heads), twice, (q_len, n, q_heads, head_dim) and (n,)"
            )
        first, end = self.span
        if np.any(self.nodes[1:] <= self.nodes[:-1]) or np.any(self.nodes < first) or np.any(self.nodes >= end):
            raise PartialStateError(
                f"partial state: got nodes {list(self.nodes)}, expected ascending numbers from {first} to {end - 1}"
            )


def gather(parts: Iterable[PartialState]) -> PartialState:
    """One state of all nodes of a call from the parts in any order. PartialStateError: see there."""
    found = list(parts)
    if not found:
        raise PartialStateError("partial states: got none, expected those of one call")
    one = found[0]
    for other in found:
        other.check()
        if (other.call, other.span, other.o.shape[2:]) != (one.call, one.span, one.o.shape[2:]):
            raise PartialStateError(
                f"partial states: got parts of different calls: {one.call[:12]} with nodes {one.span} and "
                f"{other.call[:12]} with nodes {other.span}, expected one query, one sequence and one scoring"
            )
    nodes = np.concatenate([part.nodes for part in found])
    numbers, counts = np.unique(nodes, return_counts=True)
    if np.any(counts > 1):
        raise PartialStateError(f"partial states: got node {numbers[counts > 1][0]} more than once, expected it once")
    missing = np.setdiff1d(np.arange(*one.span), numbers)
    if missing.size:
        raise PartialStateError(
            f"partial states: node {missing[0]} is missing ({missing.size} in all), expected every node from "
            f"{one.span[0]} to {one.span[1] - 1}"
        )
    order = np.argsort(nodes)
    m, total, o = (np.concatenate([getattr(part, x) for part in found], axis=1)[:, order] for x in "mlo")
    return PartialState(nodes[order], m, total, o, one.span, one.call, one.sinks)


def fold(parts: Iterable[PartialState]) -> tuple[F32, F32]:
    """out (q_len, q_heads, head_dim) and lse (q_len, q_heads), float32, from the parts of a call, in any order.

    The bits are those of ``Attention`` on one device. PartialStateError: nodes missing, twice, or of another call.
    """
    whole = gather(parts)
    q_len, _, q_heads, head_dim = whole.o.shape
    total = empty_state((q_len, q_heads), head_dim)
    for i in range(whole.nodes.size):
        total = merge(total, State(whole.m[:, i], whole.l[:, i], whole.o[:, i]))
    if whole.sinks is not None:
        total = merge(total, sink_state(np.repeat(whole.sinks[None], q_len, axis=0), head_dim))
    return finish(total)


def _float_array(name: str, x: Any, ndim: int, axes: str) -> NDArray[Any]:
    array = np.asarray(x)
    if array.ndim != ndim:
        raise ShapeError(f"{name}: got shape {array.shape}, expected {axes}")
    if array.dtype not in (np.float16, np.float32, np.float64):
        raise DTypeError(f"{name}: got dtype {array.dtype}, expected float16, float32 or float64")
    return array


def merge_state(v_a: Any, s_a: Any, v_b: Any, s_b: Any) -> tuple[F32, F32]:
    """Merge the attention of two disjoint key sets.

    v_a, v_b: (seq, heads, head_dim) normalised outputs; s_a, s_b: (seq, heads) natural lse. Returns float32 (v, s)
    of the union. Source: FlashInfer's attention states (Ye et al. 2024).
    """
    a = _float_array("v_a", v_a, 3, "(seq, heads, head_dim)")
    b = _float_array("v_b", v_b, 3, "(seq, heads, head_dim)")
    if a.shape != b.shape:
        raise ShapeError(f"v_b: got shape {b.shape}, expected v_a's {a.shape}")
    s1 = _float_array("s_a", s_a, 2, "(seq, heads)")
    s2 = _float_array("s_b", s_b, 2, "(seq, heads)")
    if s1.shape != a.shape[:2] or s2.shape != a.shape[:2]:
        raise ShapeError(f"s_a, s_b: got shapes {s1.shape}, {s2.shape}, expected v_a's first two axes {a.shape[:2]}")
    return merge_states(np.stack([a, b], axis=1), np.stack([s1, s2], axis=1))


def merge_states(v: Any, s: Any) -> tuple[F32, F32]:
    """Merge n states per row: v (seq, n, heads, head_dim), s (seq, n, heads). Returns (seq, heads, ...) float32."""
    values = _float_array("v", v, 4, "(seq, n, heads, head_dim)").astype(np.float64)
    lse = _float_array("s", s, 3, "(seq, n, heads)").astype(np.float64)
    if lse.shape != values.shape[:3]:
        raise ShapeError(f"s: got shape {lse.shape}, expected v's first three axes {values.shape[:3]}")
    if values.shape[1] == 0:
        raise ShapeError(f"v: got shape {values.shape}, expected at least one state (axis n)")
    top = lse.max(axis=1, keepdims=True)
    finite_top = np.where(np.isneginf(top), 0.0, top)
    w = np.exp(lse - finite_top)
    total = w.sum(axis=1)
    safe = np.where(total > 0.0, total, 1.0)
    out = (values * w[..., None]).sum(axis=1) / safe[..., None]
    with np.errstate(divide="ignore"):
        merged = np.log(total) + finite_top[:, 0]
    return out.astype(np.float32), merged.astype(np.float32)
