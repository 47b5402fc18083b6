"""Presets of models and cards, and the cost model: what a call should take on a card.

A model of one decode call's time on a card: why splits help, how many are enough, what limits the rest.

Pure arithmetic, no device, no clock. Every number is modelled; nothing in here was measured on an RDNA4 card.
docs/cost-model.md explains the terms. Times in µs, rates in GB/s (1e9 bytes), latencies in ns.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from ...errors import ArgumentError
from ...kernels import contract as kernels
from ...kernels.contract import SCRATCH_BYTES
from ...planning.splits import SplitPlan, plan_splits, sharing_pays
from ...shapes import (
    KEYS_PER_NODE,
    LEAF,
    MAX_CONTEXT,
    NODE,
    AttnShape,
    check_int,
    dtype_bytes,
)

# --- cards and the cost of a call --------------------------------------------------------------------------

LABEL: Final = "modelled"

# --- assumptions that no document gave: change them here, docs/cost-model.md shows what hangs on them --------
READ_EFFICIENCY: Final = 0.95  # of the peak rate in a long read; llama.cpp at 224K on an R9700: about 610 of 644.6 GB/s
KNEE: Final = 4.0  # sharpness of the bend between too few bytes in flight and full memory: time = (a^p + b^p)^(1/p)
START_US: Final = 1.0  # first workgroup of a pass: launch, then the work words and the page table one after another
GAP_US: Final = 2.0  # barrier between the passes: drain, invalidate, launch
TRIP_CYCLES: Final = 100  # scalar loads and addresses that a trip of a main loop waits for before its vector loads
LEAF_CYCLES: Final = 1500  # waits of a leaf outside the main loops: LDS round trips of the maximum and the weights
MERGE_FOLD_CYCLES: Final = 20  # one node into the total: four dependent operations of five cycles (it issues 11)
MERGE_ISSUE: Final = {1: 738, NODE: 390}  # instructions for a wave's 32 states before its turn, by unit
MERGE_WAIT_CYCLES: Final = 500  # LDS round trips and barriers of a round
MERGE_TURN_CYCLES: Final = 100  # the total through the LDS to the next wave, and a barrier
MERGE_WAVES: Final = kernels.merge_lanes("discrete") // 32  # a round: a batch of 32 states per wave
CACHED_RATE: Final = 2.5  # partial states that the caches hold move so many times faster than memory reads
SHARED_VGPRS: Final = {"single": 192, "loop": 240}  # with more than 8 query vectors, at most; float32 takes more
GRID: Final = 65535  # workgroups along an axis that every device takes
HOST_COPY_GB_S: Final = 20.0  # partial states in host memory, once on the way down and once on the way up
SCALAR_ISSUE: Final = 1.65  # issue cycles without dual issue against those with: the loops' pairs counted twice


@dataclass(frozen=True)
class Card:
    """What the model knows of a card. ``assumed`` names the fields no document was at hand for.

    simds: per compute unit; registers: per SIMD and lane, given out in steps of ``register_step``; wave_slots: one-wave
    workgroups per SIMD; latency_ns: of a read from memory that is not saturated; near_ns: from the cache where partial
    states wait for pass 2.
    """

    title: str
    compute_units: int
    clock_ghz: float
    bandwidth: float
    l2_mib: float
    infinity_mib: float
    source: str
    simds: int = 2
    registers: int = 1536
    register_step: int = 24
    wave_slots: int = 16
    latency_ns: float = 400.0
    near_ns: float = 200.0
    dual_issue: bool = True
    assumed: tuple[str, ...] = ("latency_ns", "near_ns")

    @property
    def all_simds(self) -> int:
        return self.compute_units * self.simds

    def waves(self, vgprs: int) -> int:
        """One-wave workgroups that a SIMD holds."""
        return max(1, min(self.wave_slots, self.registers // (-(-vgprs // self.register_step) * self.register_step)))


_GUESS: Final = ("latency_ns", "near_ns")
_NVIDIA: Final[dict[str, Any]] = {
    "infinity_mib": 0,
    "simds": 4,
    "registers": 512,  # 64 K words a multiprocessor, over 4 schedulers and 32 lanes
    "register_step": 8,
    "wave_slots": 8,  # 32 workgroups a multiprocessor
    "latency_ns": 600.0,
    "near_ns": 250.0,
    "dual_issue": False,
    "assumed": (*_GUESS, "clock_ghz"),
}
CARDS: Final = {
    "r9700": Card("Radeon AI PRO R9700", 64, 2.9, 644.6, 8, 64, "RDNA4.md and the article"),
    "rx9070xt": Card("Radeon RX 9070 XT", 64, 2.97, 640.0, 8, 64, "AMD's launch figures (2.97 GHz boost)"),
    "rx9070": Card("Radeon RX 9070", 56, 2.52, 640.0, 8, 64, "AMD's launch figures (2.52 GHz boost)"),
    "rx9070gre": Card(
        "Radeon RX 9070 GRE", 48, 2.79, 432.0, 6, 48, "press reports", assumed=(*_GUESS, "l2_mib", "infinity_mib")
    ),
    "rx9060xt": Card(
        "Radeon RX 9060 XT", 32, 3.13, 320.0, 4, 32, "press reports", assumed=(*_GUESS, "clock_ghz", "l2_mib")
    ),
    "a100": Card("A100-80GB", 108, 1.41, 2000.0, 40, source="the review's 108 SMs and 2.0 TB/s", **_NVIDIA),
    "h200": Card("H200", 132, 1.98, 4800.0, 50, source="NVIDIA's data sheet; PEERS.md", **_NVIDIA),
}


def find_card(name: str) -> Card:
    """A card by name, any case; spaces, hyphens and a leading 'rx' may be left out."""
    word = "".join(c for c in name.lower() if c.isalnum())
    for key in (word, f"rx{word}"):
        if key in CARDS:
            return CARDS[key]
    raise ArgumentError(f"card: got {name!r}, expected one of {', '.join(CARDS)}")


def card_with(compute_units: int) -> Card:
    """An RDNA4 card of so many compute units, with the R9700's clock and its bandwidth per unit."""
    model, units = CARDS["r9700"], check_int("cu", compute_units, 1)
    if units == model.compute_units:
        return model
    return replace(
        model,
        title=f"{units} compute units like an R9700's",
        compute_units=units,
        bandwidth=model.bandwidth * units / model.compute_units,
        assumed=(*model.assumed, "clock_ghz", "bandwidth"),
        source="the R9700, scaled",
    )


