"""The split rule: from the context length and the compute units to a layout of work. Integer arithmetic on the host.

A plan says which workgroup computes which partial states. The output bits are the same for every plan
(docs/determinism.md), so the rule follows performance alone. Keys form leaves of 64 and nodes of 512, and no split is
smaller than a leaf.

docs/cli.md has the rule for GPUs, with the table of contexts and the target of workgroups of one wave. The sizes of two
splits differ by at most one leaf, or by one node where states are per node.

On a CPU device a split is one leaf as long as leaves * q_len is at most 4,096, because the straight-line build of
pass 1 is the fastest there. Beyond that there are min(nodes, target) splits, with a state per node. ``Attention`` asks
the rule for at most 32 query rows, and cuts more of them into submissions of at most 4,096 states.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import numpy as np

from ..canonical.constants import KEYS_PER_LEAF, KEYS_PER_NODE, LEAVES_PER_NODE
from ..checks import check_bool, check_int, check_text, shown
from ..dtypes import storage_dtype
from ..errors import ArgumentError, LimitError
from ..kernels.declarations import Build
from ..kernels.tuning import LayoutFacts, heads_together
from ..limits import MAX_CONTEXT
from ..shapes import AttnShape
from ..storage import storage_types

SINGLE_SPLIT_KEYS: Final = 128  # up to here one workgroup per head group is as fast as two passes
NODE_KEYS: Final = 65536  # from here partial states per leaf cost more than idle compute units
WORKGROUPS_PER_UNIT: Final = 8
# The nodes of NODE_KEYS keys: the number of splits does not fall where states are no longer per leaf.
MAX_LEAF_SPLITS: Final = NODE_KEYS // (KEYS_PER_LEAF * LEAVES_PER_NODE)
MAX_CPU_STATES: Final = 4096  # per-leaf states of a call that a CPU device is given: they stay within its caches
CPU_ROWS: Final = 32  # query rows of a submission, on a CPU device, for which the rule is asked where there are more
# On a GPU: workgroups that a compute unit needs for keys that rows share.
SHARED_PER_UNIT: Final[dict[Build, int]] = {"single": 4, "node": 1, "loop": 4}
SHARED_LEAVES: Final = 32  # on a CPU: leaves of workgroups' work that sharing must save to pay for its dispatch
MAX_SPLITS: Final = MAX_CONTEXT // KEYS_PER_LEAF  # of a fixed layout
PLAN_VERSION: Final = 3


@dataclass(frozen=True)
class SplitPlan:
    """A layout of one attention call. Built by ``plan_splits`` or ``SplitPlan.fixed``.

    context_len: keys; boundaries: num_splits + 1 ascending key positions from begin to context_len, any integers;
    leaves_per_state: leaves per emitted partial state, 1 or 8. A unit belongs to the split in which it starts, that of
    ``begin`` to the first. begin: keys before it are seen by no row (a window), and their leaves are not read.
    """

    context_len: int
    shape: AttnShape
    boundaries: tuple[int, ...]
    leaves_per_state: int
    q_len: int = 1
    begin: int = 0

    def __post_init__(self) -> None:
        for name, value in (
            ("context_len", check_int("context_len", self.context_len, 0, MAX_CONTEXT)),
            ("q_len", check_int("q_len", self.q_len, 1)),
            ("begin", check_int("begin", self.begin, 0, max(self.context_len, 0))),
            ("leaves_per_state", check_int("leaves_per_state", self.leaves_per_state, 1, LEAVES_PER_NODE)),
            ("boundaries", _positions(self.boundaries)),
        ):
            object.__setattr__(self, name, value)  # NumPy integers become Python's
        if not isinstance(self.shape, AttnShape):
            raise ArgumentError(f"shape: got {shown(self.shape)}, expected an AttnShape")
        if self.leaves_per_state not in (1, LEAVES_PER_NODE):
            raise ArgumentError(f"leaves_per_state: got {self.leaves_per_state!r}, expected 1 or {LEAVES_PER_NODE}")
        b = self.boundaries
        if len(b) < 2 or b[0] != self.begin or b[-1] != self.context_len or list(b) != sorted(b):
            raise ArgumentError(
                f"boundaries: got {_short(b)}, expected ascending key positions from begin = {self.begin} to "
                f"context_len = {self.context_len}"
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

        At most MAX_SPLITS splits: no context has more leaves, and a split without a leaf has no work. window: keys a
        row sees at most, its own included; the layout divides those that some row sees.
        """
        context_len = check_int("context_len", context_len, 0, MAX_CONTEXT)
        begin = first_seen(context_len, check_int("q_len", q_len, 1), window)
        seen = context_len - begin
        if (num_splits is None) == (split_size is None):
            raise ArgumentError(
                f"num_splits, split_size: got {shown(num_splits)}, {shown(split_size)}, expected exactly one of the two"
            )
        if num_splits is not None:
            n = check_int("num_splits", num_splits, 1, MAX_SPLITS)
            boundaries = tuple(begin + i * seen // n for i in range(n + 1))
            size = seen // n
        else:
            size = check_int("split_size", split_size, 1)
            if seen // size > MAX_SPLITS:
                raise LimitError(
                    f"split_size: got {size}, which makes {seen // size:,} splits of {seen:,} keys, expected one that "
                    f"makes at most {MAX_SPLITS:,}; use {KEYS_PER_LEAF} or more"
                )
            boundaries = (begin, *range((begin // size + 1) * size, context_len, size), context_len)
        return cls(
            context_len,
            shape,
            boundaries,
            LEAVES_PER_NODE if size >= KEYS_PER_LEAF * LEAVES_PER_NODE else 1,
            q_len,
            begin,
        )

    @property
    def num_splits(self) -> int:
        """Number of splits, empty ones included."""
        return len(self.boundaries) - 1

    @property
    def unit_keys(self) -> int:
        """Keys per emitted partial state."""
        return self.leaves_per_state * KEYS_PER_LEAF

    @property
    def states(self) -> int:
        """Partial states per query row and head."""
        return -(-self.context_len // self.unit_keys) - self.first_unit

    @property
    def first_unit(self) -> int:
        """The unit that holds key ``begin``: absolute number of a row's first partial state."""
        return self.begin // self.unit_keys

    def leaf_ranges(self) -> list[tuple[int, int]]:
        """Leaves [begin, end) of each split; whole units, an empty range where no unit starts in the split."""
        starts = -(-np.array(self.boundaries, np.int64) // self.unit_keys) * self.leaves_per_state
        starts[0] = self.begin // KEYS_PER_LEAF
        return list(pairwise(np.minimum(starts, -(-self.context_len // KEYS_PER_LEAF)).tolist()))

    @property
    def build(self) -> Build:
        """The build of pass 1 with workgroups of one wave: "single" where no split has over one leaf, else "loop"."""
        return "single" if all(b - a <= 1 for a, b in self.leaf_ranges()) else "loop"

    def build_on(self, device: LayoutFacts, dtype: str = "f16") -> Build:
        """The build of pass 1 that a device runs; the bits are the same whichever does. dtype: of K and V.

        "node" where each split lies within a node and a state is a node's, until there are so many splits that
        workgroups of one wave keep a GPU's memory busy, of which those of a smaller type ask for less; always where it
        takes more heads together than workgroups of one wave would.
        """
        if device.node_workgroups and self.leaves_per_state == LEAVES_PER_NODE:
            bits = min(kind.bits for kind in storage_types(dtype)) * self.workgroups // self.shape.head_chunks
            same_heads = heads_together("node", device.kind, self.shape) == self.shape.heads_per_workgroup
            bytes_alone = device.kind != "cpu" and self.q_len == 1 and same_heads
            fills = bytes_alone and bits >= 16 * WORKGROUPS_PER_UNIT * device.compute_units
            if not fills and all(b <= (a | LEAVES_PER_NODE - 1) + 1 for a, b in self.leaf_ranges() if b > a):
                return "node"
        return self.build

    @property
    def passes(self) -> int:
        """1 where a single state per row is all there is and pass 1 writes the output, 0 keys included in 2."""
        return 1 if self.states == 1 else 2

    @property
    def workgroups(self) -> int:
        """Workgroups of pass 1 that have work."""
        busy = sum(b > a for a, b in self.leaf_ranges())
        return busy * self.shape.kv_heads * self.shape.head_chunks * self.q_len

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
            "leaves_per_state": self.leaves_per_state,
            "q_len": self.q_len,
            "begin": self.begin,
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> SplitPlan:
        """The inverse of ``to_dict``. ArgumentError for an unknown version or a missing or unknown key."""
        keys = {"version", "context_len", "shape", "boundaries", "leaves_per_state", "q_len", "begin"}
        if not isinstance(data, dict) or set(data) != keys:
            given = sorted(map(str, data)) if isinstance(data, dict) else data
            raise ArgumentError(f"SplitPlan.from_dict: got keys {shown(given)}, expected {sorted(keys)}")
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
        sizes = data["leaves_per_state"], data["q_len"], data["begin"]
        return cls(data["context_len"], AttnShape(**shape), data["boundaries"], *sizes)

    def fingerprint(self) -> str:
        """SHA-256 of the plan's canonical JSON: equal plans, and only those, have equal fingerprints."""
        text = json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


def split_rule(leaves: int, shape: AttnShape, compute_units: int, q_len: int, kind: str) -> tuple[int, int]:
    """(splits, leaves per emitted state) of ``leaves`` leaves with workgroups of one wave, for checked arguments."""
    return splits_for(leaves, split_target(shape, compute_units, q_len), q_len, kind)


def split_target(shape: AttnShape, compute_units: int, q_len: int) -> int:
    """The splits that fill the device, which is all that ``split_rule`` takes of the shape and the compute units."""
    return -(-compute_units * WORKGROUPS_PER_UNIT // (shape.kv_heads * shape.head_chunks * q_len))


def splits_for(leaves: int, target: int, q_len: int, kind: str) -> tuple[int, int]:
    """``split_rule`` for a target."""
    nodes = -(-leaves // LEAVES_PER_NODE)
    if kind == "cpu" and leaves * q_len <= MAX_CPU_STATES:
        return max(leaves, 1), 1
    if leaves * KEYS_PER_LEAF <= SINGLE_SPLIT_KEYS:
        return 1, LEAVES_PER_NODE
    if kind != "cpu" and leaves < NODE_KEYS // KEYS_PER_LEAF:
        splits = min(leaves, target, MAX_LEAF_SPLITS)
        return splits, 1 if splits > nodes else LEAVES_PER_NODE
    # states are per node anyway: a split per node costs nothing and is even
    return (nodes if q_len == 1 and kind != "cpu" else min(nodes, target)), LEAVES_PER_NODE


def sharing_pays(saved: int, items: int, build: Build, shape: AttnShape, compute_units: int, kind: str) -> bool:
    """Whether keys that rows share are attended together where the caller leaves it open.

    saved: leaves, of one KV head, that workgroups need not read again; items: workgroups of one KV head, in ``build``,
    that attend the shared keys. On a GPU these are a dispatch of their own with fewer and longer workgroups: it must
    save as much as fills the device three times, and give every compute unit some workgroups. (docs/cost-model.md)
    """
    if kind == "cpu":
        return saved >= SHARED_LEAVES
    fills = items * shape.kv_heads >= SHARED_PER_UNIT[build] * compute_units
    return fills and saved * shape.kv_heads >= 3 * compute_units * WORKGROUPS_PER_UNIT


def plan_splits(
    context_len: int,
    shape: AttnShape,
    compute_units: int = 64,
    dtype: object = "f16",
    q_len: int = 1,
    kind: str = "gpu",
    window: int | None = None,
    node_workgroups: bool = True,
) -> SplitPlan:
    """The layout for ``context_len`` keys by the rule above.

    compute_units: of the device (64 for a Radeon AI PRO R9700); dtype: of K and V, on which nothing depends yet; q_len:
    query rows of the call; kind: "cpu" for a software device, anything else is a GPU; window: keys a row sees at most,
    its own included: the rule then looks at the leaves that some row sees; node_workgroups: whether the GPU has
    workgroups of eight waves (``DeviceInfo.node_workgroups``). Splits are monotone in context_len.
    Idea: Flash-Decoding (Dao, Haziza, Massa, Sizov 2023); no split below a useful size, as FlashInfer plans.
    """
    context_len = check_int("context_len", context_len, 0, MAX_CONTEXT)
    compute_units = check_int("compute_units", compute_units, 1)
    q_len = check_int("q_len", q_len, 1)
    if not isinstance(shape, AttnShape):
        raise ArgumentError(f"shape: got {shown(shape)}, expected an AttnShape")
    storage_dtype(dtype)
    check_text("kind", kind, "a kind of device, such as cpu or discrete")
    if check_bool("node_workgroups", node_workgroups) and kind != "cpu":
        return SplitPlan.fixed(context_len, shape, split_size=KEYS_PER_NODE, q_len=q_len, window=window)
    if begin := first_seen(context_len, q_len, window):
        skipped = begin // KEYS_PER_LEAF * KEYS_PER_LEAF
        plan = plan_splits(context_len - skipped, shape, compute_units, dtype, q_len, kind, None, node_workgroups)
        boundaries = (begin, *(max(b + skipped, begin) for b in plan.boundaries[1:]))
        return SplitPlan(context_len, shape, boundaries, plan.leaves_per_state, q_len, begin)
    leaves = -(-context_len // KEYS_PER_LEAF)
    splits, each = split_rule(leaves, shape, compute_units, q_len, kind)
    states = -(-leaves // each)
    boundaries = tuple(min(i * states // splits * each * KEYS_PER_LEAF, context_len) for i in range(splits + 1))
    return SplitPlan(context_len, shape, boundaries, each, q_len)


def plan_on(
    device: LayoutFacts, context_len: int, shape: AttnShape, dtype: object, q_len: int, window: int | None
) -> SplitPlan:
    """``plan_splits`` for a device."""
    units, kind, node_workgroups = device
    return plan_splits(context_len, shape, units, dtype, q_len, kind, window, node_workgroups)


def rows_at_once(q_len: int, kind: str) -> int:
    """Query rows for which ``Attention`` asks the rule: on a CPU device a call with more has several submissions."""
    return min(q_len, CPU_ROWS) if kind == "cpu" else q_len


def leaves_per_state_on(device: LayoutFacts, context_len: int, shape: AttnShape, q_len: int, window: int | None) -> int:
    """``leaves_per_state`` of what ``plan_on`` plans for ``rows_at_once``, for checked arguments, without the plan."""
    if device.node_workgroups and device.kind != "cpu":
        return LEAVES_PER_NODE
    leaves = -(-context_len // KEYS_PER_LEAF) - first_seen(context_len, q_len, window) // KEYS_PER_LEAF
    return split_rule(leaves, shape, device.compute_units, rows_at_once(q_len, device.kind), device.kind)[1]


def first_seen(context_len: int, q_len: int, window: int | None) -> int:
    """The lowest key that a row sees: the window of the first of q_len rows. 0 without a window."""
    if window is None:
        return 0
    return max(context_len - q_len + 1 - check_int("window", window, 1), 0)


def _positions(values: Any) -> tuple[int, ...]:
    """Key positions as Python's ints; the first that is no position is refused."""
    if not isinstance(values, (tuple, list, np.ndarray)) or getattr(values, "ndim", 1) != 1:
        raise ArgumentError(f"boundaries: got {shown(values)}, expected a sequence of key positions")
    ints = isinstance(values, tuple) and set(map(type, values)) == {int}  # what fixed and plan_splits make
    if ints and min(values) >= 0 and max(values) <= MAX_CONTEXT:
        return tuple(values)
    return tuple(check_int("boundaries", value, 0, MAX_CONTEXT) for value in values)


def _short(values: tuple[int, ...]) -> str:
    return str(values) if len(values) <= 8 else f"({', '.join(map(str, values[:4]))}, ... {values[-1]})"
