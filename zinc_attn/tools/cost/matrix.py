"""Pass 1 with matrix units: what a leaf costs a workgroup, and what all workgroups cost a card.

The instruction counts are those of the kernel as RADV compiles it for gfx1201; a test compares them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Final, NamedTuple

from ...canonical.constants import KEYS_PER_LEAF, LEAVES_PER_NODE
from ...errors import ArgumentError
from ...kernels.matrix import PIECE, MatrixFacts, MatrixTile, MatrixWorkgroup, shared_bytes
from ...limits import WAVE
from ...shapes import AttnShape
from .assumptions import BARRIER_WAIT, LDS_WAIT, MEMORY_WAITS, TRIP_CYCLES
from .cards import Card
from .pass1 import SIMDS, Load, Spread, simd_groups

SIDE: Final = 16  # of a tile, in each of its three sizes
TILE: Final = MatrixTile(SIDE, SIDE, SIDE)
RDNA4_UNITS: Final = MatrixFacts(TILE, 64 << 10, 1024)  # what RADV of a Mesa that offers them tells of matrix units


class MatrixCounts(NamedTuple):
    """What a leaf costs a wave beside its products, in parts, or how many of them a leaf has.

    chunk: 8 values of K or V that a lane carries to shared memory; score: of a vector and a key, for a lane; piece: 64
    dimensions of K or V, which go through shared memory one after another.
    """

    chunk: float
    score: float
    piece: float

    def of(self, group: MatrixGroup) -> float:
        """The cost of a leaf of this workgroup."""
        return sum(cost * count for cost, count in zip(self, group.parts, strict=True))


# Fitted to gfx1201's programs of 64, 32 and 16 vectors at five head sizes, float16 (tests/matrix_program.py), as Mesa
# 25.0.7 makes them: it gives a wave two copies of each factor's tile, as RDNA3 needs and RDNA4 does not.
ISSUE: Final = MatrixCounts(19.0, 40.3, 87.0)  # cycles in which the wave issues instructions
LDS_WAITS: Final = MatrixCounts(0.0, 1.3, 9.5)  # times that the wave waits for shared memory
SCALAR_WAITS: Final = 6  # of a leaf, for work words and the page table
PIECE_BARRIERS, LEAF_BARRIERS = 2, 5  # of a piece of K or V, and beside those
Q_ISSUE, EMIT_ISSUE = 70, 60  # cycles of a trip that carries 2 values of q, or writes 2 of a state
TOTAL_ISSUE = 20  # more, where the trip reads a total and merges the state into it
VGPRS: Final = {128: 240, 256: 192}  # by dimensions of K, rounded up; larger heads have the last


@dataclass(frozen=True)
class MatrixGroup:
    """A workgroup of pass 1 with matrix units, which attends one leaf after another.

    sharers: workgroups, neighbors in the grid, that read the same keys.
    """

    card: Card
    shape: AttnShape
    workgroup: MatrixWorkgroup
    sharers: int = 1

    @classmethod
    def of(cls, card: Card, shape: AttnShape, workgroup: MatrixWorkgroup, rows: int) -> MatrixGroup:
        """One of the workgroups of ``rows`` neighboring rows. ArgumentError for other cards than RDNA4's."""
        if not card.matrix_flops:
            raise ArgumentError(f"card: got {card.title} with arithmetic 'matrix', expected one of RDNA4")
        items = -(-rows // workgroup.rows(shape.group))
        return cls(card, shape, workgroup, items * workgroup.blocks(shape.group))

    @property
    def vectors(self) -> int:
        """Query vectors of the workgroup."""
        return self.workgroup.vectors

    @property
    def waves(self) -> int:
        """Waves of the workgroup."""
        return self.workgroup.size // WAVE

    @property
    def vgprs(self) -> int:
        """Vector registers of a wave."""
        return VGPRS[min((dims for dims in VGPRS if dims >= self.shape.k_dim), default=max(VGPRS))]

    @cached_property
    def parts(self) -> MatrixCounts:
        """What a leaf has beside its products."""
        pieces, lanes = sum(-(-dims // PIECE) for dims in (self.shape.k_dim, self.shape.v_dim)), self.workgroup.size
        return MatrixCounts(pieces * KEYS_PER_LEAF * PIECE / 8 / lanes, self.vectors * KEYS_PER_LEAF / lanes, pieces)

    @property
    def products(self) -> float:
        """Products of tiles that a wave makes for a leaf: q by K, and weights by V, whose last piece is whole."""
        tiles = -(-self.shape.k_dim // SIDE) + -(-self.shape.v_dim // PIECE) * PIECE // SIDE
        return self.vectors / SIDE * (KEYS_PER_LEAF // SIDE) * tiles / self.waves

    @cached_property
    def issue(self) -> float:
        """Cycles of a leaf that the wave takes from its SIMD: products, and then the other instructions."""
        return self.products * 2 * SIDE**3 * self.card.simds / self.card.matrix_flops + ISSUE.of(self)

    @cached_property
    def stall(self) -> float:
        """Cycles of a leaf in which the wave waits, while nothing is saturated.

        Of the workgroups side by side one waits for memory, the others for a cache that has K or V by then.
        """
        ns = (self.card.latency_ns + (self.sharers - 1) * self.card.near_ns) / self.sharers
        barriers = PIECE_BARRIERS * self.parts.piece + LEAF_BARRIERS
        scalar, shared = TRIP_CYCLES * SCALAR_WAITS, LDS_WAIT * LDS_WAITS.of(self)
        return ns * self.card.clock_ghz * MEMORY_WAITS + scalar + shared + BARRIER_WAIT * barriers

    def item(self, nodes: int = 1) -> tuple[float, float]:
        """(cycles of waiting, issue cycles) of a wave for q and ``nodes`` states of an item, in trips.

        A trip carries two values of a lane and waits once: for q, for the place of a state, or for a total.
        """
        pairs = self.vectors / 2 / self.workgroup.size
        q, state = pairs * self.shape.k_dim, pairs * self.shape.v_dim * nodes
        merged = pairs * self.shape.v_dim * (nodes - 1)
        wait = self.card.near_ns * self.card.clock_ghz + TRIP_CYCLES
        return (q + state) * wait, Q_ISSUE * q + EMIT_ISSUE * state + TOTAL_ISSUE * merged

    @property
    def resident(self) -> int:
        """Workgroups that a pair of compute units holds, by registers and by shared memory."""
        by_registers = self.card.waves(self.vgprs) * SIMDS // self.waves
        pair = self.card.lds_kib * 1024 * SIMDS // self.card.simds
        by_memory = pair // shared_bytes(self.shape, self.vectors, self.workgroup.unrolled)
        return max(1, min(by_registers, by_memory))

    def _load(self, sizes: tuple[int, ...]) -> Load:
        """Workgroups with ``sizes`` leaves on a pair of compute units, which holds as many as fit at a time.

        Each waits and issues in turn; waves fill each other's waits until the issue slots are full.
        """
        resident, leaves = min(len(sizes), self.resident), sum(sizes)
        items = [self.item(-(-size // LEAVES_PER_NODE)) for size in sizes]
        alone = [size * (self.stall + self.issue) + sum(item) for size, item in zip(sizes, items, strict=True)]
        issued = self.waves / SIMDS * (leaves * self.issue + sum(issue for _, issue in items))
        return max(*alone, sum(alone) / resident, issued), issued, max(*sizes, leaves / resident)

    def spread(self, sizes: list[int], nbytes: float) -> Spread:
        """Workgroups of ``sizes`` leaves, which move ``nbytes``, dealt over the card's pairs of compute units."""
        pairs = simd_groups(self.card)
        return Spread.of(self.card, [sizes[i::pairs] for i in range(min(pairs, len(sizes)))], self._load, nbytes)
