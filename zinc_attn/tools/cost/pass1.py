"""The cost of pass 1: of a leaf for a wave, and of all workgroups for a card.

The instruction counts are those of the kernels as RADV compiles them for gfx1201; a test compares them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np

from ...canonical.constants import KEYS_PER_LEAF, LEAVES_PER_NODE
from ...kernels.matrix import MOST_VECTORS, PIECE, WORKGROUP_RULE
from ...kernels.sizes import attend_sizes, chunks_ahead, shared_bytes, value_passes
from ...kernels.tuning import heads_together, most_heads
from ...limits import WAVE
from ...planning.arithmetic import Arithmetic
from ...planning.splits import SplitPlan
from ...shapes import AttnShape
from ...storage import storage_types
from .assumptions import FOLD_CYCLES, GAP_US, KNEE, LATENCY_NS, LEAF_CYCLES, START_US, TRIP_CYCLES
from .cards import FRAGMENT, Card

SIMDS: Final = 4  # over which a workgroup lies: a pair of AMD's compute units, or a multiprocessor
SHARED_VGPRS: Final = 256  # at most, with more than 8 query vectors
PASSES_VGPRS: Final = 192  # with several passes over V

# By arithmetic and (head_dim, query vectors): issue cycles per key of the main loops, and VGPRs; float16.
ISSUE: Final = {
    "canonical": {
        (256, 16): (315, 256), (256, 8): (163, 120), (256, 6): (127, 120), (256, 4): (89, 120), (256, 2): (57, 96),
        (128, 8): (82, 120), (128, 4): (47, 96), (64, 8): (43, 96), (64, 3): (21, 96), (512, 4): (178, 120),
    },
    "fused": {
        (256, 16): (182, 240), (256, 8): (101, 120), (256, 6): (82, 120), (256, 4): (60, 120), (256, 2): (41, 96),
        (128, 8): (52, 120), (128, 4): (31, 96), (64, 8): (28, 96), (64, 3): (15, 96), (512, 4): (119, 120),
    },
}  # fmt: skip
# Lines through them: cycles per key are dims * (slope * vectors + conversions) + more, for V of K's size.
LINES: Final = {"canonical": (0.0691, 0.0692, 2.97), "fused": (0.0393, 0.0675, 3.55)}
INTEGER_ISSUE: Final = 1.22  # times fused's, for one row in q8_0
UNITS_ISSUE: Final = {64: 153, 128: 252, 256: 438}  # per key of 64 query vectors by matrix units, by head_dim; q8_0
# Issue cycles beyond float16's of 32 values of K, and of V, to become float32: of (256, 8), means of both arithmetics.
STORAGE_ISSUE: Final = {
    "f32": (-0.7, -0.8), "f16": (0.0, 0.0), "bf16": (-0.5, -0.4), "q8_0": (0.6, 1.6), "fp8_e4m3": (1.3, 1.3),
    "q5_1": (1.6, 2.7), "q5_0": (1.6, 2.8), "q4_1": (0.0, 1.2), "q4_0": (0.1, 1.3), "iq4_nl": (3.9, 4.9),
}  # fmt: skip


def issue_per_key(shape: AttnShape, vectors: int, dtype: str = "f16", arithmetic: Arithmetic = "canonical") -> float:
    """Issue cycles of a workgroup's main loops per key: the table's, or a line's through it, half K's and half V's."""
    if arithmetic == "integer":
        return INTEGER_ISSUE * issue_per_key(shape, vectors, dtype, "fused")
    if row := _measured(shape, vectors, arithmetic):
        cycles: float = row[0]
    else:
        slope, conversions, more = LINES[arithmetic]
        cycles = (shape.k_dim + shape.v_dim) / 2 * (slope * vectors + conversions) + more
    k, v = storage_types(dtype)
    return cycles + (shape.k_dim * STORAGE_ISSUE[k.name][0] + shape.v_dim * STORAGE_ISSUE[v.name][1]) / 32


def _measured(shape: AttnShape, vectors: int, arithmetic: Arithmetic) -> tuple[int, int] | None:
    """The table's row of a variant whose V has the size of its K."""
    return ISSUE[arithmetic].get((shape.k_dim, vectors)) if shape.v_dim == shape.k_dim and not shape.latent else None