# --- the kernels, as RADV compiles them for gfx1201 ----------------------------------------------------------
# (head_dim, heads of a workgroup): issue cycles per key of the main loops (single, loop), VGPRs (single, loop); f16
ISSUE: Final = {
    (256, 8): (181, 189, 120, 168),
    (256, 6): (155, 149, 120, 168),
    (256, 4): (112, 110, 120, 120),
    (256, 2): (72, 71, 96, 96),
    (128, 8): (94, 98, 120, 168),
    (128, 4): (59, 57, 96, 120),
    (64, 8): (53, 51, 120, 120),
    (64, 3): (28, 27, 96, 96),
    (512, 4): (226, 214, 120, 168),
}
DTYPE_ISSUE: Final = {"f32": 0.87, "f16": 1.0, "bf16": 0.9, "q8_0": 1.5}  # q8_0 is assumed: its loops were not read


def issue_per_key(head_dim: int, heads: int, build: kernels.Build, dtype: str = "f16") -> float:
    """Issue cycles of a workgroup's main loops per key: the table, or a line through it."""
    if row := ISSUE.get((head_dim, heads)):
        cycles: float = row[build == "loop"]
    else:
        cycles = head_dim * (0.076 * heads + 0.106) + 6.4
    return cycles * DTYPE_ISSUE[dtype]


@dataclass(frozen=True)
class LeafCost:
    """One leaf on one wave. issue: cycles in which it issues; stall: cycles in which it waits, unloaded memory."""

    issue: float
    stall: float
    trips: int

    def cycles(self, resident: int) -> float:
        """Per leaf, with ``resident`` waves on the SIMD: they fill each other's waits, then the issue slots."""
        return max(self.stall + self.issue, resident * self.issue)


