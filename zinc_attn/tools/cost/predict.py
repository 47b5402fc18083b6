"""The time of one decode call: pass 1, the gap, pass 2. Times are in µs, rates in GB/s (1e9 bytes)."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Final

from ...canonical.constants import KEYS_PER_LEAF, LEAVES_PER_NODE
from ...dtypes import storage_dtype
from ...kernels import declarations as kernels
from ...kernels.tuning import merge_lanes
from ...planning.splits import SplitPlan
from ...shapes import AttnShape
from .assumptions import CACHED_RATE, GAP_US, L2_RATE, MERGE_FOLD_CYCLES, MERGE_TURN_CYCLES, MERGE_WAIT_CYCLES
from .cards import Card
from .compilers import prediction_compilers
from .pass1 import Workgroup, dispatches_us

LABEL: Final = "modeled"

# Instructions for a wave's 32 states before its turn, by leaves per state: gfx1201's program.
MERGE_ISSUE: Final = {1: 738, LEAVES_PER_NODE: 390}
MERGE_WAVES: Final = merge_lanes("discrete") // 32  # a round: a batch of 32 states per wave


@dataclass(frozen=True)
class Modeled:
    """A modeled result that JSON can hold, with the label and the derived numbers."""

    def to_dict(self) -> dict[str, Any]:
        """The label, the compilers, the fields and the properties; floats are rounded to four decimals.

        compiler: see ``prediction_compilers``.
        """
        derived = (name for name, one in vars(type(self)).items() if isinstance(one, property))
        found = asdict(self) | {name: getattr(self, name) for name in derived}
        about: dict[str, Any] = {"label": LABEL, "compiler": dict(prediction_compilers())}
        return about | {k: round(v, 4) if isinstance(v, float) else v for k, v in found.items()}


@dataclass(frozen=True)
class Prediction(Modeled):
    """A modeled decode call, from the begin of pass 1 to the end of pass 2.

    utilization: share of the compute units that get a workgroup. in_flight_kib: bytes that the resident waves ask for
    at a time; Little's law needs needed_kib = bandwidth x latency. memory_us: KV bytes at the read rate. partial_us:
    writing the partial states. waves_us: pass 1 if memory were infinitely wide. issue_us: arithmetic of its busiest
    SIMD. merge_us: pass 2 with the gap before it.
    """

    card: str
    shape: str
    dtype: str
    context: int
    splits: int
    workgroups: int
    workgroups_per_cu: float
    utilization: float
    in_flight_kib: float
    needed_kib: float
    kv_bytes: int
    partial_bytes: int
    memory_us: float
    partial_us: float
    waves_us: float
    issue_us: float
    pass1_us: float
    merge_us: float
    total_us: float
    ideal_us: float

    @property
    def gb_s(self) -> float:
        """KV bytes over the whole time."""
        return self.kv_bytes / self.total_us / 1e3

    @property
    def fraction(self) -> float:
        """Share of the card's peak bandwidth."""
        return self.ideal_us / self.total_us

    @property
    def overhead(self) -> float:
        """Writing partial states and pass 2, as a share of the rest of pass 1."""
        return (self.partial_us + self.merge_us) / (self.pass1_us - self.partial_us)

    @property
    def bound(self) -> str:
        """What pass 1 waits for: bandwidth, latency (too few bytes in flight) or issue."""
        if self.memory_us + self.partial_us >= self.waves_us:
            return "bandwidth"
        return "issue" if self.issue_us > 0.9 * self.waves_us else "latency"


def ideal(shape: AttnShape, context: int, card: Card, dtype: str = "f16") -> float:
    """µs to read each byte of K and V once at the peak rate."""
    return context * shape.kv_bytes_per_token(dtype) / card.bandwidth / 1e3


def predict(plan: SplitPlan, card: Card, dtype: str = "f16") -> Prediction:
    """The time of ``plan`` on ``card``. Workgroups are dealt to the compute units in turn, then to their SIMDs."""
    dtype = storage_dtype(dtype)
    shape, per_token = plan.shape, plan.shape.kv_bytes_per_token(dtype)
    kv_bytes = (plan.context_len - plan.begin) * per_token
    written = written_bytes(plan, kv_bytes, card)
    group = Workgroup.of(plan, card, dtype)
    sizes = [b - a for a, b in plan.leaf_ranges() if b > a] * (shape.kv_heads * shape.head_chunks * plan.q_len)
    work = group.spread(sizes, kv_bytes + written)
    again_us = kv_bytes * (plan.q_len * shape.head_chunks - 1) / L2_RATE / card.read_rate  # rows and head chunks
    pass1 = dispatches_us([work], again_us)
    merge = merge_us(plan, card, kv_bytes, work.leaves) if plan.passes == 2 else 0.0
    return Prediction(
        card=card.title,
        shape=str(shape),
        dtype=dtype,
        context=plan.context_len,
        splits=plan.num_splits,
        workgroups=plan.workgroups,
        workgroups_per_cu=plan.workgroups / card.compute_units,
        utilization=min(1.0, plan.workgroups * group.units / card.compute_units),
        in_flight_kib=work.resident
        * (KEYS_PER_LEAF * per_token / shape.kv_heads / shape.head_chunks / group.trips / 1024),
        needed_kib=card.read_rate * card.latency_ns / 1e3 / 1024,
        kv_bytes=kv_bytes,
        partial_bytes=2 * plan.scratch_bytes,
        memory_us=kv_bytes / card.read_rate,
        partial_us=written / card.read_rate,
        waves_us=work.alone_us,
        issue_us=work.issue_us,
        pass1_us=pass1,
        merge_us=merge,
        total_us=pass1 + merge,
        ideal_us=ideal(shape, plan.context_len, card, dtype),
    )


