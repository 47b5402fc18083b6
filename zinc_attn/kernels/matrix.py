"""Sizes of pass 1 with matrix units: how many query vectors a workgroup serves. No size changes a bit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from .. import limits
from ..canonical.constants import CHUNK, KEYS_PER_LEAF, WEIGHT_PARTIALS
from .formulas import Formulas

if TYPE_CHECKING:
    from ..shapes import AttnShape

PIECE: Final = 64  # dimensions of K or V in shared memory
HELD_DIMS: Final = 128  # dimensions of q that a GPU's subgroup holds in registers; more lie in shared memory
LEAST_VECTORS: Final = 8  # query vectors of a workgroup by matrix units, a power of two
MOST_VECTORS: Final = 64  # of a workgroup by matrix units
MAX_WORKGROUP_SIZE: Final = KEYS_PER_LEAF * PIECE // CHUNK  # each lane carries 8 values of a piece at least
FRAGMENT_SIZES: Final = (8, 16)  # sides of a fragment
MATRIX_VECTORS: Final = 16  # rows of a sequence times heads of a KV head from which matrix units attend them
MATRIX_GAIN: Final = 4  # products that matrix units make in a second, as a multiple of what lanes make
HALF_MAX: Final = 65504.0  # the largest float16


# A workgroup of VECTORS query vectors, as shaders/attend/attend_matrix.comp and attend_units.comp (INTEGER) declare it.
# The waves of a strip are as many as leave registers for several waves.
WORKGROUP_RULE: Final = Formulas(
    {
        "STRIP_WAVES": (
            "1 if V_DIM <= 64 else 2 if V_DIM <= (256 if INTEGER == 1 else 128) else 4",
            "subgroups that share a strip of MAT_M vectors",
        ),
        "SIZE": ("WAVE * (VECTORS // MAT_M) * STRIP_WAVES", "invocations"),
        "Q_BLOCKS": ("(K_DIM + BLOCK - 1) // BLOCK", "blocks of a row of q"),
        "SCALES": ("(V_DIM + BLOCK - 1) // BLOCK * KEYS_PER_LEAF", "scales of V in a leaf"),
        "Q_BYTES": (
            "16 if UNROLLED == 1 and K_DIM <= HELD_DIMS else "
            "2 * VECTORS * (Q_BLOCKS * BLOCK + 16 if INTEGER == 1 else K_DIM + 8)",
            "bytes of q in shared memory; 16 where registers hold q",
        ),
        "REDUCED": (
            "PIECE // BLOCK * KEYS_PER_LEAF if VECTORS < WAVE else VECTORS * WEIGHT_PARTIALS",
            "floats of K's scales, and of maxima and sums",
        ),
        "INTEGER_BYTES": (
            "(KEYS_PER_LEAF + 2 * PIECE // BLOCK * VECTORS) * (PIECE + 16) + 4 * (SCALES + REDUCED + 7 * VECTORS)",
            "bytes of a piece of K or V, of weights as integers, of scales and sums",
        ),
        "HALF_BYTES": (
            "2 * KEYS_PER_LEAF * (PIECE + 8) + 4 * VECTORS * (KEYS_PER_LEAF + 4) + 4 * VECTORS * (WEIGHT_PARTIALS + 6)",
            "bytes of a piece of K or V, of scores, maxima and sums",
        ),
        "SHARED_BYTES": ("Q_BYTES + (INTEGER_BYTES if INTEGER == 1 else HALF_BYTES)", "shared memory"),
        "WALKS": (
            "2 * (65536 // SHARED_BYTES if SHARED_BYTES <= 65536 else 1)",
            "workgroups, for every compute unit, that keep a device busy without splits: twice as many as 64 KiB hold",
        ),
        "FITS": (
            "VECTORS % MAT_M == 0 and SIZE <= MAX_WORKGROUP_SIZE and SIZE <= INVOCATIONS and SHARED_BYTES <= SHARED",
            "whether the device has room for the workgroup",
        ),
    },
    ("K_DIM", "V_DIM", "VECTORS", "MAT_M", "UNROLLED", "INTEGER", "SHARED", "INVOCATIONS"),
    {
        "WAVE": limits.WAVE,
        "BLOCK": limits.BLOCK,
        "KEYS_PER_LEAF": KEYS_PER_LEAF,
        "WEIGHT_PARTIALS": WEIGHT_PARTIALS,
        "PIECE": PIECE,
        "HELD_DIMS": HELD_DIMS,
        "MAX_WORKGROUP_SIZE": MAX_WORKGROUP_SIZE,
    },
)


class MatrixFragment(NamedTuple):
    """A shape of products with sums that a subgroup makes: (m, k) by (k, n)."""

    m: int
    n: int
    k: int


class MatrixFacts(NamedTuple):
    """Limits of a device's matrix units and workgroups. fragment, int8: shapes of float16 products with float32 sums,
    and of int8 with int32; None without VK_KHR_cooperative_matrix. max_invocations: of a workgroup, all along x."""

    fragment: MatrixFragment | None
    shared_bytes: int
    max_invocations: int
    int8: MatrixFragment | None = None


NO_MATRICES: Final = MatrixFacts(None, 16384, 128)  # and the least that Vulkan allows


class MatrixWorkgroup(NamedTuple):
    """vectors: query vectors; size: invocations; unrolled: a longer program, which keeps matrices in registers;
    waves: subgroups are waves, so each has its part of the work; walks: see ``WORKGROUP_RULE``."""

    vectors: int
    size: int
    unrolled: bool
    waves: bool
    walks: int

    def rows(self, group: int) -> int:
        """Query rows of an item, for ``group`` heads per KV head; where these are too many, grid z has the others."""
        return max(self.vectors // group, 1)

    def blocks(self, group: int) -> int:
        """Workgroups of an item, which share its vectors out."""
        return -(-self.rows(group) * group // self.vectors)


def best_fragment(fragments: list[MatrixFragment]) -> MatrixFragment | None:
    """The fragment that the kernels use: the fitting one with the most products; None where no fragment fits."""
    fitting = [fragment for fragment in fragments if all(side in FRAGMENT_SIZES for side in fragment)]
    return max(fitting, key=lambda fragment: (fragment.m * fragment.n * fragment.k, fragment.m), default=None)


def matrix_workgroup(
    shape: AttnShape, facts: MatrixFacts, kind: str, vectors: int, integer: bool = False
) -> MatrixWorkgroup | None:
    """The workgroup that serves ``vectors`` query vectors, or as many of them as fit; None where not a strip fits.

    kind: the device's. A CPU has matrices in memory anyway, and takes long to compile the unrolled program.
    integer: whether the arithmetic is "integer". za_units_vectors of the C library makes the same choice.
    """
    fragment = facts.int8 if integer else facts.fragment
    unrolled, workgroup, count = kind != "cpu", None, LEAST_VECTORS
    while fragment is not None and count <= MOST_VECTORS and (workgroup is None or workgroup.vectors < vectors):
        room = facts.shared_bytes, facts.max_invocations
        sizes = WORKGROUP_RULE.values(shape.k_dim, shape.v_dim, count, fragment.m, int(unrolled), int(integer), *room)
        if sizes["FITS"]:
            workgroup = MatrixWorkgroup(count, sizes["SIZE"], unrolled, kind != "cpu", sizes["WALKS"])
        count *= 2
    return workgroup
