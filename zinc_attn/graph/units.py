"""The tiles of products by int8 matrix units. None of this shows in the bits."""

from __future__ import annotations

from ..kernels.matrix import MatrixFragment
from ..limits import WAVE
from .constants import SUPERBLOCK
from .pieces import TYPES


def tile_of_units(kind: str, mat: MatrixFragment, subgroup: int = WAVE, on_cpu: bool = False) -> tuple[int, ...] | None:
    """Constants of MUL_MAT_UNITS between type and add, for a large product; None where a shape has not the type.

    A subgroup has as many matrices as its registers hold sums of. native/ggml/products.cpp has the same rule.
    """
    weights = TYPES[kind]
    if weights.halves and mat.k > 16:  # a product of 32 values has two sums
        return None
    two_sums = weights.minimum and weights.values == SUPERBLOCK  # an output has that of the minima, too
    across, own = (2, 2) if on_cpu else (4, 2), (2, 2) if on_cpu or two_sums else (2, 4)
    return mat.m * own[0] * across[0], mat.n * own[1] * across[1], *own, subgroup * across[0] * across[1], *mat
