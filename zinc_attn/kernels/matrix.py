"""Sizes of pass 1 with matrix units: how many query vectors a workgroup serves. No size changes a bit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from .. import limits
from ..canonical.constants import CHUNK, KEYS_PER_LEAF, WEIGHT_PARTIALS

if TYPE_CHECKING:
    from ..shapes import AttnShape

PIECE: Final = 64  # dimensions of K or V in shared memory
HELD_DIMS: Final = 128  # dimensions of q that a GPU's subgroup holds in registers; more lie in shared memory
# Subgroups that share a strip, by V's size up to a number: as many as leave registers for several waves. INTEGER_WAVES:
# of arithmetic "integer", whose weights are made by four lanes of a vector.
STRIP_WAVES: Final = ((64, 1), (128, 2), (limits.MAX_HEAD_DIM, 4))
INTEGER_WAVES: Final = ((64, 1), (256, 2), (limits.MAX_HEAD_DIM, 4))
VECTORS: Final = (8, 16, 32, 64)  # query vectors of a workgroup
MAX_WORKGROUP_SIZE: Final = (
    KEYS_PER_LEAF * PIECE // CHUNK
)  # of a workgroup: each lane carries 8 values of a piece at least
FRAGMENT_SIZES: Final = (8, 16)  # sides of a fragment
MATRIX_VECTORS: Final = 16  # rows of a sequence times heads of a KV head from which "matrix-prefill" uses matrix units
HALF_MAX: Final = 65504.0  # the largest float16


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
    waves: subgroups are waves, so each has its part of the work."""

    vectors: int
    size: int
    unrolled: bool
    waves: bool

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


def shared_bytes(shape: AttnShape, vectors: int, unrolled: bool, integer: bool = False) -> int:
    """Shared memory of a workgroup, as shaders/attend/attend_matrix.comp and attend_units.comp declare it."""
    held = unrolled and shape.k_dim <= HELD_DIMS
    if integer:
        k_blocks, v_blocks, blocks = (-(-dims // limits.BLOCK) for dims in (shape.k_dim, shape.v_dim, PIECE))
        q = 16 if held else 2 * vectors * (k_blocks * limits.BLOCK + 16)
        rows = (KEYS_PER_LEAF + 2 * blocks * vectors) * (PIECE + 16)
        reduced = blocks * KEYS_PER_LEAF if vectors < limits.WAVE else vectors * WEIGHT_PARTIALS
        return q + rows + 4 * (v_blocks * KEYS_PER_LEAF + reduced + 7 * vectors)
    q = 16 if held else 2 * vectors * (shape.k_dim + 8)
    kv = 2 * KEYS_PER_LEAF * (PIECE + 8)
    scores = 4 * vectors * (KEYS_PER_LEAF + 4)
    return q + kv + scores + 4 * vectors * (WEIGHT_PARTIALS + 6)


def matrix_workgroup(
    shape: AttnShape, facts: MatrixFacts, kind: str, vectors: int, integer: bool = False
) -> MatrixWorkgroup | None:
    """The workgroup that serves ``vectors`` query vectors, or as many of them as fit; None where not a strip fits.

    kind: the device's. A CPU has matrices in memory anyway, and takes long to compile the unrolled program.
    integer: of arithmetic "integer".
    """
    fragment = facts.int8 if integer else facts.fragment
    if fragment is None:
        return None
    waves = next(waves for dims, waves in (INTEGER_WAVES if integer else STRIP_WAVES) if shape.v_dim <= dims)
    unrolled, workgroup = kind != "cpu", None
    for count in VECTORS:
        size = limits.WAVE * (count // fragment.m) * waves
        fits = shared_bytes(shape, count, unrolled, integer) <= facts.shared_bytes
        if count % fragment.m == 0 and size <= min(facts.max_invocations, MAX_WORKGROUP_SIZE) and fits:
            workgroup = MatrixWorkgroup(count, size, unrolled, kind != "cpu")
            if count >= vectors:
                break
    return workgroup
