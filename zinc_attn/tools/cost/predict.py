"""The time of one decode call: pass 1, the gap, pass 2. Times are in µs, rates in GB/s (1e9 bytes)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from ...canonical.constants import KEYS_PER_LEAF, KEYS_PER_NODE, LEAVES_PER_NODE
from ...dtypes import storage_dtype
from ...kernels import declarations as kernels
from ...kernels.tuning import merge_workgroup_size
from ...planning.arithmetic import Arithmetic
from ...planning.splits import SplitPlan
from ...shapes import AttnShape
from ...storage import storage_types
from . import assumptions as assumed
from .cards import Card
from .pass1 import SIMDS, Workgroup, dispatches_us

# The head of a prediction in JSON: its label, and the compilers of the programs whose instructions are counted.
ABOUT: Final[dict[str, Any]] = {
    "label": "modeled",
    "compiler": {"counted_glsl": "glslang 12", "counted_mesa": "Mesa 25.0.7, ACO for gfx1201"},
}

MANY: Final = 1 << 20  # keys whose workgroups have the largest size
MERGE_ISSUE: Final = 394  # instructions for a wave's 32 states before its turn: gfx1201's program
MERGE_WAVES: Final = merge_workgroup_size("discrete") // 32  # a round: a batch of 32 states per wave


@dataclass(frozen=True)
class Terms:
    """The times of a submission, or of several one after another.

    workgroups: of pass 1. memory_us: K and V at the read rate, once a submission. partial_us: writing the partial
    states. again_us: keys that other workgroups have read before, from the L2. waves_us: pass 1 if memory and L2 were
    infinitely wide. issue_us: arithmetic of its busiest SIMD. merge_us: pass 2 with the gap before it.
    """

    workgroups: float
    memory_us: float
    partial_us: float
    again_us: float
    waves_us: float
    issue_us: float
    pass1_us: float
    merge_us: float


@dataclass(frozen=True)
class Prediction(Terms):
    """A modeled call of one layer, from the begin of the first pass 1 to the end of the last pass 2.

    utilization: share of the compute units with a workgroup. partial_bytes: partial states, written and read.
    """

    card: str
    shape: str
    dtype: str
    context: int
    rows: int
    submissions: int
    splits: int
    workgroups_per_cu: float
    utilization: float
    kv_bytes: int
    partial_bytes: int
    total_us: float
    ideal_us: float

    @classmethod
    def of(cls, plan: SplitPlan, card: Card, dtype: str, terms: Terms, submissions: int = 1) -> Prediction:
        """The prediction of a plan's call whose submissions take ``terms`` together."""
        shape, context = plan.shape, plan.context_len
        return cls(
            **asdict(terms) | {"workgroups": round(terms.workgroups)},
            card=card.title,
            shape=str(shape),
            dtype=dtype,
            context=context,
            rows=plan.q_len,
            submissions=submissions,
            splits=plan.num_splits,
            workgroups_per_cu=terms.workgroups / card.compute_units,
            utilization=min(1.0, plan.workgroups * SIMDS / card.all_simds),
            kv_bytes=(context - plan.begin) * shape.kv_bytes_per_token(dtype),
            partial_bytes=2 * plan.scratch_bytes,
            total_us=terms.pass1_us + terms.merge_us,
            ideal_us=ideal(shape, context, card, dtype),
        )

    def to_dict(self) -> dict[str, Any]:
        """For JSON: ``ABOUT``, the fields and figures that follow from them; floats are rounded to four decimals."""
        values = asdict(self) | {"gb_s": self.gb_s, "fraction": self.fraction, "bound": self.bound}
        return ABOUT | {k: round(v, 4) if isinstance(v, float) else v for k, v in values.items()}

    @property
    def gb_s(self) -> float:
        """KV bytes over the whole time."""
        return self.kv_bytes / self.total_us / 1e3

    @property
    def fraction(self) -> float:
        """Share of the card's peak bandwidth."""
        return self.ideal_us / self.total_us

    @property
    def bound(self) -> str:
        """The limit of pass 1: bandwidth, latency (too few bytes in flight) or issue."""
        if self.memory_us + self.partial_us >= self.waves_us:
            return "bandwidth"
        return "issue" if self.issue_us > 0.9 * self.waves_us else "latency"


def ideal(shape: AttnShape, context: int, card: Card, dtype: str = "f16") -> float:
    """µs to read each byte of K and V once at the peak rate."""
    return context * shape.kv_bytes_per_token(dtype) / card.bandwidth / 1e3


def issue_share(shape: AttnShape, card: Card, dtype: str = "f16", arithmetic: Arithmetic = "canonical") -> float:
    """Issue of pass 1 for one row and many keys, as a part of the time that K and V take at the peak rate.

    Above 1 arithmetic is the limit, not memory.
    """
    plan = SplitPlan.fixed(MANY, shape, split_size=KEYS_PER_NODE)
    group = Workgroup.of(plan, card, storage_dtype(dtype), arithmetic)
    cycles = shape.kv_heads * group.chunks * group.issue / KEYS_PER_LEAF
    return cycles / (card.all_simds * card.clock_ghz) / ideal(shape, 1, card, dtype) / 1e3