@dataclass(frozen=True)
class Spread:
    """Workgroups as they lie on the card's SIMDs.

    demand: (µs that some SIMDs would take alone, their bytes). issue_us: the busiest SIMD's. leaves: most in turn.
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
    """The launch and dispatches one after another, during which the L2 delivers keys again for ``again_us``."""
    busy = sum(spread.us for spread in spreads)
    bent: float = (busy**KNEE + again_us**KNEE) ** (1 / KNEE)
    return START_US + GAP_US * (len(spreads) - 1) + bent


@dataclass(frozen=True)
class Workgroup:
    """A workgroup of pass 1: eight waves, each of which attends ``vectors`` query vectors to a leaf of every node.

    The vectors are query heads of one row, or of several rows that share the keys.
    """

    card: Card
    shape: AttnShape
    vectors: int
    dtype: str
    arithmetic: Arithmetic = "canonical"

    @classmethod
    def of(cls, plan: SplitPlan, card: Card, dtype: str, arithmetic: Arithmetic = "canonical") -> Workgroup:
        """The workgroup of a row that shares its keys with no other."""
        splits = min(plan.num_splits, plan.states)
        most = most_heads(plan.shape, splits * plan.q_len, card.compute_units, card.family.lds_kib << 10)
        return cls(card, plan.shape, heads_together(plan.shape, most), dtype, arithmetic)

    @property
    def vgprs(self) -> int:
        """Vector registers, from the table where it has the variant."""
        if row := _measured(self.shape, self.vectors, self.arithmetic):
            return row[1]
        if self.vectors > 8:
            return SHARED_VGPRS
        return PASSES_VGPRS if value_passes(self.shape, self.vectors) > 1 else 120

    @cached_property
    def trips(self) -> int:
        """Trips of a leaf's main loops, each of which waits for memory once.

        A trip of the K loop loads ``chunks_ahead`` chunks of 64 keys, a trip of the V loop 2 to 8 rows.
        """
        sizes = attend_sizes(self.shape, self.vectors, self.dtype)
        keys = -(-self.shape.k_dim // (8 * chunks_ahead("discrete", self.shape.k_dim)))
        return keys + sizes["VALUE_PASSES"] * KEYS_PER_LEAF // sizes["KEYS_AHEAD"]

    @cached_property
    def issue(self) -> float:
        """Cycles of a leaf in which the wave issues instructions."""
        rest = self.vectors * (1.1 + 0.08 * self.shape.value_slice)  # softmax, fold, emit
        cycles = issue_per_key(self.shape, self.vectors, self.dtype, self.arithmetic) + rest
        return KEYS_PER_LEAF * cycles * self.card.family.issue

    @cached_property
    def stall(self) -> float:
        """Cycles of a leaf in which the wave waits, while memory is not saturated."""
        rounds = self.shape.value_slice // attend_sizes(self.shape, self.vectors, self.dtype)["FOLD_DIMS"]
        return self.trips * (LATENCY_NS * self.card.clock_ghz + TRIP_CYCLES) + LEAF_CYCLES + FOLD_CYCLES * rounds

    @property
    def chunks(self) -> int:
        """Workgroups that share a KV head and its keys."""
        return -(-self.shape.group // self.vectors)

    @property
    def resident(self) -> int:
        """Waves that a SIMD holds: of as many whole workgroups as its registers and its share of the LDS allow."""
        family = self.card.family
        held = (family.lds_kib << 10) * SIMDS // family.simds // shared_bytes(self.shape, self.vectors)
        held = min(held, family.waves(self.vgprs) * SIMDS // LEAVES_PER_NODE)
        return max(1, held * LEAVES_PER_NODE // SIMDS)

    def _leaves(self, leaves: int) -> list[int]:
        """Leaves of each wave of a workgroup."""
        return [-(-(leaves - wave) // LEAVES_PER_NODE) for wave in range(min(leaves, LEAVES_PER_NODE))]

    def _dealt(self, sizes: list[int]) -> list[list[int]]:
        """Leaves of the waves of each SIMD: workgroups go round over the card, each over SIMDS of them."""
        groups = max(1, self.card.all_simds // SIMDS)  # SIMDs that are left over count for nothing
        by_simd: list[list[int]] = [[] for _ in range(groups * SIMDS)]
        for index, leaves in enumerate(sizes):
            for wave, count in enumerate(self._leaves(leaves)):
                by_simd[index % groups * SIMDS + (index // groups + wave) % SIMDS].append(count)
        return [waves for waves in by_simd if waves]

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
        return Spread(self.card, demand, busiest * self.issue / cycles_per_us, in_turn)


@dataclass(frozen=True)
class UnitsWorkgroup(Workgroup):
    """A workgroup of pass 1 with int8 matrix units: all of its waves attend ``vectors`` query vectors to every leaf."""

    size: int = 256  # invocations

    @property
    def _waves(self) -> int:
        return self.size // WAVE

    @cached_property
    def issue(self) -> float:
        dims = (self.shape.k_dim + self.shape.v_dim) / 2
        cycles = float(np.interp(dims, [*UNITS_ISSUE], [*UNITS_ISSUE.values()])) * max(dims / max(UNITS_ISSUE), 1)
        return KEYS_PER_LEAF * cycles * self.vectors / MOST_VECTORS / self._waves

    @cached_property
    def stall(self) -> float:
        pieces = -(-self.shape.k_dim // PIECE) - (-self.shape.v_dim // PIECE)
        return pieces * (LATENCY_NS * self.card.clock_ghz + TRIP_CYCLES) + LEAF_CYCLES

    @property
    def resident(self) -> int:
        facts = self.shape.k_dim, self.shape.v_dim, self.vectors, FRAGMENT.m, 1, 1, 0, 0
        held = WORKGROUP_RULE.values(*facts)["WALKS"] * SIMDS // self.card.family.simds // 2
        return max(1, held * self._waves // SIMDS)

    def _leaves(self, leaves: int) -> list[int]:
        return [leaves] * self._waves