def _rows_ahead(width: int, heads: int, build: kernels.Build, dtype: str) -> int:
    """Value rows in flight: GPU_KEYS_AHEAD of attend.comp."""
    loads = max(1, width // {"f32": 4, "q8_0": 16}.get(dtype, 8))
    if build == "single":
        return {1: 8, 2: 4}.get(loads, 2)
    return 8 if width <= 4 else 2 if width * heads > 48 or loads > 1 else 4


def leaf_cost(shape: AttnShape, card: Card, dtype: str, build: kernels.Build) -> LeafCost:
    """A trip of the K loop loads ``chunks_ahead`` chunks of 64 keys, a trip of the V loop 2 to 8 rows; each waits."""
    return _vectors_cost(shape.head_dim, shape.heads_per_workgroup, card, dtype, build)


def _vectors_cost(head_dim: int, heads: int, card: Card, dtype: str, build: kernels.Build) -> LeafCost:
    """The same for ``heads`` query vectors, of one row or of several that share the keys."""
    width, passes = kernels.value_slice(head_dim), kernels.value_passes(head_dim, heads)
    rows = _rows_ahead(width // passes, heads, build, dtype)
    trips = -(-head_dim // (8 * kernels.chunks_ahead("discrete", head_dim))) + passes * LEAF // rows
    if passes > 1 and build == "loop":
        trips += passes  # the node's sums so far come from memory
    beside = heads * (1.1 + (0.15 if build == "loop" else 0.08) * width)  # softmax, folding and emitting, per key
    issue = LEAF * (issue_per_key(head_dim, heads, build, dtype) + beside)
    issue *= 1.0 if card.dual_issue else SCALAR_ISSUE
    return LeafCost(issue, trips * (card.latency_ns * card.clock_ghz + TRIP_CYCLES) + LEAF_CYCLES, trips)


# --- one call ------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Prediction:
    """A modelled decode call, begin of pass 1 to end of pass 2. bound: what pass 1 waits for most.

    utilisation: compute units with at least one workgroup; in_flight_kib: bytes that the resident waves ask for at
    a time, against what Little's law needs (needed_kib = bandwidth x latency). memory_us: KV bytes at the read rate;
    partial_us: writing the partial states; waves_us: pass 1 if memory were infinitely wide; issue_us: its busiest
    SIMD's arithmetic alone; merge_us: pass 2 with the gap before it.
    """

    card: str
    shape: str
    dtype: str
    context: int
    splits: int
    workgroups: int
    workgroups_per_cu: float
    utilisation: float
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
        """Of the card's peak bandwidth."""
        return self.ideal_us / self.total_us

    @property
    def overhead(self) -> float:
        """Writing partial states, and pass 2, as a share of the rest of pass 1."""
        return (self.partial_us + self.merge_us) / (self.pass1_us - self.partial_us)

    @property
    def bound(self) -> str:
        """What pass 1 waits for: bandwidth, latency (too few bytes in flight) or issue."""
        if self.memory_us + self.partial_us >= self.waves_us:
            return "bandwidth"
        return "issue" if self.issue_us > 0.9 * self.waves_us else "latency"

    def to_dict(self) -> dict[str, Any]:
        """JSON-able, derived numbers and the label included."""
        found = asdict(self) | {k: getattr(self, k) for k in ("gb_s", "fraction", "overhead", "bound")}
        return {"label": LABEL} | {k: round(v, 4) if isinstance(v, float) else v for k, v in found.items()}


def ideal(shape: AttnShape, context: int, card: Card, dtype: str = "f16") -> float:
    """µs to read each byte of K and V once at the peak rate."""
    return context * shape.kv_bytes_per_token(dtype) / card.bandwidth / 1e3


def predict(plan: SplitPlan, card: Card, dtype: str = "f16") -> Prediction:
    """The time of ``plan`` on ``card``. Workgroups go round over the compute units, then over their SIMDs."""
    dtype_bytes(dtype)
    shape, rows = plan.shape, plan.q_len
    kv_bytes = (plan.context_len - plan.begin) * shape.kv_bytes_per_token(dtype)
    partial = plan.scratch_bytes
    caches = (card.l2_mib + card.infinity_mib) * 2**20
    written = partial / CACHED_RATE if kv_bytes + partial <= caches else partial
    rate = card.bandwidth * 1e3 * READ_EFFICIENCY  # bytes per µs
    leaf = leaf_cost(shape, card, dtype, plan.build)
    sizes = [b - a for a, b in plan.leaf_ranges() if b > a] * (shape.kv_heads * shape.head_chunks * rows)
    per_leaf = (kv_bytes + written) / max(sum(sizes), 1)  # both chunks of a group share K and V through the L2
    slots = card.waves(_vgprs(shape.head_dim, shape.heads_per_workgroup, plan.build))
    work = _spread(sizes, leaf, slots, card, per_leaf)
    steps = max(1, round(work.leaves / plan.unit_leaves))
    waves_us = max((t for t, _ in work.demand), default=0.0)
    pass1 = START_US + _stretched(work.demand, rate)
    merge = _merge_us(plan, card, kv_bytes, steps) if plan.passes == 2 else 0.0
    return Prediction(
        card=card.title,
        shape=str(shape),
        dtype=dtype,
        context=plan.context_len,
        splits=plan.num_splits,
        workgroups=plan.workgroups,
        workgroups_per_cu=plan.workgroups / card.compute_units,
        utilisation=min(1.0, plan.workgroups / card.compute_units),
        in_flight_kib=work.resident
        * (LEAF * shape.kv_bytes_per_token(dtype) / shape.kv_heads / shape.head_chunks / leaf.trips / 1024),
        needed_kib=rate * card.latency_ns / 1e3 / 1024,
        kv_bytes=kv_bytes,
        partial_bytes=2 * partial,
        memory_us=kv_bytes / rate,
        partial_us=written / rate,
        waves_us=waves_us,
        issue_us=work.issue_us,
        pass1_us=pass1,
        merge_us=merge,
        total_us=pass1 + merge,
        ideal_us=ideal(shape, plan.context_len, card, dtype),
    )


def _vgprs(head_dim: int, heads: int, build: kernels.Build, dtype: str = "f16") -> int:
    """Registers of pass 1 with so many query vectors."""
    if row := ISSUE.get((head_dim, heads)):
        return row[2 + (build == "loop")]
    if heads > 8:
        if build == "loop" and kernels.value_passes(head_dim, heads) == 1:
            return SHARED_VGPRS["loop"]
        return SHARED_VGPRS["single"] + 24 * (dtype == "f32")
    return 168 if head_dim * heads > 1024 and build == "loop" else 120


@dataclass(frozen=True)
class _Spread:
    """Workgroups on the SIMDs. demand: (µs that some SIMDs would take alone, their bytes); issue_us: the busiest SIMD's
    arithmetic; leaves: one after another on a wave; resident: waves, over all SIMDs."""

    demand: list[tuple[float, float]]
    issue_us: float
    leaves: float
    resident: int


def _spread(sizes: list[int], leaf: LeafCost, slots: int, card: Card, per_leaf: float) -> _Spread:
    """Workgroups of so many leaves, dealt round; per_leaf: bytes."""
    n = card.all_simds
    loads = Counter((tuple(sorted(Counter(sizes[i::n]).items()))) for i in range(min(n, len(sizes))))
    demand: list[tuple[float, float]] = []
    issue_us, in_turn, waves = 0.0, 0.0, 0
    for load, simds in loads.items():
        count, total, most = sum(c for _, c in load), sum(s * c for s, c in load), max(s for s, _ in load)
        resident = min(count, slots)
        here = max(most, total / resident)
        in_turn = max(in_turn, here)
        demand.append((here * leaf.cycles(resident) / card.clock_ghz / 1e3, simds * total * per_leaf))
        issue_us = max(issue_us, total * leaf.issue / card.clock_ghz / 1e3)
        waves += simds * resident
    return _Spread(demand, issue_us, in_turn, waves)


def _merge_us(plan: SplitPlan, card: Card, kv_bytes: float, steps: int) -> float:
    """The gap and pass 2, whose states are up to ``steps`` steps old."""
    partial, caches = plan.scratch_bytes, (card.l2_mib + card.infinity_mib) * 2**20
    held = min(1.0, (int(caches / max(kv_bytes + partial, 1) * steps) + 1) / steps)
    read = partial * (held / CACHED_RATE + 1 - held)
    return GAP_US + max(_fold_us(plan, card), read / (card.bandwidth * 1e3 * READ_EFFICIENCY))


def _fold_us(plan: SplitPlan, card: Card) -> float:
    """Pass 2: rounds of a batch of 32 states per wave, which load and weigh them at once, then fold one by one."""
    groups = plan.shape.q_heads * -(-plan.shape.head_dim // kernels.MERGE_DIMS) * plan.q_len
    batches = -(-plan.states // 32)
    rounds = -(-batches // MERGE_WAVES)
    crowd = max(1.0, groups * min(batches, MERGE_WAVES) / card.all_simds)
    turns = max(1.0, groups / card.all_simds)
    at_once = rounds * (MERGE_ISSUE[plan.unit_leaves] * crowd + MERGE_WAIT_CYCLES)
    one_by_one = -(-plan.states * plan.unit_leaves // NODE) * MERGE_FOLD_CYCLES + batches * MERGE_TURN_CYCLES
    return (rounds * 2 * card.near_ns + (at_once + one_by_one * turns) / card.clock_ghz) / 1e3


def _stretched(demand: list[tuple[float, float]], rate: float) -> float:
    """µs of pass 1: SIMDs run at their own speed until together they ask for more than memory gives.

    Between two finishing times the bytes asked for per µs are constant; time stretches by (1 + x**p)**(1/p), x their
    ratio to ``rate``. Uneven splits cost what they cost: few SIMDs ask for little at the end.
    """
    time, begin = 0.0, 0.0
    for end in sorted({t for t, _ in demand}):
        asked = sum(nbytes / t for t, nbytes in demand if t >= end)
        time += (end - begin) * (1 + (asked / rate) ** KNEE) ** (1 / KNEE)
        begin = end
    return time


def best_splits(
    context: int, shape: AttnShape, card: Card, dtype: str = "f16", most: int = 4096
) -> tuple[SplitPlan, Prediction]:
    """The even layout with the least modelled time, over split counts and both units of partial states."""
    found = []
    for unit in (1, NODE):
        units = -(-context // (unit * LEAF))
        for n in _counts(max(1, min(units, most))):
            bounds = tuple(min(i * units // n * unit * LEAF, context) for i in range(n + 1))
            plan = SplitPlan(context, shape, bounds, unit)
            found.append((plan, predict(plan, card, dtype)))
    return min(found, key=lambda pair: pair[1].total_us)


def _counts(most: int) -> list[int]:
    """Split counts worth trying: few, powers of two, and those that divide ``most`` nearly evenly."""
    found = {-(-most // k) for k in range(1, 65)} | {1 << i for i in range(24)} | set(range(1, 17))
    return sorted(n for n in found if n <= most)


def timeline(plan: SplitPlan, card: Card, dtype: str = "f16") -> list[tuple[int, float, float, int]]:
    """(compute unit, begin, end, split) of each workgroup of pass 1, in µs, for a picture: all resident at once."""
    whole = predict(plan, card, dtype)
    sizes = [(i, b - a) for i, (a, b) in enumerate(plan.leaf_ranges()) if b > a]
    jobs = sizes * (plan.shape.kv_heads * plan.shape.head_chunks * plan.q_len)
    per_unit = [jobs[i :: card.compute_units] for i in range(card.compute_units)]
    scale = whole.pass1_us / max((s for _, s in jobs), default=1)
    return [(cu, 0.0, size * scale, split) for cu, unit in enumerate(per_unit) for split, size in unit]


# --- a prefix that requests share ------------------------------------------------------------------------------
@dataclass(frozen=True)
class Cascade:
    """What the kernels make of requests that share a prefix; one new row each.

    most: requests that a workgroup can serve at a time on the shared keys, 1 where none are shared; shared_keys: of a
    request, in whole pages and whole states; blocks: requests of each submission, which share nothing with another's;
    keys_read, keys_alone: keys of one KV head that all workgroups read, with and without sharing
    (``Attention.keys_read``).
    """

    plan: SplitPlan
    most: int
    shared_keys: int
    blocks: tuple[int, ...]
    compute_units: int
    kind: str

    def rows_each(self, requests: int) -> int:
        """Requests of a submission that a workgroup serves at a time."""
        return min(self.most, 1 << (requests - 1).bit_length())

    def shared(self, requests: int) -> int:
        """Keys that a submission's requests share: none where that saves too little."""
        together = -(-requests // self.rows_each(requests))
        if min(self.most, requests) < 2:
            return 0
        saved = (requests - together) * self.shared_keys // LEAF
        pays = sharing_pays(saved, self.plan.shape, self.compute_units, self.kind)
        return self.shared_keys if pays else 0

    @property
    def keys_read(self) -> int:
        total = 0
        for n in self.blocks:
            shared = self.shared(n)
            alone = (self.plan.context_len - shared) * self.plan.shape.head_chunks
            total += -(-n // self.rows_each(n)) * shared + n * alone
        return total

    @property
    def keys_alone(self) -> int:
        return sum(self.blocks) * self.plan.context_len * self.plan.shape.head_chunks


def cascade_layout(
    shape: AttnShape,
    requests: int,
    prefix: int,
    suffix: int,
    compute_units: int = 64,
    dtype: str = "f16",
    kind: str = "discrete",
    page_size: int = 256,
) -> Cascade:
    """``requests`` sequences of prefix + suffix keys that share the pages of the prefix, as ``Attention`` cuts them."""
    check_int("requests", requests, 1)
    check_int("prefix", prefix, 0, MAX_CONTEXT)
    check_int("suffix", suffix, 0, MAX_CONTEXT - prefix)
    plan = plan_splits(prefix + suffix, shape, compute_units, dtype, 1, kind)
    most = kernels.shared_rows(kind, shape)
    keys = prefix // page_size * page_size if suffix else prefix
    shared = keys // plan.unit_keys * plan.unit_keys
    if plan.states < 2 or not shared:
        most = 1
    room = SCRATCH_BYTES // (4 * shape.q_heads * (shape.head_dim + 2)) // max(plan.states, 1)
    room = max(min(room, GRID // plan.num_splits), 1)
    whole, rest = divmod(requests, room)
    return Cascade(plan, most, shared, (room,) * whole + (rest,) * (rest > 0), compute_units, kind)


@dataclass(frozen=True)
class CascadePrediction:
    """A modelled decode call of requests that share a prefix, with sharing (total_us) and without (alone_us)."""

    card: str
    shape: str
    dtype: str
    requests: int
    prefix: int
    suffix: int
    rows_each: int
    keys_read: int
    keys_alone: int
    total_us: float
    alone_us: float

    @property
    def pays(self) -> bool:
        """Sharing takes less time."""
        return self.total_us < self.alone_us

    @property
    def speed_up(self) -> float:
        return self.alone_us / self.total_us

    def to_dict(self) -> dict[str, Any]:
        """JSON-able, with the label."""
        found = asdict(self) | {"pays": self.pays, "speed_up": self.speed_up}
        return {"label": LABEL} | {k: round(v, 4) if isinstance(v, float) else v for k, v in found.items()}


def predict_cascade(
    shape: AttnShape, card: Card, requests: int, prefix: int, suffix: int, dtype: str = "f16", page_size: int = 256
) -> CascadePrediction:
    """The time of ``requests`` rows on ``card``: the shared keys first, then each request's own."""
    found = cascade_layout(shape, requests, prefix, suffix, card.compute_units, dtype, "discrete", page_size)
    return CascadePrediction(
        card=card.title,
        shape=str(shape),
        dtype=dtype,
        requests=requests,
        prefix=prefix,
        suffix=suffix,
        rows_each=found.rows_each(found.blocks[0]) if found.shared(found.blocks[0]) else 1,
        keys_read=found.keys_read,
        keys_alone=found.keys_alone,
        total_us=sum(_batch_us(found, n, prefix, card, dtype) for n in found.blocks),
        alone_us=sum(_batch_us(replace(found, most=1), n, prefix, card, dtype) for n in found.blocks),
    )


def _batch_us(batch: Cascade, n: int, prefix: int, card: Card, dtype: str) -> float:
    """One submission of ``n`` requests: pass 1 of the shared items, a gap, pass 1 of the others, pass 2.

    K and V that are read again come CACHED_RATE times faster where the caches hold the prefix and the states; shared
    items of the same keys lie side by side and always find them there.
    """
    plan, shape = batch.plan, batch.plan.shape
    whole = replace(plan, q_len=n)
    key_bytes, rate = shape.kv_bytes_per_token(dtype), card.bandwidth * 1e3 * READ_EFFICIENCY
    caches = (card.l2_mib + card.infinity_mib) * 2**20
    distinct = key_bytes * (prefix + n * (plan.context_len - prefix))
    written = whole.scratch_bytes
    written = int(written / CACHED_RATE) if distinct + written <= caches else written
    build: kernels.Build = "single" if plan.unit_leaves == 1 else "loop"
    again = 1 / CACHED_RATE if key_bytes * prefix + whole.scratch_bytes <= caches else 1.0
    shared, groups = batch.shared(n) // LEAF, -(-n // batch.rows_each(n))
    left = prefix - batch.shared(n)  # of the prefix, read by each request
    states_per_leaf = written / max(n * -(-plan.context_len // LEAF), 1)
    time, leaves = START_US, 0.0
    if shared:
        vectors = shape.group * batch.rows_each(n)
        sizes = [plan.unit_leaves] * (shared // plan.unit_leaves * groups * shape.kv_heads)
        nbytes = key_bytes * batch.shared(n) * (1 + (groups - 1) / CACHED_RATE) + states_per_leaf * shared * n
        leaf = _vectors_cost(shape.head_dim, vectors, card, dtype, build)
        slots = card.waves(_vgprs(shape.head_dim, vectors, build, dtype))
        work = _spread(sizes, leaf, slots, card, nbytes / sum(sizes))
        time, leaves = time + _stretched(work.demand, rate), max(leaves, work.leaves)
    ranges = [(max(a, shared), b) for a, b in plan.leaf_ranges()]
    sizes = [b - a for a, b in ranges if b > a] * (n * shape.kv_heads * shape.head_chunks)
    if sizes:
        own = n * (plan.context_len - prefix)
        nbytes = key_bytes * (own + left * (1 + (n - 1) * again))
        nbytes += states_per_leaf * n * (-(-plan.context_len // LEAF) - shared)
        leaf = leaf_cost(shape, card, dtype, plan.build)
        slots = card.waves(_vgprs(shape.head_dim, shape.heads_per_workgroup, plan.build))
        work = _spread(sizes, leaf, slots, card, nbytes / sum(sizes))
        time += GAP_US * (shared > 0)  # both write into one buffer of states
        time, leaves = time + _stretched(work.demand, rate), max(leaves, work.leaves)
    steps = max(1, round(leaves / plan.unit_leaves))
    return time + (_merge_us(whole, card, distinct, steps) if plan.passes == 2 else 0.0)


# --- one sequence on several cards -----------------------------------------------------------------------------
@dataclass(frozen=True)
class Link:
    """Between shards. hosts: the shards are on hosts of their own; else latency and rate are the bus of each card."""

    title: str
    latency_us: float
    gb_s: float
    hosts: bool = True


LINKS: Final = {
    "pcie5": Link("PCIe 5.0 x16", 5.0, 50.0, hosts=False),
    "10gbe": Link("10 Gb Ethernet", 30.0, 1.25),
    "25gbe": Link("25 Gb Ethernet", 30.0, 3.125),
    "100gbe": Link("100 Gb Ethernet", 30.0, 12.5),
}


def find_link(name: str) -> Link:
    """A link by name. ArgumentError lists them."""
    if name not in LINKS:
        raise ArgumentError(f"link: got {name!r}, expected one of {', '.join(LINKS)}")
    return LINKS[name]


@dataclass(frozen=True)
class ShardPrediction:
    """A modelled decode call on ``shards`` cards, beside one card that holds all (one_us).

    pass1_us: of the shard with most nodes; down_us: its partial states to the host; gather_us: those of the others to
    one host; up_us: all of them to the card that folds; fold_us: pass 2 there. received_bytes: by one host or process.
    """

    card: str
    link: str
    shape: str
    dtype: str
    context: int
    shards: int
    nodes: int
    received_bytes: int
    pass1_us: float
    down_us: float
    gather_us: float
    up_us: float
    fold_us: float
    one_us: float

    @property
    def total_us(self) -> float:
        return self.pass1_us + self.down_us + self.gather_us + self.up_us + self.fold_us

    @property
    def pays(self) -> bool:
        """The shards take less time than one card."""
        return self.total_us < self.one_us

    def to_dict(self) -> dict[str, Any]:
        """JSON-able, with the label."""
        found = asdict(self) | {"total_us": self.total_us, "pays": self.pays}
        return {"label": LABEL} | {k: round(v, 4) if isinstance(v, float) else v for k, v in found.items()}


def predict_shards(
    context: int, shape: AttnShape, card: Card, shards: int, link: Link, dtype: str = "f16"
) -> ShardPrediction:
    """``context`` keys on ``shards`` cards alike, whose nodes' partial states are gathered once and folded."""
    check_int("shards", shards, 1)
    nodes = -(-context // KEYS_PER_NODE)
    most = -(-nodes // shards)
    state = 4 * shape.q_heads * (shape.head_dim + 2)
    mine, whole, others = most * state, nodes * state, (nodes - nodes // shards) * state
    local = SplitPlan.fixed(min(context, most * KEYS_PER_NODE), shape, split_size=KEYS_PER_NODE)
    bus = LINKS["pcie5"]
    us = 1e-3  # per byte at 1 GB/s
    return ShardPrediction(
        card=card.title,
        link=link.title,
        shape=str(shape),
        dtype=dtype,
        context=context,
        shards=shards,
        nodes=nodes,
        received_bytes=others,
        pass1_us=predict(local, card, dtype).pass1_us,
        down_us=bus.latency_us + mine * us * (1 / bus.gb_s + 1 / HOST_COPY_GB_S),
        gather_us=link.latency_us * (shards - 1).bit_length() + others * us / link.gb_s if link.hosts else 0.0,
        up_us=bus.latency_us + whole * us * (1 / bus.gb_s + 1 / HOST_COPY_GB_S),
        fold_us=_merge_us(SplitPlan.fixed(context, shape, split_size=KEYS_PER_NODE), card, 0, 1),
        one_us=predict(plan_splits(context, shape, card.compute_units, dtype), card, dtype).total_us,
    )


def pays_from(shape: AttnShape, card: Card, shards: int, link: Link, dtype: str = "f16") -> int | None:
    """The least context from which on shards take less time than one card, of the powers of two from 1k to 16m keys."""
    found = None
    for exponent in range(24, 9, -1):
        if not predict_shards(1 << exponent, shape, card, shards, link, dtype).pays:
            break
        found = 1 << exponent
    return found


# --- the review's own model: what its program prints (flash-decoding-review-zh.txt) ----------------------------
def utilisation(workgroups: int, units: int) -> float:
    """Share of the compute units that get a workgroup."""
    return min(1.0, workgroups / units)


def review_splits(blocks: int, units: int, context: int, least_keys: int = 128) -> int:
    """Splits that just fill the units, of at least ``least_keys`` keys; ``blocks``: batch x query heads."""
    return 1 if blocks >= units else min(-(-units // blocks), max(1, context // least_keys))


@dataclass(frozen=True)
class ReviewRow:
    """One configuration in the review's model: plain flash attention (one block per query head) and split."""

    plain_utilisation: float
    splits: int
    blocks: int
    split_utilisation: float
    plain_us: float
    split_us: float  # without the reduction
    reduction_us: float

    @property
    def speed_up(self) -> float:
        return self.plain_us / (self.split_us + self.reduction_us)

    @property
    def reduction_share(self) -> float:
        return self.reduction_us / (self.split_us + self.reduction_us)


def review(shape: AttnShape, context: int, card: Card = CARDS["a100"], batch: int = 1, lse_bytes: int = 4) -> ReviewRow:
    """KV bytes over bandwidth x utilisation, the reduction a read of float16 partial states. lse_bytes: of a state."""
    blocks, rate = batch * shape.q_heads, card.bandwidth * 1e3
    splits = review_splits(blocks, card.compute_units, context)
    plain, split = (utilisation(n, card.compute_units) for n in (blocks, blocks * splits))
    read = context * shape.kv_bytes_per_token("f16") / rate  # the review counts one sequence
    reduction = splits * shape.q_heads * (2 * shape.head_dim + lse_bytes) / rate
    return ReviewRow(plain, splits, blocks * splits, split, read / plain, read / split, reduction)
