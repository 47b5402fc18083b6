"""Pass 1: what a leaf costs a wave, and what all workgroups cost a card.

The instruction counts are those of the kernels as RADV compiles them for gfx1201; a test compares them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from ...canonical.constants import KEYS_PER_LEAF, LEAVES_PER_NODE
from ...kernels import declarations as kernels
from ...kernels.sizes import keys_ahead, value_passes
from ...kernels.tuning import LayoutFacts, chunks_ahead, heads_together, node_heads, node_shared_bytes
from ...planning.arithmetic import Arithmetic
from ...planning.splits import SplitPlan
from ...shapes import AttnShape
from ...storage import storage_types
from .assumptions import FOLD_CYCLES, GAP_US, KNEE, LATENCY_NS, LEAF_CYCLES, START_US, TRIP_CYCLES
from .cards import Card

SIMDS: Final = 4  # over which a workgroup of several waves lies: two compute units
SHARED_VGPRS: Final = {"single": 240, "node": 256, "loop": 240}  # at most, with more than 8 query vectors
NODE_PASSES_VGPRS: Final = 192  # of the node build with several passes over V

# By arithmetic and (head_dim, query vectors): issue cycles per key of the main loops (single, loop), VGPRs (single,
# loop); float16. The node build has single's; of more than 8 vectors, which rows share, the first ones are node's.
ISSUE: Final = {
    "canonical": {
        (256, 16): (322, 324, 256, 216),
        (256, 8): (163, 168, 120, 168),
        (256, 6): (128, 128, 120, 168),
        (256, 4): (89, 91, 120, 120),
        (256, 2): (57, 56, 96, 96),
        (128, 8): (82, 82, 120, 168),
        (128, 4): (47, 49, 96, 120),
        (64, 8): (44, 44, 96, 120),
        (64, 3): (21, 22, 96, 96),
        (512, 4): (180, 182, 120, 168),
    },
    "fused": {
        (256, 16): (180, 182, 240, 216),
        (256, 8): (101, 104, 120, 168),
        (256, 6): (81, 82, 120, 144),
        (256, 4): (60, 62, 120, 120),
        (256, 2): (42, 42, 96, 96),
        (128, 8): (53, 54, 120, 120),
        (128, 4): (32, 32, 96, 96),
        (64, 8): (29, 29, 96, 120),
        (64, 3): (15, 16, 96, 96),
        (512, 4): (119, 123, 120, 168),
    },
}
# Lines through them: cycles per key are dims * (slope * vectors + conversions) + more, for V of K's size.
LINES: Final = {"canonical": (0.0691, 0.0692, 2.97), "fused": (0.0393, 0.0675, 3.55)}
# Issue cycles that 32 values of K, and of V, take more than float16's to become float32: of (256, 8), means over the
# single and the loop build and both arithmetics.
STORAGE_ISSUE: Final = {
    "f32": (-1.2, -0.3),
    "f16": (0.0, 0.0),
    "bf16": (-0.6, -0.4),
    "q8_0": (0.3, 1.7),
    "fp8_e4m3": (0.9, 1.3),
    "q5_1": (1.3, 2.8),
    "q5_0": (1.3, 2.7),
    "q4_1": (-0.3, 1.3),
    "q4_0": (-0.2, 1.4),
    "iq4_nl": (3.6, 5.0),
}


def issue_per_key(
    shape: AttnShape, vectors: int, build: kernels.Build, dtype: str = "f16", arithmetic: Arithmetic = "canonical"
) -> float:
    """Issue cycles of a workgroup's main loops per key: the table's, or a line's through it, half K's and half V's."""
    if row := _measured(shape, vectors, arithmetic):
        cycles: float = row[build == "loop"]
    else:
        slope, conversions, more = LINES[arithmetic]
        cycles = (shape.k_dim + shape.v_dim) / 2 * (slope * vectors + conversions) + more
    k, v = storage_types(dtype)
    return cycles + (shape.k_dim * STORAGE_ISSUE[k.name][0] + shape.v_dim * STORAGE_ISSUE[v.name][1]) / 32


def _measured(shape: AttnShape, vectors: int, arithmetic: Arithmetic) -> tuple[int, int, int, int] | None:
    """The table's row of a variant whose V has the size of its K."""
    return ISSUE[arithmetic].get((shape.k_dim, vectors)) if shape.v_dim == shape.k_dim and not shape.latent else None


@dataclass(frozen=True)
class Spread:
    """Workgroups as they lie on the card's SIMDs.

    demand: (µs that some SIMDs would take alone, their bytes). issue_us: arithmetic of the busiest SIMD. leaves: that
    one wave attends one after another.
    """

    card: Card
    demand: list[tuple[float, float]]
    issue_us: float
    leaves: float

    @property
    def alone_us(self) -> float:
        """Time of the slowest SIMD if memory were infinitely wide."""
        return max((us for us, _ in self.demand), default=0.0)

    @property
    def us(self) -> float:
        """SIMDs run at their own speed until together they ask for more than memory gives.

        Between two finishing times the bytes asked for per µs are constant; time stretches by (1 + x**p)**(1/p), where
        x is their ratio to the read rate. Uneven splits are slow because few SIMDs ask for little at the end.
        """
        time, begin = 0.0, 0.0
        for end in sorted({us for us, _ in self.demand}):
            asked = sum(nbytes / us for us, nbytes in self.demand if us >= end)
            time += (end - begin) * (1 + (asked / self.card.read_rate) ** KNEE) ** (1 / KNEE)
            begin = end
        return time


def dispatches_us(spreads: list[Spread], again_us: float) -> float:
    """The launch and dispatches one after another, beside ``again_us`` in which the L2 gives them keys again."""
    busy = sum(one.us for one in spreads)
    bent: float = (busy**KNEE + again_us**KNEE) ** (1 / KNEE)
    return START_US + GAP_US * (len(spreads) - 1) + bent