def issue_shares(shape: AttnShape, card: Card, dtype: str) -> dict[str, float]:
    """``issue_share`` of every arithmetic that a cache of this type may have."""
    integers = all(kind.integers for kind in storage_types(dtype))
    names: tuple[Arithmetic, ...] = ("canonical", "fused", *(("integer",) if integers else ()))
    return {name: issue_share(shape, card, dtype, name) for name in names}


def predict(plan: SplitPlan, card: Card, dtype: str = "f16", arithmetic: Arithmetic = "canonical") -> Prediction:
    """The time of ``plan`` on ``card`` in one submission, whose rows see all keys and share none."""
    dtype, shape = storage_dtype(dtype), plan.shape
    group = Workgroup.of(plan, card, dtype, arithmetic)
    begin, end = plan.begin // KEYS_PER_LEAF, -(-plan.context_len // KEYS_PER_LEAF)
    nodes = [(a * LEAVES_PER_NODE, b * LEAVES_PER_NODE) for a, b in plan.node_ranges() if b > a]
    sizes = [min(b, end) - max(a, begin) for a, b in nodes] * (shape.kv_heads * group.chunks * plan.q_len)
    kv_bytes = (plan.context_len - plan.begin) * shape.kv_bytes_per_token(dtype)
    work, states = [(group, sizes)], [(1.0, plan)] * (plan.passes == 2)
    return Prediction.of(plan, card, dtype, submission_terms(work, states, card, dtype, kv_bytes))


Work = Sequence[tuple[Workgroup, list[int]]]  # dispatches of pass 1: their workgroups, and the leaves of each
# The states that pass 2 folds, as states of plans whose rows see all keys, with weights whose sum is 1.
States = Sequence[tuple[float, SplitPlan]]


def submission_terms(work: Work, states: States, card: Card, dtype: str, kv_bytes: float) -> Terms:
    """The terms of dispatches one after another, which move K, V and states in proportion to their leaves.

    kv_bytes: bytes that all dispatches together need; further reads come from the L2.
    """
    shape = work[0][0].shape
    state_bytes = written_bytes(states, kv_bytes, card)
    leaves = [sum(sizes) for _, sizes in work]
    moved = (kv_bytes + state_bytes) / max(sum(leaves), 1)
    spreads = [group.spread(sizes, moved * count) for (group, sizes), count in zip(work, leaves, strict=True)]
    read = sum(leaves) * KEYS_PER_LEAF * shape.kv_bytes_per_token(dtype) / shape.kv_heads
    again_us = max(0.0, read - kv_bytes) / assumed.L2_RATE / card.read_rate
    return Terms(
        workgroups=sum(len(sizes) for _, sizes in work),
        memory_us=kv_bytes / card.read_rate,
        partial_us=state_bytes / card.read_rate,
        again_us=again_us,
        waves_us=sum(spread.alone_us for spread in spreads),
        issue_us=sum(spread.issue_us for spread in spreads),
        pass1_us=dispatches_us(spreads, again_us),
        merge_us=merge_us(states, card, kv_bytes, max(spread.leaves for spread in spreads)),
    )


def written_bytes(states: States, kv_bytes: float, card: Card) -> float:
    """Bytes that count for writing the partial states: fewer where the caches hold them together with K and V."""
    rates = [assumed.CACHED_RATE if kv_bytes + plan.scratch_bytes <= card.cache_bytes else 1.0 for _, plan in states]
    return sum(weight * plan.scratch_bytes / rate for (weight, plan), rate in zip(states, rates, strict=True))


def merge_us(states: States, card: Card, kv_bytes: float, leaves: float) -> float:
    """The gap and pass 2.

    leaves: of a wave of pass 1, one after another, each of another node. So the first states are that many steps old;
    states that the caches no longer hold are read from memory.
    """
    total = 0.0
    for weight, plan in states:
        steps, partial = max(1, round(leaves)), plan.scratch_bytes
        held = min(1.0, (int(card.cache_bytes / max(kv_bytes + partial, 1) * steps) + 1) / steps)
        read = partial * (held / assumed.CACHED_RATE + 1 - held)
        total += weight * (assumed.GAP_US + max(_fold_us(plan, card), read / card.read_rate))
    return total


def _fold_us(plan: SplitPlan, card: Card) -> float:
    """Arithmetic of pass 2, in rounds: each wave loads and weighs 32 states at once, then folds them in turn."""
    groups = plan.shape.q_heads * -(-plan.shape.v_dim // kernels.MERGE_DIMS) * plan.q_len
    batches = -(-plan.states // 32)
    rounds = -(-batches // MERGE_WAVES)
    crowd = max(1.0, groups * min(batches, MERGE_WAVES) / card.all_simds)
    turns = max(1.0, groups / card.all_simds)
    at_once = rounds * (MERGE_ISSUE * crowd + assumed.MERGE_WAIT_CYCLES)
    in_turn = plan.states * assumed.MERGE_FOLD_CYCLES + batches * assumed.MERGE_TURN_CYCLES
    return (rounds * 2 * assumed.NEAR_NS + (at_once + in_turn * turns) / card.clock_ghz) / 1e3
