"""The split rule: from the context length and the compute units to a layout of work. Integer arithmetic on the host.

A plan says which workgroup attends which nodes of 512 keys. Every node has a state of its own, whichever workgroup
makes it, so the output bits are the same for every plan (docs/determinism.md), and the rule follows performance alone.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import numpy as np

from ..canonical.constants import KEYS_PER_NODE
from ..checks import check_int, shown
from ..errors import ArgumentError
from ..kernels.split_rule import SPLIT_RULE
from ..limits import MAX_CONTEXT
from ..shapes import AttnShape

PLAN_VERSION: Final = 4


@dataclass(frozen=True)
class SplitPlan:
    """A layout of one attention call. Built by ``plan_splits`` or ``SplitPlan.fixed``.

    context_len: keys; boundaries: num_splits + 1 ascending key positions from begin to context_len, between which they
    are multiples of 512. begin: no row sees a key before it (a window).
    """

    context_len: int
    shape: AttnShape
    boundaries: tuple[int, ...]
    q_len: int = 1
    begin: int = 0

    def __post_init__(self) -> None:
        for name, value in (
            ("context_len", check_int("context_len", self.context_len, 0, MAX_CONTEXT)),
            ("q_len", check_int("q_len", self.q_len, 1)),
            ("begin", check_int("begin", self.begin, 0, max(self.context_len, 0))),
            ("boundaries", _positions(self.boundaries)),
        ):
            object.__setattr__(self, name, value)  # NumPy integers become Python's
        if not isinstance(self.shape, AttnShape):
            raise ArgumentError(f"shape: got {shown(self.shape)}, expected an AttnShape")
        b = self.boundaries
        ordered = len(b) > 1 and b[0] == self.begin and b[-1] == self.context_len and list(b) == sorted(b)
        if not ordered or any(x % KEYS_PER_NODE for x in b[1:-1]):
            raise ArgumentError(
                f"boundaries: got {_short(b)}, expected ascending key positions from begin = {self.begin} to "
                f"context_len = {self.context_len}, and between them multiples of {KEYS_PER_NODE}"
            )

    @classmethod
    def fixed(
        cls,
        context_len: int,
        shape: AttnShape,
        *,
        num_splits: int | None = None,
        split_size: int | None = None,
        q_len: int = 1,
        window: int | None = None,
    ) -> SplitPlan:
        """A layout of ``num_splits`` even splits, or of splits of ``split_size`` keys; any positive number is legal.

        A split is whole nodes of 512 keys: there are at most as many splits as nodes, and a size is rounded up to
        nodes. window: keys a row sees at most, its own included; the layout divides the keys that some row sees.
        """
        if (num_splits is None) == (split_size is None):
            raise ArgumentError(
                f"num_splits, split_size: got {shown(num_splits)}, {shown(split_size)}, expected exactly one of the two"
            )
        context_len, q_len = check_int("context_len", context_len, 0, MAX_CONTEXT), check_int("q_len", q_len, 1)
        begin = first_seen(context_len, q_len, window)
        first, end = begin // KEYS_PER_NODE, -(-context_len // KEYS_PER_NODE)
        if num_splits is not None:
            return cls._even(context_len, shape, check_int("num_splits", num_splits, 1), q_len, begin)
        size = -(-check_int("split_size", split_size, 1) // KEYS_PER_NODE)
        inner = (node * KEYS_PER_NODE for node in range((first // size + 1) * size, end, size))
        return cls(context_len, shape, (begin, *inner, context_len), q_len, begin)

    @classmethod
    def _even(cls, context_len: int, shape: AttnShape, splits: int, q_len: int, begin: int) -> SplitPlan:
        """At most ``splits`` splits, whose sizes differ by one node."""
        first, end = begin // KEYS_PER_NODE, -(-context_len // KEYS_PER_NODE)
        splits = max(min(splits, end - first), 1)
        inner = ((first + i * (end - first) // splits) * KEYS_PER_NODE for i in range(1, splits))
        return cls(context_len, shape, (begin, *inner, context_len), q_len, begin)

    @property
    def num_splits(self) -> int:
        """Number of splits."""
        return len(self.boundaries) - 1

    @property
    def first_node(self) -> int:
        """The node that holds key ``begin``: that of a row's first partial state."""
        return self.begin // KEYS_PER_NODE

    @property
    def states(self) -> int:
        """Partial states per query row and head: the nodes that some row sees."""
        return -(-self.context_len // KEYS_PER_NODE) - self.first_node

    def node_ranges(self) -> list[tuple[int, int]]:
        """Nodes [begin, end) of each split."""
        starts = -(-np.array(self.boundaries, np.int64) // KEYS_PER_NODE)
        starts[0] = self.first_node
        return list(pairwise(starts.tolist()))

    @property
    def passes(self) -> int:
        """1 if each row has exactly one state, which pass 1 makes the output, otherwise 2."""
        return 1 if self.states == 1 else 2

    @property
    def workgroups(self) -> int:
        """Workgroups of pass 1."""
        return min(self.num_splits, self.states) * self.shape.kv_heads * self.shape.head_chunks * self.q_len

    @property
    def scratch_bytes(self) -> int:
        """Bytes of the partial states (m, l, o per state, query head and row), float32."""
        if self.passes == 1:
            return 0
        return 4 * self.states * self.q_len * self.shape.q_heads * (self.shape.v_dim + 2)

    def to_dict(self) -> dict[str, Any]:
        """A JSON-serializable form, complete."""
        return {
            "version": PLAN_VERSION,
            "context_len": self.context_len,
            "shape": self.shape.to_dict(),
            "boundaries": list(self.boundaries),
            "q_len": self.q_len,
            "begin": self.begin,
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> SplitPlan:
        """The inverse of ``to_dict``. ArgumentError for an unknown version or a missing or unknown key."""
        keys = {"version", "context_len", "shape", "boundaries", "q_len", "begin"}
        if not isinstance(data, dict) or set(data) != keys:
            got = sorted(map(str, data)) if isinstance(data, dict) else data
            raise ArgumentError(f"SplitPlan.from_dict: got keys {shown(got)}, expected {sorted(keys)}")
        version, shape = data["version"], data["shape"]
        if not isinstance(version, int) or isinstance(version, bool) or version != PLAN_VERSION:
            raise ArgumentError(f"SplitPlan.from_dict: got version {shown(version)}, expected {PLAN_VERSION}")
        heads = {"q_heads", "kv_heads", "head_dim"}
        if not isinstance(shape, dict) or set(shape) not in (heads, {*heads, "v_head_dim", "latent"}):
            raise ArgumentError(
                f"SplitPlan.from_dict: got shape {shown(shape)}, expected a dict of q_heads, kv_heads and head_dim, "
                "and of v_head_dim and latent where V is not like K"
            )
        if "v_head_dim" in shape:  # for which AttnShape, unlike a file, may have None
            check_int("AttnShape.v_head_dim", shape["v_head_dim"], 1)
        return cls(data["context_len"], AttnShape(**shape), data["boundaries"], data["q_len"], data["begin"])

    def fingerprint(self) -> str:
        """SHA-256 of the plan's canonical JSON: equal plans, and only those, have equal fingerprints."""
        text = json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


def plan_splits(
    context_len: int, shape: AttnShape, compute_units: int = 64, q_len: int = 1, window: int | None = None
) -> SplitPlan:
    """The layout for ``context_len`` keys by the split rule (``kernels.split_rule``).

    compute_units: of the device (64 for a Radeon AI PRO R9700); q_len: query rows of the call; window: keys a row sees
    at most, its own included. Splits are monotone in context_len.
    Idea: Flash-Decoding (Dao, Haziza, Massa, Sizov 2023); no split below a useful size, as FlashInfer plans.
    """
    context_len = check_int("context_len", context_len, 0, MAX_CONTEXT)
    compute_units = check_int("compute_units", compute_units, 1)
    q_len = check_int("q_len", q_len, 1)
    begin = first_seen(context_len, q_len, window)
    if not isinstance(shape, AttnShape):
        raise ArgumentError(f"shape: got {shown(shape)}, expected an AttnShape")
    nodes = -(-context_len // KEYS_PER_NODE) - begin // KEYS_PER_NODE
    return SplitPlan._even(context_len, shape, splits_of(nodes, shape, compute_units, q_len), q_len, begin)


def splits_of(nodes: int, shape: AttnShape, compute_units: int, q_len: int) -> int:
    """The rule's splits of so many nodes, for checked arguments."""
    return SPLIT_RULE.values(nodes, compute_units, shape.kv_heads, shape.head_chunks, q_len)["SPLITS"]


def first_seen(context_len: int, q_len: int, window: int | None) -> int:
    """The lowest key that some row sees: the first of q_len rows' window begins there. 0 without a window."""
    if window is None:
        return 0
    return max(context_len - q_len + 1 - check_int("window", window, 1), 0)


def _positions(values: Any) -> tuple[int, ...]:
    """Key positions as Python's ints. ArgumentError: the first value that is no position."""
    if not isinstance(values, (tuple, list, np.ndarray)) or getattr(values, "ndim", 1) != 1:
        raise ArgumentError(f"boundaries: got {shown(values)}, expected a sequence of key positions")
    ints = isinstance(values, tuple) and set(map(type, values)) == {int}  # as fixed and plan_splits make them
    if ints and min(values) >= 0 and max(values) <= MAX_CONTEXT:
        return tuple(values)
    return tuple(check_int("boundaries", value, 0, MAX_CONTEXT) for value in values)


def _short(values: tuple[int, ...]) -> str:
    return str(values) if len(values) <= 8 else f"({', '.join(map(str, values[:4]))}, ... {values[-1]})"