def written_bytes(plan: SplitPlan, kv_bytes: float, card: Card) -> float:
    """Bytes that writing the partial states counts as: fewer where the caches hold them beside K and V."""
    held = kv_bytes + plan.scratch_bytes <= card.cache_bytes
    return plan.scratch_bytes / CACHED_RATE if held else plan.scratch_bytes


def merge_us(plan: SplitPlan, card: Card, kv_bytes: float, leaves: float) -> float:
    """The gap and pass 2.

    leaves: that a wave of pass 1 attended one after another. Its states come in as many steps as they make units, so
    the first are that many steps old, and those that the caches no longer hold are read from memory.
    """
    steps, partial = max(1, round(leaves / plan.leaves_per_state)), plan.scratch_bytes
    held = min(1.0, (int(card.cache_bytes / max(kv_bytes + partial, 1) * steps) + 1) / steps)
    read = partial * (held / CACHED_RATE + 1 - held)
    return GAP_US + max(_fold_us(plan, card), read / card.read_rate)


def _fold_us(plan: SplitPlan, card: Card) -> float:
    """Arithmetic of pass 2, in rounds: each wave loads and weighs 32 states at once, then folds them in turn."""
    groups = plan.shape.q_heads * -(-plan.shape.v_dim // kernels.MERGE_DIMS) * plan.q_len
    batches = -(-plan.states // 32)
    rounds = -(-batches // MERGE_WAVES)
    crowd = max(1.0, groups * min(batches, MERGE_WAVES) / card.all_simds)
    turns = max(1.0, groups / card.all_simds)
    at_once = rounds * (MERGE_ISSUE[plan.leaves_per_state] * crowd + MERGE_WAIT_CYCLES)
    folds = -(-plan.states * plan.leaves_per_state // LEAVES_PER_NODE)
    in_turn = folds * MERGE_FOLD_CYCLES + batches * MERGE_TURN_CYCLES
    return (rounds * 2 * card.near_ns + (at_once + in_turn * turns) / card.clock_ghz) / 1e3


def best_splits(
    context: int, shape: AttnShape, card: Card, dtype: str = "f16", most: int = 4096
) -> tuple[SplitPlan, Prediction]:
    """The even layout with the least modeled time, over split counts and both units of partial states."""
    found = []
    for unit in (1, LEAVES_PER_NODE):
        units = -(-context // (unit * KEYS_PER_LEAF))
        top = max(1, min(units, most))
        # Few splits, powers of two, and counts that divide ``top`` nearly evenly.
        counts = {*range(1, 17), *(1 << i for i in range(24)), *(-(-top // k) for k in range(1, 65))}
        for n in sorted(n for n in counts if n <= top):
            bounds = tuple(min(i * units // n * unit * KEYS_PER_LEAF, context) for i in range(n + 1))
            plan = SplitPlan(context, shape, bounds, unit)
            found.append((plan, predict(plan, card, dtype)))
    return min(found, key=lambda pair: pair[1].total_us)


def timeline(plan: SplitPlan, card: Card, dtype: str = "f16") -> list[tuple[int, float, float, int]]:
    """(compute unit, begin, end, split) of each workgroup of pass 1 in µs, for a picture: all resident at once.

    A workgroup of several waves is drawn on each of its compute units.
    """
    pass1_us, units = predict(plan, card, dtype).pass1_us, Workgroup.of(plan, card, dtype).units
    sizes = [(i, b - a) for i, (a, b) in enumerate(plan.leaf_ranges()) if b > a]
    groups = sizes * (plan.shape.kv_heads * plan.shape.head_chunks * plan.q_len)
    jobs = [group for group in groups for _ in range(units)]
    scale = pass1_us / max((s for _, s in jobs), default=1)
    bars = [(i % card.compute_units, 0.0, size * scale, split) for i, (split, size) in enumerate(jobs)]
    return sorted(bars, key=lambda bar: bar[0])