@dataclass(frozen=True)
class Workgroup:
    """A workgroup of pass 1, whose waves attend ``vectors`` query vectors to one leaf after another.

    The vectors are query heads of one row, or of several rows that share the keys. The node build has eight waves to a
    workgroup, with a leaf each; the others have one.
    """

    card: Card
    shape: AttnShape
    vectors: int
    build: kernels.Build
    dtype: str
    arithmetic: Arithmetic = "canonical"

    @classmethod
    def of(cls, plan: SplitPlan, card: Card, dtype: str, arithmetic: Arithmetic = "canonical") -> Workgroup:
        """The workgroup of a row that shares its keys with no other, in the build that the card runs."""
        build = plan.build_on(LayoutFacts(card.compute_units), dtype)
        most = node_heads(build, plan.shape, plan.states * plan.q_len, card.compute_units, card.lds_kib << 10)
        return cls(card, plan.shape, heads_together(build, "discrete", plan.shape, most), build, dtype, arithmetic)

    @property
    def vgprs(self) -> int:
        """Vector registers, from the table where it has the variant."""
        if row := _measured(self.shape, self.vectors, self.arithmetic):
            return row[2 + (self.build == "loop")]
        if self.vectors > 8:
            return SHARED_VGPRS[self.build]
        if self.build == "node" and value_passes(self.shape, self.vectors) > 1:
            return NODE_PASSES_VGPRS
        return 168 if self.shape.v_dim * self.vectors > 1024 and self.build == "loop" else 120

    @cached_property
    def trips(self) -> int:
        """Trips of a leaf's main loops, each of which waits for memory once.

        A trip of the K loop loads ``chunks_ahead`` chunks of 64 keys, a trip of the V loop 2 to 8 rows.
        """
        passes = value_passes(self.shape, self.vectors)
        keys = -(-self.shape.k_dim // (8 * chunks_ahead("discrete", self.shape.k_dim)))
        values = passes * KEYS_PER_LEAF // keys_ahead("discrete", self.shape, self.vectors, self.build, self.dtype)
        between = passes if passes > 1 and self.build == "loop" else 0  # the node's sums so far come from memory
        return keys + values + between

    @cached_property
    def issue(self) -> float:
        """Cycles of a leaf in which the wave issues instructions."""
        per_value = 0.15 if self.build == "loop" else 0.08
        beside = self.vectors * (1.1 + per_value * self.shape.value_slice)  # softmax, fold, emit
        loops = issue_per_key(self.shape, self.vectors, self.build, self.dtype, self.arithmetic)
        return KEYS_PER_LEAF * (loops + beside)

    @cached_property
    def stall(self) -> float:
        """Cycles of a leaf in which the wave waits, while memory is not saturated."""
        rounds = self.shape.value_slice // (2 if value_passes(self.shape, self.vectors) == 1 else 1)
        fold = FOLD_CYCLES * rounds if self.build == "node" else 0
        return self.trips * (LATENCY_NS * self.card.clock_ghz + TRIP_CYCLES) + LEAF_CYCLES + fold

    @property
    def chunks(self) -> int:
        """Workgroups that share a KV head and its keys."""
        return -(-self.shape.group // self.vectors)

    @property
    def units(self) -> int:
        """Compute units that a workgroup lies on."""
        return SIMDS // self.card.simds if self.build == "node" else 1

    @property
    def resident(self) -> int:
        """Waves that a SIMD holds: as many as its registers do, and, of node workgroups, its share of the LDS."""
        if self.build != "node":
            return self.card.waves(self.vgprs)
        passes = value_passes(self.shape, self.vectors)
        held = self.card.lds_kib * 1024 * SIMDS // self.card.simds // node_shared_bytes(self.vectors, passes)
        return min(self.card.waves(self.vgprs), held * LEAVES_PER_NODE // SIMDS)

    def _dealt(self, sizes: list[int]) -> list[list[int]]:
        """Leaves of the waves of each SIMD: workgroups go round over the SIMDs, those of eight waves over four each."""
        if self.build != "node":
            simds = self.card.all_simds
            return [sizes[i::simds] for i in range(min(simds, len(sizes)))]
        groups = max(1, self.card.all_simds // SIMDS)  # SIMDs that are left over count for nothing
        found: list[list[int]] = [[] for _ in range(groups * SIMDS)]
        for at, leaves in enumerate(sizes):
            for wave in range(leaves):
                found[at % groups * SIMDS + (at // groups + wave) % SIMDS].append(1)
        return [waves for waves in found if waves]

    def spread(self, sizes: list[int], nbytes: float) -> Spread:
        """Workgroups of ``sizes`` leaves, which read and write ``nbytes``, dealt over the card's SIMDs.

        The waves of a SIMD fill each other's waits first, and then the issue slots.
        """
        dealt, cycles_per_us = self._dealt(sizes), self.card.clock_ghz * 1e3
        per_leaf = nbytes / max(sum(map(sum, dealt)), 1)
        demand, busiest, in_turn = [], 0, 0.0
        for waves, simds in Counter(tuple(sorted(waves)) for waves in dealt).items():
            total, resident = sum(waves), min(len(waves), self.resident)
            leaves = max(*waves, total / resident)
            cycles = leaves * max(self.stall + self.issue, resident * self.issue)
            demand.append((cycles / cycles_per_us, simds * total * per_leaf))
            busiest, in_turn = max(busiest, total), max(in_turn, leaves)
        in_turn *= LEAVES_PER_NODE if self.build == "node" else 1  # a workgroup's, of which each wave has one
        return Spread(self.card, demand, busiest * self.issue / cycles_per_us, in_turn)
